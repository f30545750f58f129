"""What weights in blocks are multiplied with: int8 or float32 activations, chosen at export, named and judged."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from ending_models import POST_NORM, made, rows
from quantized_models import wide
from random_models import random_weights
from small_models import alone, encoder_decoder

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.precision.table import ACTIVATIONS
from export.validate import compare
from export.validate.engines import open_engine
from export.validate.reference import Reference
from export.validate.rule import UNIT
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError

PAPER = encoder_decoder("paper")
CONFIGS = {
    "paper": PAPER,
    "untied": encoder_decoder("untied"),
    "odd widths": encoder_decoder("odd widths"),
    "decoder": alone("modern", "decoder"),
    "encoder": alone("paper", "encoder"),
}
TARGETS = ("portable", "cpu", "web")
IDS, MASK = np.array([[5, 6, 7, 8, 2], [9, 10, 11, 2, 0]]), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def saved(folder, config=PAPER):
    return save_checkpoint(folder / "model", config, random_weights(config, 7))


def judged(checkpoint, folder, precision, **options):
    return compare(checkpoint, folder, [f"onnxruntime:cpu:all:{precision}"], seed=5, longest=9, threads=1, **options)


def nodes(folder):
    """Of all graphs, those inside others included."""

    def inside(graph):
        for node in graph.node:
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from inside(attribute.g)

    files = folder.rglob("*.onnx") if folder.is_dir() else [folder]
    return [node for path in files for node in inside(onnx.load(path, load_external_data=False).graph)]


def levels(folder):
    found = (a for node in nodes(folder) for a in node.attribute if node.op_type == "MatMulNBits")
    return {attribute.i for attribute in found if attribute.name == "accuracy_level"}


@pytest.mark.fast("odd widths-cpu", "encoder-web")
@pytest.mark.parametrize(("name", "target"), combined(CONFIGS, TARGETS, step=2))
def test_float32_activations_keep_to_float32s_budget(name, target, tmp_path):
    """Against the network of the weights as they are stored: taps, embeddings bit for bit, caches and tokens."""
    checkpoint = saved(tmp_path, CONFIGS[name])
    for precision in ("int8-weights", "int4") if name in ("paper", "encoder") else ("int4",):
        folder = export_onnx(
            checkpoint, tmp_path / precision, target=target, precision=precision, activations="float32"
        )
        searches = precision == "int4"  # how the weights were rounded is nothing that a search asks
        report = judged(checkpoint, folder, precision, searches=searches)
        assert report.equal, report.failures()
        (runtime,) = report.runtimes
        assert (runtime.budget.rms, runtime.budget.max, runtime.budget.unit) == (4, 8, UNIT)
        assert runtime.arithmetic.startswith("weights of ")
        assert runtime.arithmetic.endswith("; float32 activations")
        if CONFIGS[name].has_decoder and searches:
            assert {tokens.search for tokens in report.tokens} >= {"greedy", "sampling", "beam 4"}


def test_int8_activations_keep_their_own_budget(tmp_path, monkeypatch):
    """And wouldn't keep to float32's: a record that says so is found by the graphs' nodes, and without them the two
    arithmetics are told apart by a factor of thousands."""
    checkpoint = saved(tmp_path, CONFIGS["encoder"])
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8-weights")
    report = judged(checkpoint, folder, "int8-weights", searches=False)
    assert report.equal, report.failures()
    assert report.runtimes[0].budget.unit == 2**-8
    assert report.runtimes[0].arithmetic == "weights of 8 bits in blocks; int8 activations"
    values = json.loads((folder / ONNX_CONFIG).read_text(encoding="utf-8"))
    values["precisions"]["int8-weights"]["activations"] = "float32"
    (folder / ONNX_CONFIG).write_text(json.dumps(values))
    report = judged(checkpoint, folder, "int8-weights", searches=False)
    assert report.exit_code == 1
    assert report.files.misleading
    assert "activations" in " ".join(report.files.problems)
    monkeypatch.setattr(sys.modules[compare.__module__], "_package_files", lambda opened, onnx: None)
    report = judged(checkpoint, folder, "int8-weights", searches=False)
    assert not report.equal
    assert max(point.worst.rms_ratio for point in report.points if point.tap == "logits") > 1000


def test_a_session_that_rounds_activations_is_found_out(tmp_path, monkeypatch):
    """What ONNX Runtime does by itself with the blocks of a portable package."""
    checkpoint = saved(tmp_path, CONFIGS["encoder"])
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int4", activations="float32")
    assert judged(checkpoint, folder, "int4", searches=False).equal
    monkeypatch.setitem(ACTIVATIONS, "float32", ACTIVATIONS["int8"])
    assert not judged(checkpoint, folder, "int4", searches=False).equal


@pytest.mark.parametrize(
    ("precision", "tied"), combined(["int4", "int8-weights"], ["none", "target-output", "all"], step=4)
)
def test_a_table_that_no_whole_blocks_fill_is_stored_in_one_way(precision, tied, tmp_path):
    """Target web reads tables in blocks of 32; of a width of 48 it can't; what is looked up is what is multiplied."""
    config = dataclasses.replace(PAPER, d_model=48, tie_embeddings=tied, encoder_layers=1, decoder_layers=1)
    checkpoint = saved(tmp_path, config)
    for activations in ACTIVATIONS:
        folder = export_onnx(
            checkpoint, tmp_path / activations, target="web", precision=precision, activations=activations
        )
        assert judged(checkpoint, folder, precision, searches=False).equal
        assert "GatherBlockQuantized" not in {node.op_type for node in nodes(folder)}


