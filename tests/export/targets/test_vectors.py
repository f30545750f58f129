"""Packages whose encoder reads vectors in place of ids: what is in them, what runs them, and that they are proved."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import SLOW
from small_models import alone, encoder_decoder, random_weights

from export import OnnxTransformer, export_onnx
from export.package.plan import describe_graphs
from export.runtime.folder import open_folder
from export.validate import compare
from export.validate.rule import budget_for
from export.web.models import read_models
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.system.errors import UserError


def saved(folder: Path, config: TransformerConfig) -> Path:
    return save_checkpoint(folder / "model", config, random_weights(config))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """FOLDER/model, FOLDER/vectors of it, and FOLDER/ids."""
    folder = tmp_path_factory.mktemp("vectors")
    checkpoint = saved(folder, encoder_decoder("paper"))
    export_onnx(checkpoint, folder / "ids")
    export_onnx(checkpoint, folder / "vectors", inputs_embeds=True)
    return folder


def test_only_the_encoder_differs_and_the_folder_says_so(made) -> None:
    facts, of_ids = describe_graphs(made / "vectors"), describe_graphs(made / "ids")
    changed = {name for name in facts if facts[name]["inputs"] != of_ids[name]["inputs"]}
    assert changed == {"onnx/encoder_model.onnx"}
    assert facts["onnx/encoder_model.onnx"]["inputs"] == [
        ("inputs_embeds", "float", "batch_size x encoder_sequence_length x 32"),
        ("attention_mask", "int64", "batch_size x encoder_sequence_length"),
    ]
    spec, plain = (json.loads((made / name / ONNX_CONFIG).read_text(encoding="utf-8")) for name in ("vectors", "ids"))
    assert spec == {**plain, "inputs_embeds": True}
    assert open_folder(made / "vectors").request.inputs_embeds
    assert not open_folder(made / "ids").request.inputs_embeds
    encoder = onnx.load(made / "vectors/onnx/encoder_model.onnx", load_external_data=False)
    assert "embedding.weight" not in {tensor.name for tensor in encoder.graph.initializer}


PROVED = {
    "portable": ("portable", encoder_decoder("paper"), "float32"),
    "no positions, a table that nothing reads": ("portable", encoder_decoder("untied"), "float32"),
    "two tables": ("web", encoder_decoder("two vocabularies"), "float32"),
    "cpu": ("cpu", encoder_decoder("modern"), "float32"),
    "cpu, int8": ("cpu", encoder_decoder("odd widths"), "int8"),
    "float16": ("cuda", encoder_decoder("paper"), "float16"),
    "an encoder alone": ("portable", alone("untied", "encoder"), "float32"),
}


@pytest.mark.fast("an encoder alone")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("cpu", "an encoder alone") else SLOW) for name in PROVED]
)
def test_validate_proves_it_for_vectors_of_no_table(name: str, tmp_path) -> None:
    target, config, precision = PROVED[name]
    checkpoint = saved(tmp_path, config)
    lines: list[str] = []
    out = export_onnx(
        checkpoint, tmp_path / "onnx", target=target, precision=precision, inputs_embeds=True, log=lines.append
    )
    unjudged = f"{precision}: not judged: with inputs_embeds the encoder reads vectors, not text"
    assert lines == ([] if precision == "float32" else [unjudged])
    report = compare(checkpoint, out, ["mlx:cpu", "onnxruntime"], seed=7, longest=20, threads=1)
    assert report.equal, report.failures()
    assert {point.runtime for point in report.points if point.tap == "encoder.embedding"} == {"mlx:cpu", "onnxruntime"}


@pytest.mark.fast("cpu")
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_validate_proves_the_attention_to_vectors(target: str, tmp_path) -> None:
    checkpoint = saved(tmp_path, encoder_decoder("paper"))
    out = export_onnx(checkpoint, tmp_path / "onnx", target=target, inputs_embeds=True, attention=True)
    report = compare(checkpoint, out, ["onnxruntime"], seed=7, longest=20, threads=1, searches=False)
    assert report.equal, report.failures()
    assert "cross_attention" in {point.tap for point in report.points}
    with pytest.raises(UserError, match="attention: is said of ids, not of inputs_embeds"):
        OnnxTransformer(out, threads=1).search(inputs_embeds=[np.zeros((2, 32))], attention=True)


def test_a_graph_that_does_something_else_is_caught(made, tmp_path) -> None:
    """The vectors times sqrt(d_model): at the first point, and the operation is named."""
    out = export_onnx(made / "model", tmp_path / "onnx", inputs_embeds=True)
    file = out / "onnx/encoder_model.onnx"
    model = onnx.load(file, load_external_data=False)
    first = next(node for node in model.graph.node if "inputs_embeds" in node.input)
    first.op_type = "Mul"
    first.input.append("root")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(32**0.5), "root"))
    file.write_bytes(model.SerializeToString())
    report = compare(made / "model", out, ["onnxruntime"], seed=7, longest=8, threads=1, searches=False)
    assert not report.equal
    failed = [point.tap for point in report.points if not point.worst.passed]
    assert failed[0] == "encoder.embedding"
    assert [culprit.point for culprit in report.culprits] == ["encoder.embedding"]


@pytest.mark.fast("own")
@pytest.mark.gpu_path
@pytest.mark.usefixtures("device_choices")
def test_both_runtimes_encode_and_write_the_same(made) -> None:
    """By the rule: within the budget of float32's own error; rows of three lengths, padded by the search."""
    model, onnx_model = Transformer.load(made / "model"), OnnxTransformer(made / "vectors", threads=1)
    rng = np.random.default_rng(2)
    rows = [rng.standard_normal((length, 32), dtype=np.float32) for length in (9, 4, 1, 9)]
    for options in ({}, {"beam": 4}, {"sample": True, "seed": 3}):
        expected = model.generate(inputs_embeds=rows, max_new_tokens=10, **options)
        assert onnx_model.generate(inputs_embeds=rows, max_new_tokens=10, **options) == expected
    cpu = OnnxTransformer(
        export_onnx(made / "model", made / "cpu", target="cpu", inputs_embeds=True, force=True), threads=1
    )
    assert cpu.generate(inputs_embeds=rows, max_new_tokens=10) == model.generate(inputs_embeds=rows, max_new_tokens=10)
    from export.validate.reference import Reference

    batch, mask = np.stack([rows[0], rows[3]]), np.ones((2, 9), int)
    mask[1, 6:] = 0
    truth, single = (Reference(model.config, model.weights(), kind).encode(batch, mask) for kind in ("f8", "f4"))
    real = mask.astype(bool)
    limit = budget_for("float32", "cpu", None).max * np.abs(single - truth)[real].max()
    for got in (
        model.encode(None, mask, inputs_embeds=batch),
        onnx_model.encode(mask=mask, inputs_embeds=batch),
        cpu.encode(mask=mask, inputs_embeds=batch),
    ):
        assert np.abs(np.array(got) - truth)[real].max() <= limit


