"""`validate` on encoders alone of target cpu, whose graph has a row for each token: every choice and precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import thinned
from covering_configs import COVERING, config_of, name_of
from random_models import write_model
from small_models import alone, encoder_decoder

from export import OnnxTransformer
from export.interface import DECODER_CPU, ENCODER_CPU, MODEL
from export.validate import compare
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import SOURCE_IDS
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.generation.embed import CACHED_TOKENS, _mixed
from mlx_transformer.system.errors import UserError

ENCODERS = [choice for choice in COVERING if config_of(choice).architecture == "encoder"]
PRECISIONS = ["float32", "float16", "bfloat16", "int8", "int8-weights", "int4"]


def assert_equal(config: TransformerConfig, folder: Path, seed: int = 1) -> None:
    checkpoint, cpu = write_model(config, folder, seed, target="cpu")
    report = compare(checkpoint, cpu, ["onnxruntime"], seed=seed, threads=1)
    assert report.equal, "\n".join([*report.failures(), f"seed {seed}", config.to_json()])


@pytest.mark.slow
@pytest.mark.parametrize("choice", thinned(ENCODERS, 12), ids=name_of)
def test_every_choice(choice: tuple[int, ...], tmp_path: Path) -> None:
    assert_equal(config_of(choice), tmp_path, sum(choice))


def test_every_precision(tmp_path: Path) -> None:
    config = alone("modern", "encoder")
    checkpoint, cpu = write_model(config, tmp_path, 2, target="cpu", precision=PRECISIONS, accept_loss=True)
    report = compare(checkpoint, cpu, [f"onnxruntime:cpu:all:{name}" for name in PRECISIONS], seed=2, threads=1)
    assert report.equal, report.failures()


def test_many_rows_are_divided_as_they_become_integers(tmp_path: Path) -> None:
    """The one row of a decoder's step is divided before. All layers of the encoder have one tensor of zero points."""
    _, cpu = write_model(encoder_decoder("paper"), tmp_path, 2, target="cpu", precision="int8", accept_loss=True)
    for name, by_block in ((ENCODER_CPU, True), (DECODER_CPU, False)):
        graph = onnx.load(cpu / "onnx" / f"{name}_quantized.onnx", load_external_data=False).graph
        quantised = [node for node in graph.node if node.op_type == "QuantizeLinear"]
        assert quantised
        for node in quantised:
            assert by_block is any(attribute.name == "block_size" for attribute in node.attribute)
        operators = [node.op_type for node in graph.node]
        assert operators.count("Div") == (0 if by_block else len(quantised))
        assert (
            operators.count("ConstantOfShape") == 2 * by_block
        )  # rows of the encoder, and what a decoder reads of them


def test_padding_and_neighbours_change_nothing(tmp_path: Path) -> None:
    """To the bit, whatever the lengths in a batch and however far it is padded; on the left by rounding alone."""
    config, rng = alone("paper", "encoder"), np.random.default_rng(0)
    _, cpu = write_model(config, tmp_path, 3, target="cpu", embedding=TextEmbedding(normalize=True))
    model = OnnxTransformer(cpu, threads=1)
    rows = [rng.integers(3, 50, n).tolist() for n in (2, 3, 7, 12, 13, 20, 31, 32)]
    embedder = model.embedder()
    together = embedder.vectors(rows, of_text=False)
    np.testing.assert_array_equal([embedder.vectors([row], of_text=False)[0] for row in rows], together)
    ids, mask = np.zeros((2, 2, len(rows), 40), np.int64)
    for i, row in enumerate(rows):  # the second time on the left
        ids[0, i, : len(row)], mask[0, i, : len(row)] = row, 1
        ids[1, i, -len(row) :], mask[1, i, -len(row) :] = row, 1
    graph = model.graph_vectors
    assert graph is not None
    assert graph.by_token
    np.testing.assert_array_equal(graph.compute({SOURCE_IDS.name: ids[0]}, mask[0]), together)
    np.testing.assert_allclose(graph.compute({SOURCE_IDS.name: ids[1]}, mask[1]), together, rtol=0, atol=1e-6)


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    checkpoint, cpu = write_model(alone("paper", "encoder"), tmp_path, 3, target="cpu")
    file = cpu / "onnx" / f"{MODEL}.onnx"
    model = onnx.load(file, load_external_data=False)
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    (scale,) = [entry for entry in attention.attribute if entry.name == "scale"]
    scale.f *= 1.01
    onnx.save(model, file)
    report = compare(checkpoint, cpu, ["onnxruntime"], 1, threads=1)
    assert not report.equal


def test_its_operators_are_onnx_runtime_s(tmp_path: Path) -> None:
    checkpoint, cpu = write_model(alone("paper", "encoder"), tmp_path, 3, target="cpu")
    with pytest.raises(UserError, match="was exported for target cpu, whose operators only onnxruntime has"):
        compare(checkpoint, cpu, ["evaluator"], 1)


def test_batches_of_texts_that_are_alike() -> None:
    lengths = np.array([3, 500, 70, 64, 120, 2, 30])
    parts = [sorted(lengths[part].tolist()) for part in _mixed(lengths)]
    assert parts == [[500], [64, 70, 120], [2, 3, 30]]
    many = np.full(2000, 50)
    assert next(len(part) for part in _mixed(many)) == CACHED_TOKENS // 50
    assert sorted(np.concatenate(_mixed(many))) == list(range(2000))


def test_parts_for_several_threads_are_of_about_one_size() -> None:
    def sizes(lengths: list[int], threads: int) -> list[int]:
        array = np.array(lengths)
        parts = _mixed(array, threads)
        assert sorted(np.concatenate(parts)) == [*range(len(lengths))]
        return [int(array[part].sum()) for part in parts]

    assert sizes([128] * 8, 1) == [384, 384, 256]
    assert sizes([128] * 8, 2) == [256] * 4
    assert sizes([128] * 8, 3) == [384, 384, 256]
    assert sizes([128] * 8, 4) == [256] * 4
    assert sizes([128] * 8, 8) == [128] * 8
    assert sizes([40, 60, 50, 50], 2) == [110, 90]
    assert sizes([50] * 2000, 2) == sizes([50] * 2000, 1)
    assert sizes([500], 2) == [500]
    assert sizes([40, 41, 42], 2) == [123]  # a part of its own takes as long as it saves
    assert sizes([500, 40], 2) == [500, 40]
