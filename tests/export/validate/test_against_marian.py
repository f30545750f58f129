"""`validate --against marian`: the original file, read apart from the import, judges what was made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from combined import thinned
from marian_checks import SOURCES, TARGETS, model_file
from marian_models import KINDS, STUDENT, write_model
from random_models import write_model as write_random
from runtimes import unasked
from small_models import encoder_decoder

from export import export_onnx
from export.validate import compare
from export.validate.engines import onnxruntime_engine
from export.validate.origin.check import CHECKPOINT
from export.validate.origin.marian import MarianNetwork, read_marian
from mlx_transformer import UserError
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.families.marian_files.conversion import read_model
from mlx_transformer.families.marian_files.options import parse_options
from mlx_transformer.generation.settings import SETTINGS


def imported(folder: Path, options: dict[str, Any], integers: bool, **export: Any) -> tuple[Path, Path, Path]:
    """The original, the checkpoint and the package of a small model."""
    original = write_model(folder / "original", options, 2, integers)
    assert import_marian(original, folder / "model") is not None
    return original, folder / "model", export_onnx(folder / "model", folder / "onnx", **export)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("two vocabularies", "pre-norm", "untied")]


@pytest.mark.parametrize("kind", ["student", *SLOW])
def test_what_was_imported_is_the_original(kind: str, tmp_path: Path) -> None:
    original, checkpoint, package = imported(tmp_path, KINDS[kind], integers=kind == "student")
    report = compare(checkpoint, package, seed=1, threads=1, longest=6, against="marian")
    assert report.equal, report.failures()
    assert report.against[0].startswith(f"against Marian {read_marian(model_file(original))[1].get('version', 'of')}")
    judged = {point.runtime for point in report.points if point.path == "against marian"}
    assert judged == {CHECKPOINT, *unasked()}
    assert {check.runtime for check in report.tokens if check.search == "marian: greedy"} == judged
    shown = json.loads(report.to_json())
    assert shown["against"] == list(report.against)


@pytest.mark.slow
def test_another_file_than_the_one_that_was_imported_is_found(tmp_path: Path) -> None:
    _, checkpoint, package = imported(tmp_path, STUDENT, integers=False)
    other = write_model(tmp_path / "other", STUDENT, seed=9)
    judge = {"against": "marian", "original": other, "searches": False}
    report = compare(checkpoint, package, ["onnxruntime"], 1, threads=1, longest=6, **judge)
    assert not report.equal
    failed = {(p.runtime, p.path) for p in report.points if not p.passed}
    assert failed == {(name, "against marian") for name in (CHECKPOINT, "onnxruntime")}


def test_wrong_positions_of_the_import_are_found(tmp_path: Path) -> None:
    """Every runtime has those of the checkpoint's config, so that nothing else can tell."""
    original, checkpoint, _ = imported(tmp_path, STUDENT, integers=False)
    opened = open_checkpoint(checkpoint)
    values = json.loads(opened.config.to_json())
    config = type(opened.config).from_json(json.dumps({**values, "positions": "sinusoidal_halves"}))
    save_checkpoint(tmp_path / "wrong", config, dict(opened.tensors()))
    package = export_onnx(tmp_path / "wrong", tmp_path / "wrong onnx")
    assert compare(tmp_path / "wrong", package, ["onnxruntime"], 1, threads=1, longest=6, searches=False).equal
    report = compare(
        tmp_path / "wrong",
        package,
        ["mlx"],
        1,
        threads=1,
        longest=6,
        against="marian",
        original=original,
        searches=False,
    )
    assert {p.runtime for p in report.points if not p.passed} == {CHECKPOINT, "mlx"}


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_integers_are_judged_by_exact_integers_and_the_kernel_is_named(target: str, tmp_path: Path) -> None:
    """Scales drawn at random clip as real ones don't: of points, those on the integers alone are within a budget."""
    lowered = {"target": target, "precision": "int8", "force": True}
    original, checkpoint, package = imported(tmp_path, STUDENT, integers=True, **lowered)
    chosen = {"against": "marian", "original": original, "longest": 12}
    report = compare(checkpoint, package, ["onnxruntime:cpu:all:int8"], 1, threads=1, **chosen)
    searched = {check.runtime: check for check in report.tokens if check.search == "marian: greedy"}
    assert searched["onnxruntime:cpu:all:int8"].passed, searched
    assert all(point.passed for point in report.points if point.path == "on its integers")
    assert f"integer kernel of ONNX Runtime here: {onnxruntime_engine.EXACT}" in report.against
    assert any("Marian's engine on AVX2" in line for line in report.against)


