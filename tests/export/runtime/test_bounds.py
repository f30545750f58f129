"""Damaged folders, graphs and weights are told before they speak, by whatever reads them: one line each."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from combined import thinned
from safetensors.numpy import load_file, save_file
from small_models import write_text_model

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import load
from mlx_transformer.commands.info import describe
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError

LINES = ["one two", "four"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path):
    """Copies of both, without the digests that would tell."""
    shutil.copytree(made, tmp_path / "made")
    for manifest in (tmp_path / "made").rglob("manifest.json"):
        manifest.unlink()
    return tmp_path / "made"


PASSING_ON = {
    "export": lambda folder: export_onnx(folder / "model", folder / "new"),
    "int8": lambda folder: export_onnx(folder / "model", folder / "new", precision="int8"),
    "search": lambda folder: export_search(folder / "model", folder / "new.onnx"),
    "quantize": lambda folder: quantize_checkpoint(folder / "model", folder / "new", Scheme(32, 4)),
    "to-huggingface": lambda folder: to_huggingface(folder / "model", folder / "new"),
    "load": lambda folder: load(folder / "model"),
}


@pytest.mark.parametrize("text", ["", '"x"', '{"model": "A"}', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
@pytest.mark.parametrize("command", [*PASSING_ON, "info"])
def test_a_broken_tokenizer_is_passed_on_by_nobody(command, text, folder):
    (folder / "model" / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"model/tokenizer\.json: ") as caught:
        {**PASSING_ON, "info": lambda folder: describe(folder / "model", dict)}[command](folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "new").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("command", PASSING_ON)
def test_weights_that_are_not_finite_are_named(command, value, folder):
    weights = load_file(folder / "model" / "model.safetensors")
    weights["decoder.layers.0.feed_forward.up_proj.weight"][1, 2] = value
    save_file(weights, folder / "model" / "model.safetensors")
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.feed_forward\.up_proj\.weight is not finite: damaged"):
        PASSING_ON[command](folder)
    assert not (folder / "new").exists()


def test_imported_weights_too(folder):
    to_huggingface(folder / "model", folder / "theirs")
    weights = load_file(folder / "theirs" / "model.safetensors")
    weights["model.decoder.layers.0.fc1.weight"][0, 0] = np.inf
    save_file(weights, folder / "theirs" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.decoder\.layers\.0\.fc1\.weight is not finite"):
        import_huggingface(folder / "theirs", folder / "new")


@pytest.mark.parametrize("name", ["tokenizer.json", "mlx_transformer.json", "config.json"])
def test_the_jsons_of_an_onnx_folder_have_digests(name, made, tmp_path):
    shutil.copytree(made / "onnx", tmp_path / "onnx")
    text = (tmp_path / "onnx" / name).read_text(encoding="utf-8")
    (tmp_path / "onnx" / name).write_text(text[:-2] + " " + text[-1], encoding="utf-8")
    with pytest.raises(UserError, match=rf"{name}: (damaged|not JSON)"):
        OnnxTransformer(tmp_path / "onnx")


def test_a_tokenizer_may_be_added_to_a_folder_without(made, tmp_path):
    shutil.copytree(made, tmp_path / "made")
    tokenizer = (tmp_path / "made" / "model" / "tokenizer.json").read_text(encoding="utf-8")
    for path in (tmp_path / "made" / "model").glob("[mt][ao][nk]*"):
        path.unlink()
    export_onnx(tmp_path / "made" / "model", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    assert OnnxTransformer(tmp_path / "bare").translate(LINES) == OnnxTransformer(made / "onnx").translate(LINES)


def _without_output(graph: onnx.GraphProto) -> None:
    del graph.output[:1]


def _float_ids(graph: onnx.GraphProto) -> None:
    next(value for value in graph.input if value.name == "input_ids").type.tensor_type.elem_type = 1


def _other_output(graph: onnx.GraphProto) -> None:
    graph.output[0].name = graph.node[len(graph.node) // 2].output[0]
    graph.output[0].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("change", [_without_output, _float_ids, _other_output])
@pytest.mark.parametrize("graph", ["encoder_model", "decoder_model", "decoder_with_past_model"])
def test_graphs_of_another_make_are_refused(graph, change, folder, capfd):
    path = folder / "onnx" / "onnx" / f"{graph}.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=rf"{graph}\.onnx: "):
        OnnxTransformer(folder / "onnx").translate(LINES, min_new_tokens=4)
    assert capfd.readouterr().err == "", "ONNX Runtime says nothing beside it"


@pytest.mark.parametrize("metadata", thinned(["null", "5", "[" * 90_000, "[[]]", "x", '{"vocab_size": "x"}'], 2))
def test_a_single_file_whose_metadata_is_none_of_ours(metadata, folder):
    export_search(folder / "model", folder / "one.onnx")
    model = onnx.load(folder / "one.onnx")
    next(entry for entry in model.metadata_props if entry.key.endswith("config")).value = metadata
    onnx.save(model, folder / "one.onnx")
    with pytest.raises(UserError, match=r"one\.onnx: TransformerConfig: .*; write it again with export --search"):
        SearchModel(folder / "one.onnx")


@pytest.mark.fast("folder")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_translated_is_text(kind, folder):
    if kind == "folder":
        model = OnnxTransformer(folder / "onnx")
    else:
        pytest.importorskip("onnxruntime_extensions")
        model = SearchModel(export_search(folder / "model", folder / "text.onnx", text=True))
    assert model.translate(line for line in LINES) == model.translate(LINES)
    assert model.translate([]) == []
    assert model.translate(LINES[0]) == model.translate(LINES)[0]
    for lines, message in [
        (5, "expected text, or a list of lines, not int"),
        (["a", None], "line 2: must be text, not None"),
    ]:
        with pytest.raises(UserError, match=message):
            model.translate(lines)
    with pytest.raises(UserError, match="text 2 holds a lone surrogate at character 3"):
        model.translate(["a", "bc\ud800"])
    with pytest.raises(UserError, match="n_best=2: translate returns only the best output; n_best returns several"):
        model.translate(LINES, beam=2, n_best=2)
    assert [len(found) for found in model.n_best(LINES, beam=2, n_best=2)] == [2, 2]


@pytest.mark.parametrize("ids", [None, 5, [5, 2], [[[5]]], [[[5], [5, 2]]], [["a"]], [[1.5]], iter([[5]])])
def test_ids_are_lists_of_lists(ids, folder):
    with pytest.raises(UserError, match=r"^source( row 0)?: (expected|ids must be)"):
        OnnxTransformer(folder / "onnx").generate(ids)


def test_more_positions_than_a_graph_should_hold(folder, monkeypatch):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "max_positions": 2**20}))
    monkeypatch.setattr("export.package.plan.LARGEST_TABLE", 1 << 20)  # the model is narrow
    with pytest.raises(UserError, match=r"max_positions=1,048,576 makes a table of \d+ MB, a graph takes 1: lower"):
        export_onnx(folder / "model", folder / "new")
