"""`export --attention`: the decoders' output of one layer's cross-attention, in every target, judged as any tensor."""

import json
from collections import Counter

import numpy as np
import onnx
import pytest
from combined import combined, thinned_rows
from command_line import caller, refused
from copying_model import write_copying_model
from random_models import write_model
from small_models import alone, encoder_decoder, random_weights

from export import OnnxTransformer, export_onnx
from export.interface import CROSS_ATTENTION, CROSS_DECODERS, Request
from export.targets.table import TARGETS, target_of
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Truth
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.system.errors import UserError

LINES = ["one two three.", "", "four", "seven eight nine ten"]
LINKS = ["0-0 1-1 2-2", "", "0-0", "0-0 1-1 2-2 3-3"]
GRAPHS_OF_THEIR_OWN = ("portable", "cpu")
WAYS = {
    "portable": {"plain", "cached", "cached, merged"},
    "web": {"plain", "cached, merged"},
    "cpu": {"plain"},
}
call = pytest.fixture(caller)


def exported(folder, name="paper", target="portable", **options):
    config = encoder_decoder(name)
    return write_model(config, folder, 3, target=target, attention=True, **options)


def judged(report):
    """{path: passed} of the output, of ONNX Runtime."""
    points = [point for point in report.points if point.tap == CROSS_ATTENTION and point.runtime != "mlx"]
    return {point.path: point.passed for point in points}


@pytest.mark.fast("modern-cpu")
@pytest.mark.parametrize(
    ("name", "target"), combined(["paper", "modern", "odd widths", "turned heads"], GRAPHS_OF_THEIR_OWN)
)
def test_what_changes_attention(name, target, tmp_path):
    report = compare(*exported(tmp_path, name, target), ["onnxruntime"], longest=8, threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())
    assert judged(report) == dict.fromkeys(WAYS[target], True)


@pytest.mark.fast("cpu-int4")
@pytest.mark.parametrize(
    ("target", "precision"), thinned_rows([("portable", "int8"), ("web", "float16"), ("cpu", "int4")], 2)
)
def test_lower_precisions(target, precision, tmp_path):
    folders = exported(tmp_path, target=target, precision=precision, accept_loss=True)
    report = compare(*folders, [f"onnxruntime:cpu:all:{precision}"], longest=8, threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())
    assert judged(report) == dict.fromkeys(WAYS[target], True)


@pytest.mark.slow
def test_beside_mlx(tmp_path):
    report = compare(*exported(tmp_path), ["mlx", "onnxruntime"], longest=8, threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())
    assert [p.path for p in report.points if p.tap == CROSS_ATTENTION and p.runtime == "mlx"] == ["tapped"]


def test_what_the_network_computes_anyway_is_not_computed_again():
    config, chosen = encoder_decoder("paper"), target_of("portable")
    more = Counter({"ReduceMean": 1, "Concat": 1, "Reshape": 1})
    for name in chosen.graph_names(config):
        without, with_it = (
            chosen.build(name, Request(config=config, attention_layer=layer)).graph for layer in (None, 1)
        )
        nodes = [Counter(node.op_type for node in graph.all_nodes()) for graph in (without, with_it)]
        shown = name in CROSS_DECODERS
        assert nodes[1] - nodes[0] == (more if shown else Counter())
        assert [x.name for x in with_it.outputs] == [*(x.name for x in without.outputs), *[CROSS_ATTENTION] * shown]


@pytest.mark.parametrize("change", ["sum", "other layer"])
def test_a_wrong_output_is_found(change, tmp_path):
    checkpoint, folder = exported(tmp_path)
    file = folder / "onnx" / "decoder_with_past_model.onnx"
    model = onnx.load(file, load_external_data=False)
    [mean] = [node for node in model.graph.node if node.op_type == "ReduceMean" and CROSS_ATTENTION in node.name]
    if change == "sum":
        mean.op_type = "ReduceSum"
    else:
        [other] = [
            node.output[0]
            for node in model.graph.node
            if node.name.startswith("decoder/layers.0/cross_attention/") and node.op_type == "Softmax"
        ]
        mean.input[0] = other
    file.write_bytes(model.SerializeToString())
    report = compare(checkpoint, folder, ["onnxruntime"], longest=8, threads=1, searches=False)
    assert not report.equal
    assert judged(report) == {"plain": True, "cached": False, "cached, merged": True}
    assert "cross_attention (cached" in report.failures()[0]


