"""Runtime webgpu in a real browser (`make test-browser`): judged as every other, on whatever adapter there is."""

import dataclasses
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from imports import ROOT
from random_models import write_model
from waiting import PATIENCE, until

from export.interface import SENTENCE_EMBEDDING
from export.validate import Report, compare, validate_command
from export.validate.engines.graph_runtimes import PROVIDER
from export.validate.rule import BUDGETS
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import TextEmbedding

pytestmark = pytest.mark.consumers

SIZES = dict(vocab_size=40, d_model=32, heads=4, key_value_heads=2, d_ff=48, max_positions=12)
CONFIG = TransformerConfig(**SIZES, encoder_layers=1, decoder_layers=1)
ENCODER = TransformerConfig(**SIZES, architecture="encoder", encoder_layers=1, decoder_layers=0, norm="rmsnorm")
# What WebGPU leaves to wasm: positions and the causal mask, of 64-bit integers. No product, no attention.
ON_HOST = set("Add And Cast Concat CumSum Gather LessOrEqual Max Range Shape Sub Unsqueeze".split())


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where `make test-browser` installs onnxruntime-web is relative to the repository."""
    monkeypatch.chdir(ROOT)
    yield
    assert not browsers()


def browsers() -> list[str]:
    """Processes that use a profile of ours."""
    done = subprocess.run(["ps", "-axww", "-o", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "validate-browser-" in line]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(CONFIG, tmp_path_factory.mktemp("m"), 1, target="web")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(ENCODER, tmp_path_factory.mktemp("e"), 1)


def judged(models: tuple[Path, Path], runtime: str = "webgpu") -> Report:
    return compare(*models, [runtime], seed=1, longest=5, threads=1)


def test_every_tensor_is_within_float32_s_budget(exported: tuple[Path, Path]) -> None:
    report = judged(exported)
    assert report.equal, report.failures()
    assert {p.path for p in report.points} == {"tapped", "plain", "cached, merged", "cached, merged, tapped"}
    assert {t.search for t in report.tokens} >= {"greedy", "sampling", "beam 4"}
    [runtime], [placement] = report.runtimes, report.placements
    assert runtime.budget == BUDGETS["float32", "webgpu"]
    assert (runtime.budget.rms, runtime.budget.max) == (4, 8)
    assert {"onnxruntime-web", "browser", "adapter"} == runtime.details.keys()
    assert placement.device == PROVIDER
    on_gpu = {node.operator for node in placement.nodes if node.provider == PROVIDER}
    assert {"MatMul", "Softmax", "LayerNormalization"} <= on_gpu
    assert {*placement.fallback} <= ON_HOST
    assert placement.copies


def test_the_processor_s_adapter_by_name(encoder: tuple[Path, Path]) -> None:
    report = judged(encoder, "webgpu:software")
    assert report.equal, report.failures()
    assert report.runtimes[0].details["adapter"].endswith(", on the processor")


@pytest.mark.parametrize("precision", ["float32", "int4"])
def test_the_vector_of_a_text_is_its_graph_s(precision: str, tmp_path: Path) -> None:
    """An encoder as ModernBERT is, by turns with a window and without, and how its folder pools."""
    turns = ({"window": 3, "rotary_base": 100.0}, {})
    modern = dataclasses.replace(ENCODER, encoder_layers=2, positions="rotary", layer_pattern=turns)
    pooled = TextEmbedding(pooling=("cls", "mean"), normalize=True)
    options = dict(target="web", precision=precision, accept_loss=True)
    report = judged(write_model(modern, tmp_path, 3, embedding=pooled, **options))
    assert report.equal, report.failures()
    assert {point.inputs for point in report.points if point.tap == SENTENCE_EMBEDDING} == {len(report.inputs)}


def test_a_mistake_is_found_and_named(encoder: tuple[Path, Path], tmp_path: Path) -> None:
    path = encoder[1] / "onnx" / "model.onnx"
    original = path.read_bytes()
    model = onnx.load_from_string(original)
    norm = next(t for t in model.graph.initializer if t.name == "encoder.layers.0.feed_forward_norm.weight")
    norm.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(norm) * 1.0001, norm.name))
    path.write_bytes(model.SerializeToString())
    try:
        report = judged(encoder)
    finally:
        path.write_bytes(original)
    assert not report.equal
    assert any("culprit: encoder.layers.0" in line for line in report.failures()), report.failures()


def test_its_errors_are_told(encoder: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    path = encoder[1] / "onnx" / "model.onnx"
    original = path.read_bytes()
    model = onnx.load_from_string(original)
    model.graph.node[0].op_type = "NoSuchOperator"
    path.write_bytes(model.SerializeToString())
    try:
        assert validate_command(*encoder, runtimes=["webgpu"], verify=False) == 2
    finally:
        path.write_bytes(original)
    error = capsys.readouterr().err
    assert "model.onnx: ONNX Runtime Web can't load it (" in error
    assert "NoSuchOperator" in error


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_it_ends_with_the_program_however_that_ends(name: str, tmp_path: Path) -> None:
    """With SIGKILL nothing of ours can end it: it sees that its pipe is closed."""
    code = """
        import sys, tempfile, time
        tempfile.tempdir = sys.argv[1]
        from export.validate.engines.web_host import Browser, find_package
        opened = Browser(find_package("webgpu"), 1)
        print("opened", flush=True)
        time.sleep(300)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "opened\n"
            assert browsers()
            program.send_signal(getattr(signal, name))
            program.wait(PATIENCE)
        finally:
            program.kill()
    until(lambda: not browsers())