@pytest.mark.parametrize("target", thinned(TARGETS, 4))
def test_eight_bits_are_unpacked_for_float32_activations(target, tmp_path):
    """No operator on blocks is left, as ONNX Runtime has no fast one; the files are as small all the same."""
    checkpoint, sizes = saved(tmp_path, dataclasses.replace(CONFIGS["encoder"], d_model=64, d_ff=256)), {}
    for activations in ACTIVATIONS:
        folder = export_onnx(
            checkpoint, tmp_path / activations, target=target, precision="int8-weights", activations=activations
        )
        sizes[activations] = sum(path.stat().st_size for path in folder.rglob("*.onnx_data"))
    assert sizes["float32"] < 1.02 * sizes["int8"]
    assert not {"MatMulNBits", "DequantizeLinear"} & {node.op_type for node in nodes(folder)}
    assert judged(checkpoint, folder, "int8-weights", searches=False).equal
    with pytest.raises(UserError, match="was exported with float32 activations; export it with activations int8"):
        OnnxTransformer(folder, activations="int8")


@pytest.mark.parametrize(("target", "activations"), combined(TARGETS, ACTIVATIONS))
def test_what_the_graphs_say(target, activations, tmp_path):
    """The operator's attribute; operators that round, where that is wanted and nowhere else; and the description."""
    folder = export_onnx(
        saved(tmp_path), tmp_path / "onnx", target=target, precision=["int4", "float32"], activations=activations
    )
    assert levels(folder) == (set() if target == "portable" else {ACTIVATIONS[activations]})
    rounding = {"DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat"} & {n.op_type for n in nodes(folder)}
    assert bool(rounding) == (activations == "int8" and target != "web")
    precisions = json.loads((folder / ONNX_CONFIG).read_text(encoding="utf-8"))["precisions"]
    assert precisions["int4"]["activations"] == activations
    assert "activations" not in precisions["float32"]


def test_nothing_is_stored_twice(tmp_path):
    """The classifier of float32 activations is made from the integers of the embedding."""
    checkpoint = saved(tmp_path, dataclasses.replace(PAPER, vocab_size=800, source_vocab_size=800))
    for target in TARGETS:
        sizes = {}
        for activations in ACTIVATIONS:
            out = tmp_path / f"{target} {activations}"
            export_onnx(checkpoint, out, target=target, precision="int4", activations=activations)
            sizes[activations] = sum(path.stat().st_size for path in out.rglob("*.onnx_data"))
        assert abs(sizes["float32"] - sizes["int8"]) < 0.15 * sizes["int8"], (target, sizes)


def test_int8_is_the_default_and_what_older_packages_are(tmp_path):
    folder = export_onnx(saved(tmp_path), tmp_path / "onnx", precision=["float32", "int4"])
    assert OnnxTransformer(folder, precision="int4").folder.activations == "int8"
    assert OnnxTransformer(folder).folder.activations is None
    values = json.loads((folder / ONNX_CONFIG).read_text(encoding="utf-8"))
    assert values["precisions"]["int4"].pop("activations") == "int8"
    (folder / ONNX_CONFIG).write_text(json.dumps(values))
    assert OnnxTransformer(folder, precision="int4", verify=False).folder.activations == "int8"
    values["precisions"]["int4"]["activations"] = "int7"
    (folder / ONNX_CONFIG).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"damaged \(activations 'int7' are none of int8, float32\)"):
        OnnxTransformer(folder, precision="int4", verify=False)