@pytest.mark.parametrize("target", GRAPHS_OF_THEIR_OWN)
def test_the_matrix_from_python(target, tmp_path):
    checkpoint, folder = exported(tmp_path, "modern", target, attention_layer=0)
    recorded = json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))
    assert recorded[CROSS_ATTENTION] == {"layer": 0}
    opened = open_checkpoint(checkpoint)
    rng = np.random.default_rng(1)
    ids, target_ids = rng.integers(3, 50, (3, 9)), rng.integers(3, 50, (3, 6))
    mask = np.arange(9) < np.array([[9], [5], [1]])
    found = OnnxTransformer(folder, threads=1).cross_attention(ids, target_ids, mask)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[np.broadcast_to(~mask[:, None], found.shape)], 0)
    truths = []
    for dtype in (np.float64, np.float32):
        points = {}
        reference = Reference(opened.config, dict(opened.tensors()), dtype, inner_points=True)
        reference(ids, target_ids, mask, tap=points.__setitem__)
        truths.append(points["decoder.layers.0.cross_attention.weights"].mean(axis=1))
    natural = Truth.of(*truths, np.ones(target_ids.shape, bool)).scale
    assert np.abs(found - truths[0]).max() <= 8 * max(natural.max, 2**-24 * natural.size)


@pytest.mark.parametrize("target", GRAPHS_OF_THEIR_OWN)
def test_alignment_needs_no_engine_of_validate(target, call, tmp_path, monkeypatch):
    folder = write_copying_model(tmp_path, onnx=False)
    export_onnx(folder / "model", folder / "onnx", target=target, attention=True)
    monkeypatch.setattr("export.validate.opening.cross_weights", None)
    status, out, said = call("translate", folder / "onnx", "--alignment", stdin="".join(f"{x}\n" for x in LINES))
    assert (status, said) == (0, "")
    assert out == "".join(f"{line}\t{links}\n" for line, links in zip(LINES, LINKS, strict=True))


def test_it_is_off_by_default(tmp_path):
    checkpoint, folder = write_model(encoder_decoder("paper"), tmp_path)
    assert CROSS_ATTENTION not in json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))
    model = OnnxTransformer(folder, threads=1)
    with pytest.raises(UserError, match=r"returns no attention: export it with --attention$"):
        model.cross_attention([[5, 6]], [[1, 7]])
    report = compare(checkpoint, folder, ["onnxruntime"], longest=6, threads=1, searches=False)
    assert not judged(report)


@pytest.mark.parametrize("target", TARGETS)
def test_who_has_no_source_is_refused(target, tmp_path):
    config = alone("paper", "decoder")
    checkpoint = save_checkpoint(tmp_path / "model", config, random_weights(config))
    with pytest.raises(UserError, match=r"^attention: architecture='decoder' has no source"):
        export_onnx(checkpoint, tmp_path / "onnx", target=target, attention=True)
    assert not (tmp_path / "onnx").exists()


def test_the_command_line(call, tmp_path):
    folder = write_copying_model(tmp_path, onnx=False)
    model, onnx_folder = folder / "model", tmp_path / "onnx"
    refused(call("export", model, onnx_folder, "--attention-layer", 2), "the decoder has layers 0 to 1")
    assert call("export", model, onnx_folder, "--attention")[0] == 0
    settings_file = onnx_folder / "mlx_transformer.json"
    assert json.loads(settings_file.read_text(encoding="utf-8"))[CROSS_ATTENTION] == {"layer": 1}
    settings_file.write_text(settings_file.read_text(encoding="utf-8").replace('"layer": 1', '"layer": 7'))
    refused(call("translate", onnx_folder, "--no-verify", "one"), "there is no decoder layer 7")
