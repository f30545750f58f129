"""Encoders that tell kinds of tokens apart: the same in MLX, in the reference and in every target's graphs."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
import pytest
from random_models import random_weights, write_model
from small_models import alone, encoder_decoder

from export import OnnxTransformer
from export.validate import compare
from export.validate.reference import Reference
from export.web.models import read_models
from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError

TARGETS = ("portable", "cpu", "web")
IDS = np.array([[5, 6, 7, 2], [9, 10, 2, 0]])
TYPES = np.array([[0, 0, 2, 1], [1, 0, 2, 0]])
MASK = np.array([[True] * 4, [True] * 3 + [False]])


def config_of(name: str = "odd widths") -> TransformerConfig:
    return replace(alone(name, "encoder"), token_types=3)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.from_weights(config_of(), {n: mx.array(x) for n, x in random_weights(config_of(), 3).items()})


def test_a_model_without_them_is_as_it_was() -> None:
    plain = alone("odd widths", "encoder")
    assert "token_types" not in plain.to_dict()
    assert TransformerConfig.from_dict(plain.to_dict()) == plain
    assert config_of().to_dict()["token_types"] == 3
    assert parameter_shapes(config_of()).keys() - parameter_shapes(plain).keys() == {"token_type_embedding.weight"}


@pytest.mark.parametrize("config", [encoder_decoder("paper"), alone("paper", "decoder")])
def test_an_encoder_alone_has_them(config: TransformerConfig) -> None:
    with pytest.raises(UserError, match="token_types=2: an encoder alone tells kinds of tokens apart"):
        replace(config, token_types=2)


def test_the_reference_adds_a_row_for_each_kind() -> None:
    """By hand: rows of the table stand where the embedding is otherwise."""
    config, weights = config_of("untied"), random_weights(config_of("untied"), 3)
    taps = {}
    Reference(config, weights)(IDS, None, MASK, taps.__setitem__, token_types=TYPES)
    embedding, kinds = weights["source_embedding.weight"], weights["token_type_embedding.weight"]
    scale = float(np.float32(config.d_model**0.5)) if config.scale_embeddings else 1.0
    assert config.positions == "none"
    np.testing.assert_allclose(taps["encoder.embedding"], embedding[IDS].astype("f8") * scale + kinds[TYPES])


@pytest.mark.parametrize("kinds", [TYPES, None])
def test_mlx_computes_what_the_reference_does(model: Transformer, kinds: np.ndarray | None) -> None:
    weights = random_weights(config_of(), 3)
    truth, single = (Reference(config_of(), weights, d)(IDS, None, MASK, token_types=kinds) for d in ("f8", "f4"))
    got = np.array(model(IDS, MASK, token_types=kinds))
    assert np.abs(got - truth)[MASK].max() <= 8 * np.abs(single - truth)[MASK].max()


def test_other_kinds_give_other_logits(model: Transformer) -> None:
    zeros, drawn = (np.array(model(IDS, MASK, token_types=kinds)) for kinds in (np.zeros_like(TYPES), TYPES))
    np.testing.assert_array_equal(zeros, np.array(model(IDS, MASK)))
    assert np.abs(zeros - drawn)[MASK].max() > 0.1


@pytest.fixture(scope="module", params=TARGETS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("types")
    return write_model(config_of(), folder, 3, target=request.param)


def test_validate_finds_every_runtime_equal(written: tuple[Path, Path]) -> None:
    report = compare(*written, ["mlx", "onnxruntime"], longest=8, threads=1)
    assert report.equal, (report.seed, report.failures())


def test_what_runs_a_folder_takes_them(written: tuple[Path, Path], model: Transformer) -> None:
    onnx_model = OnnxTransformer(written[1], threads=1)
    for kinds in ({"token_types": TYPES}, {}):
        for method, expected in (("logits", model(IDS, MASK, **kinds)), ("encode", model.encode(IDS, MASK, **kinds))):
            got = getattr(onnx_model, method)(IDS, MASK, **kinds)
            np.testing.assert_allclose(got[MASK], np.array(expected)[MASK], atol=2e-5)


def test_names_that_others_look_for(written: tuple[Path, Path]) -> None:
    graphs = [onnx.load(file, load_external_data=False).graph for file in (written[1] / "onnx").glob("*.onnx")]
    assert [[value.name for value in graph.input] for graph in graphs] == [
        ["input_ids", "attention_mask", "token_type_ids"]
    ]


def test_kinds_that_are_not_read_are_found(tmp_path: Path) -> None:
    """A graph that takes the mask for the kinds: 0 and 1, as they may be."""
    checkpoint, folder = write_model(config_of(), tmp_path, 3)
    file = folder / "onnx/model.onnx"
    graph = onnx.load(file, load_external_data=False)
    (gather,) = [node for node in graph.graph.node if "token_type_ids" in node.input]
    gather.input[list(gather.input).index("token_type_ids")] = "attention_mask"
    onnx.save(graph, file)
    report = compare(checkpoint, folder, ["onnxruntime"], longest=8, threads=1)
    assert not report.equal
    assert next(point.tap for point in report.points if not point.passed) == "encoder.embedding"


def test_wrong_ones_are_refused(model: Transformer, tmp_path: Path) -> None:
    runtimes = [model, OnnxTransformer(write_model(config_of(), tmp_path, 3)[1], threads=1)]
    for kinds, problem in (
        (np.full_like(IDS, 3), r"token_types.* 3 .*outside the vocabulary"),
        (TYPES[:, :3], "token_types"),
        (TYPES / 2, r"token_types.* numbers|token_types: ids must be integers"),
    ):
        for runtime in runtimes:
            with pytest.raises(UserError, match=problem):
                runtime.encode(IDS, token_types=kinds)
    plain, folder = alone("paper", "encoder"), write_model(alone("paper", "encoder"), tmp_path / "plain", 3)[1]
    for runtime in (Transformer(plain), OnnxTransformer(folder, threads=1)):
        with pytest.raises(UserError, match="token_types: the model reads none; leave them out"):
            runtime.encode(IDS, token_types=TYPES)


def test_a_page_has_no_place_for_them(written: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"tokenizer|a page translates"):
        read_models(written[1])