def error(checkpoint, model):
    """Of the encoder, relative to its largest output, against the network of the weights as the package holds them."""
    runtime = f"onnxruntime:cpu:all:{model.folder.precision}"
    engine = open_engine(runtime, open_checkpoint(checkpoint), model.folder.path, 1)
    weights = dict(open_checkpoint(checkpoint).tensors())
    weights |= {name: engine.as_stored(where, name, weights[name]) for where, name, _ in engine.parameters()}
    expected = Reference(model.config, weights).encode(IDS, MASK.astype(bool))[MASK == 1]
    return np.abs(model.encode(IDS, MASK)[MASK == 1] - expected).max() / np.abs(expected).max()


def test_the_session_decides_for_standard_operators(tmp_path):
    checkpoint = saved(tmp_path)
    exact = export_onnx(checkpoint, tmp_path / "exact", precision="int4", activations="float32")
    assert error(checkpoint, OnnxTransformer(exact, threads=1)) < 2e-6
    assert error(checkpoint, OnnxTransformer(exact, threads=1, activations="float32")) < 2e-6
    assert error(checkpoint, OnnxTransformer(exact, threads=1, activations="int8")) > 1e-4


def test_choices_that_are_none_are_refused(tmp_path):
    checkpoint = saved(tmp_path)
    for precision, said in (("float32", "float32"), (["float32", "int8"], "float32, int8")):
        with pytest.raises(UserError, match=f"precision {said} has no choice; int8-weights, int4, packed have one"):
            export_onnx(checkpoint, tmp_path / "onnx", precision=precision, activations="float32")
    with pytest.raises(UserError, match="activations 'int7' are unknown; choose from int8, float32"):
        export_onnx(checkpoint, tmp_path / "onnx", precision="int4", activations="int7")
    with pytest.raises(UserError, match="float32 has no choice"):
        export_search(checkpoint, tmp_path / "one.onnx", activations="int8")
    rounded = export_onnx(checkpoint, tmp_path / "rounded", precision=["float32", "int4"])
    with pytest.raises(UserError, match="was exported with int8 activations; export it with activations float32"):
        OnnxTransformer(rounded, precision="int4", activations="float32")
    with pytest.raises(UserError, match="float32 has no choice"):
        OnnxTransformer(rounded, activations="int8")
    exact = export_onnx(checkpoint, tmp_path / "exact", precision="int4", activations="float32", target="cpu")
    with pytest.raises(UserError, match="was exported with float32 activations; export it with activations int8"):
        OnnxTransformer(exact, activations="int8")


@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_packed(target, tmp_path):
    config = wide(encoder_layers=1, decoder_layers=1)
    save_checkpoint(tmp_path / "plain", config, random_weights(config, 3))
    quantize_checkpoint(tmp_path / "plain", tmp_path / "model", Scheme(32, 4))
    folder = export_onnx(
        tmp_path / "model", tmp_path / "onnx", target=target, precision="packed", activations="float32"
    )
    assert levels(folder) == {ACTIVATIONS["float32"]}
    report = judged(tmp_path / "model", folder, "packed", searches=False)
    assert report.equal, report.failures()
    assert report.runtimes[0].budget.unit == UNIT


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_single_file(target, tmp_path):
    """The file says which, and whoever runs it here heeds it: scores within float32's rounding of its own network."""
    _, checkpoint = made(tmp_path, **POST_NORM, d_model=64)
    found = {}
    for activations in ACTIVATIONS:
        path = export_search(
            checkpoint, tmp_path / f"{activations}.onnx", target=target, precision="int4", activations=activations
        )
        searches = activations == "float32"  # those of int8's are judged in every folder
        report = compare(checkpoint, path, ["onnxruntime"], seed=2, longest=8, threads=1, searches=searches)
        assert report.equal, report.failures()
        assert report.runtimes[0].arithmetic.endswith(f"; {activations} activations")
        found[activations] = [best.score for (best,) in SearchModel(path, threads=1).search(rows(), max_new_tokens=6)]
    package = export_onnx(checkpoint, tmp_path / "onnx", precision="int4", activations="float32", target=target)
    expected = [best.score for (best,) in OnnxTransformer(package, threads=1).search(rows(), max_new_tokens=6)]
    np.testing.assert_allclose(found["float32"], expected, rtol=2e-6)
    assert not np.allclose(found["int8"], expected, rtol=1e-4)
