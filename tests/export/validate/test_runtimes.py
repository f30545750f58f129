"""`validate` runtime by runtime: how they are asked for, in which precision they compute, where they ran."""

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from combined import combined
from marian_models import STUDENT
from marian_models import write_model as write_marian
from random_models import random_weights, write_model
from rich.console import Console

from export import export_onnx
from export.__main__ import main as export_main
from export.precision.table import PRECISIONS
from export.runtime.sessions import open_session, session_options
from export.validate import compare, compare_engines, explain, validate_command
from export.validate.cases import grid
from export.validate.engines import (
    ENGINES,
    Engine,
    Node,
    Placement,
    Unavailable,
    mlx_engine,
    open_engine,
    protocol,
)
from export.validate.engines.onnxruntime_engine import OnnxRuntimeEngine, TurnSession, open_changed
from export.validate.engines.web_host import NODE_BUILD, find_package
from export.validate.rule import BUDGETS, budget_for, stored_as
from mlx_transformer.cli import main
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import number_type

CONFIG = TransformerConfig(
    vocab_size=60, d_model=32, heads=4, key_value_heads=2, d_ff=48, encoder_layers=1, decoder_layers=1, max_positions=40
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(CONFIG, tmp_path_factory.mktemp("m"), 1)


@pytest.fixture
def arguments(exported: tuple[Path, Path]) -> list[str]:
    return ["validate", *map(str, exported), "--seed", "3", "--threads", "1"]


CHOSEN = {
    "onnxruntime,reference": 0,
    "onnxruntime:cpu:none, onnxruntime:cpu:basic": 0,
    "onnxruntime,onnxruntime:cuda": 3,
    "mlx:gpu": 3,
    "onnxruntime,,mlx": 2,
    "mlx,mlx": 2,
    "tensorflow": 2,
}
"""Runtimes, and the exit status."""


@pytest.mark.fast(
    "onnx-onnxruntime:cpu:none, onnxruntime:cpu:basic",
    "mlx-onnxruntime,onnxruntime:cuda",
    "mlx-tensorflow",
    "onnx-mlx:gpu",
)
@pytest.mark.parametrize(("side", "runtimes"), combined(["mlx", "onnx"], CHOSEN))
def test_runtimes_of_the_command(side: str, runtimes: str, arguments: list[str], capfd) -> None:
    status = CHOSEN[runtimes]
    if status == 3 and _gpu_is_there():
        pytest.skip("the runtime that should be missing is here")
    command = [*arguments, "--runtimes", runtimes]
    assert ended_with(main if side == "mlx" else export_main, command) == status
    out, error = capfd.readouterr()
    if status:
        assert error.count("\n") == 1, error
    else:
        assert out.startswith("validate: equal   seed 3\n")
        assert all(name.strip() in out for name in runtimes.split(","))


def ended_with(command, arguments: list[str]) -> int:
    try:
        return command(arguments) or 0
    except SystemExit as done:
        return done.code  # type: ignore[return-value]


def _gpu_is_there() -> bool:
    import mlx.core as mx
    import onnxruntime as ort

    return mx.is_available(mx.Device(mx.gpu)) or "CUDAExecutionProvider" in ort.get_available_providers()


@pytest.mark.slow
def test_mlx_on_a_gpu_is_judged_without_being_asked(
    exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def opening(name: str, *arguments: object) -> Engine:
        opened.append(name)
        return open_engine("mlx:cpu" if name == "mlx:gpu" else name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules[compare.__module__], "open_engine", opening)
    for gpu, names in {True: ["mlx", "onnxruntime", "mlx:gpu"], False: ["mlx", "onnxruntime"]}.items():
        monkeypatch.setattr(mlx_engine, "has_gpu", lambda gpu=gpu: gpu)
        assert compare(*exported, seed=1, longest=12, searches=False).equal
        assert opened == names
        opened.clear()


def test_tf32_is_one_setting_a_process(exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("mlx_transformer.device")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setattr(device, "_tf32", [])
    device.set_tf32(False)
    device.set_tf32(False)
    with pytest.raises(UserError, match="float32 and tf32 can't be compared in one run"):
        device.set_tf32(True)
    device.check_float32(device.mx.Device(device.mx.cpu))
    plain = device.mx.ones
    monkeypatch.setattr(device.mx, "ones", lambda shape: plain(shape, device.mx.float16))  # as many bits as TF32 has
    with pytest.raises(UserError, match="set MLX_ENABLE_TF32=0 before its first product"):
        device.check_float32(device.mx.Device(device.mx.cpu))


def test_a_negative_seed_is_bad_input(exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert validate_command(*exported, seed=-1, runtimes=["reference"]) == 2
    assert capsys.readouterr().err == "validate: seed -1: it must be 0 or more\n"


def test_explain_says_the_rule_with_the_codes_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(main, ["validate", "--explain"]) == 0
    text = capsys.readouterr().out
    assert ended_with(export_main, ["validate", "--explain"]) == 0
    assert capsys.readouterr().out == text == explain() + "\n"
    for precision, _ in BUDGETS:
        assert precision in text
    named = [line.split()[0].split(":") for line in text.partition("\nRuntimes\n")[2].splitlines()]
    assert {runtime for runtime, *_ in named} == ENGINES.keys()
    for runtime, *options in named:
        assert len(options) <= len(ENGINES[runtime].words)
    assert "float32   cpu     2^-24     4    8" in text
    assert max(map(len, text.splitlines())) <= 120


def test_two_settings_of_one_runtime_are_told_apart(exported: tuple[Path, Path]) -> None:
    names = ["onnxruntime:cpu:none", "onnxruntime:cpu:all"]
    report = compare(*exported, names, seed=1, threads=1, searches=False)
    assert [r.name for r in report.runtimes] == names
    assert {p.runtime for p in report.points} == set(names)
    assert [p.runtime for p in report.placements] == names
    assert {t.search for t in report.tokens} == {"top-1, teacher-forced", "cached against full"}  # without searches


@pytest.mark.fast("1-float16")
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2])
def test_lower_precision_stays_in_its_own_budget(precision: str, seed: int, exported: tuple[Path, Path]) -> None:
    report = compare(exported[0], None, [f"mlx:cpu:{precision}"], seed, searches=False)
    assert report.equal, report.failures()
    assert report.runtimes[0].budget == BUDGETS[precision, "cpu"]
    assert min(p.worst.rms_ratio for p in report.points) > 0.1  # it did compute in that precision


def test_a_precision_does_not_pass_for_a_better_one(exported: tuple[Path, Path]) -> None:
    checkpoint = open_checkpoint(exported[0])
    cases = grid(CONFIG, 1)
    for real, claimed in [("float16", "float32"), ("bfloat16", "float16")]:
        engine = open_engine(f"mlx:cpu:{real}", checkpoint, None)
        engine.precision = claimed
        report = compare_engines(checkpoint, [engine], cases, searches=False)
        assert not report.equal
        assert report.weights[0].problems
        assert {p.tap for p in report.points if p.passed} == set()


def test_weights_are_rounded_as_mlx_rounds_them() -> None:
    mx = pytest.importorskip("mlx.core")
    values = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    values[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 1e-30  # the first two lie between two bfloat16 numbers
    rounded = np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(stored_as(values, "bfloat16").view(np.uint32), rounded.view(np.uint32))
    half = np.array(mx.array(values).astype(mx.float16))
    assert np.array_equal(stored_as(values, "float16").view(np.uint16), half.view(np.uint16))


def test_a_device_without_its_own_budget_has_the_cpus_and_says_so() -> None:
    budget = budget_for("float32", "NnapiExecutionProvider")
    assert (budget.rms, budget.max) == (4.0, 8.0)
    assert budget.origin == "declared; not measured on this device"


def test_the_provider_of_every_node_is_reported(exported: tuple[Path, Path]) -> None:
    report = compare(*exported, ["onnxruntime", "mlx"], seed=1, threads=2, searches=False)
    ort, mlx = report.placements
    assert {node.graph for node in ort.nodes} == {
        "encoder_model",
        "decoder_model",
        "decoder_with_past_model",
        "decoder_model_merged",
    }
    assert ort.providers == {"CPUExecutionProvider": len(ort.nodes)}
    assert (ort.fallback, ort.copies) == ({}, {})
    for graph, operator, fewest in [("encoder_model", "MatMul", 6), ("decoder_model", "LayerNormalization", 3)]:
        assert sum((node.graph, node.operator) == (graph, operator) for node in ort.nodes) >= fewest
    merged = [node.operator for node in ort.nodes if node.graph == "decoder_model_merged"]
    assert "Identity" in merged  # the branch with a cache
    assert merged.count("If") == 1
    assert (ort.threads, ort.tf32) == ("2", "none")
    assert ort.versions
    assert (mlx.device, mlx.nodes, mlx.tf32) == ("cpu", (), "none")
    assert "mlx" in mlx.versions
    assert '"provider": "CPUExecutionProvider"' in report.to_json()


@pytest.mark.slow
def test_large_sessions_are_open_in_turn(exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, with the same verdict and places, and MLX's model only while it runs."""
    nodes, seen = [], set()
    opened = TurnSession.session

    def counted(self: TurnSession) -> Any:
        session = opened(self)
        seen.add(len(self._open))
        return session

    for limit in (protocol.LARGE, 0):
        monkeypatch.setattr(protocol, "LARGE", limit)
        report = compare(*exported, ["mlx", "onnxruntime"], seed=1, threads=1, longest=6, searches=False)
        assert report.equal
        nodes.append({(node.graph, node.provider) for node in report.placements[1].nodes})
        monkeypatch.setattr(TurnSession, "session", counted)
    assert nodes[0] == nodes[1]
    assert seen == {1}


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_of_sixteen_bits_is_proven(dtype: str, tmp_path: Path) -> None:
    """By default in float32, by its rule, and in its own type, by that type's; a file of that type has its bits."""
    kind = number_type(dtype)
    weights = {name: array.astype(kind) for name, array in random_weights(CONFIG, 1).items()}
    model = save_checkpoint(tmp_path / "model", CONFIG, weights)
    export_onnx(model, tmp_path / "onnx", precision=["float32", dtype], accept_loss=True)
    report = compare(model, tmp_path / "onnx", seed=1, threads=1, longest=8, searches=False)
    precisions = {runtime.name: runtime.precision for runtime in report.runtimes}
    assert {"mlx": "float32", f"mlx:cpu:{dtype}": dtype, "onnxruntime": "float32"}.items() <= precisions.items()
    assert report.equal, report.failures()
    found = dict[str, bytes]()
    for graph in (tmp_path / "onnx" / "onnx").glob(f"*{PRECISIONS[dtype].suffix}.onnx"):
        found |= {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in onnx.load(graph).graph.initializer}
    assert found.items() >= {name: array.tobytes() for name, array in weights.items()}.items()


def test_a_fallback_and_copies_are_seen() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    nodes = (
        Node("model", "a", "MatMul", cuda),
        Node("model", "b", "MemcpyToHost", cuda),
        Node("model", "c", "CumSum", cpu),
        Node("model", "d", "CumSum", cpu),
    )
    placement = Placement("onnxruntime:cuda", cuda, "off", "1", {}, nodes)
    assert placement.providers == {cuda: 2, cpu: 2}
    assert placement.fallback == {"CumSum": 2}
    assert placement.copies == {"model": 1}
    assert placement.summary == (
        "onnxruntime:cuda ran 2 operations on CUDAExecutionProvider, 2 operations on CPUExecutionProvider; "
        "fallback from CUDAExecutionProvider: CumSum 2; copies between memories: 1; TF32 off; threads: 1"
    )


def test_bfloat16_is_shown_as_float32(exported: tuple[Path, Path]) -> None:
    """NumPy has none. What reads the value inside the graph, in a branch too, reads bfloat16 still."""
    graph = """<ir_version: 9, opset_import: ["" : 20]> g (float[N] x, bool[] on) => (float[N] y, bfloat16[N] a) {
        a = Cast <to = 16> (x)
        y = If (on) <
            then_branch = yes () => (float[N] wide) { wide = Cast <to = 1> (a) },
            else_branch = no () => (float[N] same) { same = Identity (x) }>
    }"""
    engine = open_engine("onnxruntime:cpu:none", None, exported[1])
    assert isinstance(engine, OnnxRuntimeEngine)
    session = engine.open(exported[1] / "onnx" / "any.onnx", onnx.parser.parse_model(graph))
    x = np.array([1 + 2**-20, 3.0], np.float32)
    y, a = session.run(["y", "a"], {"x": x, "on": np.array(True)})
    np.testing.assert_array_equal([y, a], np.float32([[1, 3], [1, 3]]))
    np.testing.assert_array_equal(session.run(["y"], {"x": x, "on": np.array(False)})[0], x)


def test_profiles_leave_no_files_behind(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status = validate_command(*exported, runtimes=["onnxruntime"], seed=1, console=Console(file=io.StringIO()))
    assert status == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_operators_specification_agrees(exported: tuple[Path, Path]) -> None:
    report = compare(*exported, ["evaluator"], seed=1)
    assert report.equal, report.failures()
    assert {p.path for p in report.points} >= {"tapped", "plain", "cached", "cached, merged", "cached, tapped"}
    assert report.placements[0].providers == {"cpu": len(report.placements[0].nodes)}


def test_the_evaluator_refuses_large_models(
    exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("export.validate.engines.graph_runtimes.MOST_PARAMETERS", 10_000)
    assert validate_command(*exported, runtimes=["evaluator"]) == 2
    assert "million parameters; onnx's ReferenceEvaluator is plain Python" in capsys.readouterr().err


def _no_wasm() -> str:
    if shutil.which("node") is None:
        return "there is no Node.js"
    try:
        find_package("wasm", NODE_BUILD)
    except Unavailable as error:
        return str(error)
    return ""


needs_wasm = pytest.mark.skipif(bool(_no_wasm()), reason=_no_wasm())


@needs_wasm
def test_the_browsers_build_agrees(exported: tuple[Path, Path]) -> None:
    report = compare(*exported, ["wasm"], seed=1, threads=2)
    assert report.equal, report.failures()
    assert {p.path for p in report.points} >= {"tapped", "plain", "cached", "cached, merged", "cached, tapped"}
    placement = report.placements[0]
    assert (placement.device, placement.threads) == ("wasm", "2")
    assert placement.versions["onnxruntime-web"]


@needs_wasm
def test_the_browsers_build_shows_its_integers(tmp_path: Path) -> None:
    import_marian(write_marian(tmp_path / "original", STUDENT, 2, integers=True), tmp_path / "model")
    package = export_onnx(tmp_path / "model", tmp_path / "onnx", precision="int8", force=True)
    report = compare(tmp_path / "model", package, ["wasm"], seed=1, threads=1, longest=12, searches=False)
    products = [point for point in report.points if point.path == "on its integers"]
    assert len(products) > 20
    assert all(point.passed for point in products)


def test_what_shows_values_computes_what_the_files_do(tmp_path: Path) -> None:
    """A fusion in one of them alone rounds otherwise, and in front of integers that is a step now and then."""
    config = replace(CONFIG, d_model=256, encoder_layers=3, norm="layernorm", key_value_heads=None)
    _, package = write_model(config, tmp_path, 1)
    file = package / "onnx" / "encoder_model.onnx"
    ids = np.random.default_rng(1).integers(3, 60, (4, 40))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    copy = onnx.load(file, load_external_data=False)
    changed = open_changed(copy, file, session_options(1), ["CPUExecutionProvider"])
    shown, expected = (each.run(["last_hidden_state"], given)[0] for each in (changed, open_session(file)))
    assert np.array_equal(np.asarray(shown), np.asarray(expected))


@needs_wasm
def test_the_browsers_build_reports_its_errors(exported: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    shutil.copytree(exported[1], tmp_path / "onnx")
    graph = tmp_path / "onnx" / "onnx" / "encoder_model.onnx"
    model = onnx.load(graph, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    graph.write_bytes(model.SerializeToString())
    assert validate_command(exported[0], tmp_path / "onnx", runtimes=["wasm"], verify=False) == 2
    error = capsys.readouterr().err
    assert "encoder_model.onnx: ONNX Runtime Web can't load it (" in error
    assert "NoSuchOperator" in error


def test_wasm_without_node_or_its_package_is_exit_3(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("node"):
        monkeypatch.setenv("ONNXRUNTIME_WEB", str(tmp_path))
        assert validate_command(*exported, runtimes=["wasm"]) == 3
        assert f"onnxruntime-web is not installed (ONNXRUNTIME_WEB={tmp_path})" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert validate_command(*exported, runtimes=["wasm"]) == 3
    assert "needs Node.js" in capsys.readouterr().err