def test_the_kernel_is_told_by_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def run(self, _: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            pairs = np.full((len(feed["x"]), 64), (64 // 2) * ((1 << 15) - 1), np.int32)
            return [pairs]

    integer_kernel = onnxruntime_engine.integer_kernel.__wrapped__  # its answer is kept
    assert integer_kernel() in (onnxruntime_engine.EXACT, onnxruntime_engine.SATURATING)
    monkeypatch.setattr(onnxruntime_engine.ort, "InferenceSession", Saturating)
    assert integer_kernel() == onnxruntime_engine.SATURATING


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("kind", ["student", "untied"])
def test_both_readers_have_the_same_tensors(kind: str, integers: bool, tmp_path: Path) -> None:
    file = model_file(write_model(tmp_path / "model", KINDS[kind], 4, integers))
    tensors, options = read_marian(file)
    *items, text = read_model(file)
    assert {item.name for item in items} == set(tensors)
    for item in items:
        assert np.array_equal(item.numbers(), tensors[item.name].numbers()), item.name
    theirs = parse_options(text.text(), "here")
    assert all(options.get(name) == theirs[name] for name in ("dim-emb", "enc-depth", "dec-depth", "transformer-heads"))


def test_the_saturating_network_differs_where_sums_do(tmp_path: Path) -> None:
    file = model_file(write_model(tmp_path / "model", STUDENT, 4, integers=True))
    networks = [MarianNetwork.read(file, kind) for kind in ("exact", "saturating", "float")]
    exact, saturating, floats = (network.logits(SOURCES[0], TARGETS[0]) for network in networks)
    assert np.abs(exact - floats).max() > 1e-3
    assert np.abs(exact - saturating).max() < np.abs(exact).max()


def test_the_saturating_networks_positions_are_rounded_as_libm_does() -> None:
    """A last bit of a frequency moves a rounding to integers now and then, and then a word: NumPy's powers of float32
    differ from libm's in 18 of these 128 on processors with AVX-512."""
    network = MarianNetwork({}, {"transformer-heads": 8, "dim-emb": 256}, "saturating")
    powers = [math.pow(np.float32(1e-4), np.float32(i) / np.float32(127)) for i in range(128)]
    at = np.arange(60, dtype=np.float32)[:, None] * np.array(powers, np.float32)
    angles = np.concatenate([at, at + np.float32(math.pi / 2)], axis=1)
    expected = np.array([[math.sin(angle) for angle in row] for row in angles], np.float32)
    assert np.array_equal(network.positions(np.arange(60)), expected)


def test_what_cannot_be_compared_is_said_in_one_line(tmp_path: Path) -> None:
    checkpoint, package = write_random(encoder_decoder("paper"), tmp_path, 1)
    for given, said in [
        (
            {"against": "marian"},
            "--against marian: .* doesn't say what .* from: give --original, the file or folder that was imported",
        ),
        ({"original": tmp_path}, "--original needs --against"),
        ({"against": "marian", "original": tmp_path / "none"}, "no such file or folder"),
        *(
            ({"against": name, "original": checkpoint / "config.json"}, f"{name} runs folders, .* FOLDER{flag} writes")
            for name, flag in {"transformers": "", "mlx-lm": " --mlx-lm"}.items()
        ),
        ({"against": "marian", "original": tmp_path}, "expected one model.npz or model\\*.bin, found 0"),
    ]:
        with pytest.raises(UserError, match=said):
            compare(checkpoint, package, seed=1, threads=1, **given)
    cut = tmp_path / "model.cut.bin"
    whole = model_file(write_model(tmp_path / "whole", STUDENT, 1, integers=True)).read_bytes()
    for length in (0, 9, 100, 5000, len(whole) - 2000):
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match="no model of Marian that can be read"):
            read_marian(cut)


@pytest.mark.slow
def test_a_changed_weight_of_a_package_is_found_against_the_original(tmp_path: Path) -> None:
    original, checkpoint, package = imported(tmp_path, STUDENT, integers=False)
    assert (checkpoint / SETTINGS).is_file()
    file = package / "onnx" / "encoder_model.onnx"
    graph = onnx.load(file)
    for tensor in graph.graph.initializer:
        if tensor.name == "encoder.layers.1.feed_forward.down_proj.bias":
            array = onnx.numpy_helper.to_array(tensor).copy()
            array[3] += 1e-3
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(graph, file)
    report = compare(
        checkpoint, package, ["onnxruntime"], 1, threads=1, longest=12, against="marian", original=original
    )
    failed = {p.runtime for p in report.points if not p.passed and p.path == "against marian"}
    assert failed == {"onnxruntime"}