def test_one_kind_of_input_is_not_taken_for_the_other(made) -> None:
    of_vectors, of_ids = OnnxTransformer(made / "vectors", threads=1), OnnxTransformer(made / "ids", threads=1)
    vectors = np.zeros((1, 2, 32), np.float32)
    for call in (lambda: of_vectors.encode([[5, 2]]), lambda: of_vectors.generate([[5, 2]])):
        with pytest.raises(
            UserError, match=r"takes no input_ids: give it inputs_embeds, or export .* without --inputs"
        ):
            call()
    for call in (lambda: of_ids.encode(inputs_embeds=vectors), lambda: of_ids.generate(inputs_embeds=vectors)):
        with pytest.raises(UserError, match=r"takes no inputs_embeds: give it input_ids, or export .* with --inputs"):
            call()
    with pytest.raises(UserError, match="its encoder reads vectors, inputs_embeds: it translates no text"):
        of_vectors.translate(["a"])
    with pytest.raises(UserError, match="ids and inputs_embeds: give one of them"):
        of_vectors.encode([[5, 2]], inputs_embeds=vectors)
    with pytest.raises(UserError, match=r"mask: its shape \(1, 3\) differs from that of the input, \(1, 2\)"):
        of_vectors.encode(mask=[[1, 1, 1]], inputs_embeds=vectors)
    with pytest.raises(UserError, match="41 tokens, the model takes at most 40"):
        of_vectors.encode(inputs_embeds=np.zeros((1, 41, 32)))


def test_an_encoder_alone_takes_them_too(tmp_path) -> None:
    checkpoint = saved(tmp_path, alone("paper", "encoder"))
    model = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx", inputs_embeds=True), threads=1)
    vectors = np.random.default_rng(0).standard_normal((2, 3, 32))
    expected = np.array(Transformer.load(checkpoint)(inputs_embeds=vectors)).argmax(axis=-1)
    assert np.array_equal(model.logits(inputs_embeds=vectors).argmax(axis=-1), expected)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (alone("paper", "decoder"), {}, "inputs_embeds: a decoder alone goes on from ids"),
        (
            encoder_decoder("paper"),
            {"precision": "int8", "gate_source": "lines.txt"},
            "lines.txt: with inputs_embeds the encoder reads vectors: none of it is judged",
        ),
    ],
)
def test_what_cannot_be_exported_says_why(config: TransformerConfig, options: dict, said: str, tmp_path) -> None:
    checkpoint = saved(tmp_path, config)
    with pytest.raises(UserError, match=said):
        export_onnx(checkpoint, tmp_path / "onnx", inputs_embeds=True, **options)
    assert not (tmp_path / "onnx").exists()


def test_a_page_translates_text(text_folder, tmp_path) -> None:
    out = export_onnx(text_folder / "model", tmp_path / "onnx", target="web", inputs_embeds=True)
    with pytest.raises(UserError, match=r"its encoder reads vectors \(inputs_embeds\), but a page translates text"):
        read_models(out)
