"""The cross-check on every runtime and execution provider that this machine has (`runtimes.py`): all shapes of a model,
thread counts 1 and 2, the rows of a batch in another order, all targets."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runtimes
from combined import combined, slow, thinned
from random_models import write_model
from small_models import alone, encoder_decoder

from export.targets.table import TARGETS
from export.validate import compare, compare_engines
from export.validate.cases import Case, grid
from export.validate.engines import open_engine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig

pytestmark = pytest.mark.gpu_path

ROOT = Path(__file__).parents[3]
CONFIGS: dict[str, TransformerConfig] = {
    "paper": encoder_decoder("paper"),
    "modern": encoder_decoder("modern"),  # rotary positions, grouped heads
    "encoder": alone("odd widths", "encoder"),
    "decoder": alone("modern", "decoder"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: write_model(c, tmp_path_factory.mktemp("m"), 1) for name, c in CONFIGS.items()}


@pytest.mark.fast("onnxruntime:cpu:none-paper", "onnxruntime:cpu:extended-encoder", "reference-encoder")
@pytest.mark.parametrize(("runtime", "model"), combined([*runtimes.strict(), *runtimes.lower()], CONFIGS, step=2))
def test_the_same_function(runtime: str, model: str, exported: dict[str, tuple[Path, Path]]) -> None:
    report = compare(*exported[model], [runtime], longest=24, threads=1)
    assert report.equal, (report.seed, report.failures())


ONNX_RUNTIMES = [name for name in runtimes.strict() if name.startswith("onnxruntime:")]


@pytest.mark.fast("onnxruntime:cpu:basic-1")
@pytest.mark.parametrize(("runtime", "threads"), combined(ONNX_RUNTIMES, [1, 2], step=2))
def test_any_number_of_threads(runtime: str, threads: int, exported: dict[str, tuple[Path, Path]]) -> None:
    report = compare(*exported["paper"], [runtime], longest=24, threads=threads, searches=False)
    assert report.equal, (report.seed, report.failures())
    assert report.placements[0].threads == str(threads)
    assert report.runtimes[0].details["graph optimisation"] == runtime.split(":")[2]


@pytest.mark.fast("onnxruntime")
@pytest.mark.parametrize("runtime", ["mlx:cpu", "onnxruntime"])
def test_the_order_of_a_batchs_rows_does_not_matter(runtime: str, exported: dict[str, tuple[Path, Path]]) -> None:
    """No false alarm, and the same logits but for rounding, whatever rows a row has beside it."""
    checkpoint = open_checkpoint(exported["paper"][0])
    engine = open_engine(runtime, checkpoint, exported["paper"][1], threads=1)
    cases = [case for case in grid(checkpoint.config, 6, longest=24) if len(case.ids) > 2]
    order = np.random.default_rng(1)
    permuted = [_permuted(case, order.permutation(len(case.ids))) for case in cases]
    report = compare_engines(checkpoint, [engine], [*cases, *permuted], searches=False)
    assert report.equal, report.failures()


@slow
@pytest.mark.parametrize("target", thinned(TARGETS, 5))
def test_every_target_is_what_mlx_computes(target: str, tmp_path: Path) -> None:
    """By what is judged without being asked: MLX on the CPU, on a GPU where there is one, and the exported files."""
    models = write_model(CONFIGS["modern"], tmp_path, 1, target=target)
    report = compare(*models, longest=20, threads=1)
    assert report.equal, (report.seed, report.failures())
    assert {r.name for r in report.runtimes} >= {"mlx", "onnxruntime"} | ({"mlx:gpu"} if runtimes.mlx_gpu() else set())


def _permuted(case: Case, rows: np.ndarray) -> Case:
    mask = None if case.mask is None else case.mask[rows]
    targets = None if case.target_ids is None else case.target_ids[rows]
    return replace(case, name=f"{case.name}, permuted", ids=case.ids[rows], mask=mask, target_ids=targets)


@pytest.mark.gpu
def test_tf32_of_mlx(exported: dict[str, tuple[Path, Path]]) -> None:
    """In a process of its own: MLX takes its setting once."""
    command = [sys.executable, "-m", "export", "validate", *map(str, exported["paper"]), "--runtimes", "mlx:gpu:tf32"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(
    not runtimes.cuda_required() and "cuda" not in runtimes.providers(), reason="ONNX Runtime has no CUDA here"
)
def test_on_cuda_the_matrix_products_ran_on_cuda(exported: dict[str, tuple[Path, Path]]) -> None:
    report = compare(*exported["paper"], ["onnxruntime:cuda"], seed=1)
    placement = report.placements[0]
    products = [node for node in placement.nodes if node.operator in ("MatMul", "Gemm", "FusedMatMul")]
    assert products
    assert {node.provider for node in products} == {"CUDAExecutionProvider"}
    assert placement.tf32 == "off (use_tf32)"


@pytest.mark.gpu
@pytest.mark.skipif(not runtimes.cuda_required(), reason="only `make test-cuda` demands CUDA")
def test_cuda_is_what_ran() -> None:
    import mlx.core as mx

    assert "cuda" in runtimes.providers(), "ONNX Runtime's CUDA provider doesn't load here"
    assert runtimes.mlx_gpu(), "MLX sees no GPU here"
    assert mx.cuda.is_available(), "MLX's GPU is not CUDA"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU here")
def test_make_test_cuda_is_an_error_where_nothing_can_run_on_cuda() -> None:
    done = subprocess.run(["make", "test-cuda"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "nvidia-smi lists none here, so nothing ran" in done.stderr


@pytest.mark.skipif(runtimes.mlx_gpu() or "cuda" in runtimes.providers(), reason="there is a GPU here")
@pytest.mark.slow
def test_with_cuda_demanded_its_absence_fails_and_skips_nothing() -> None:
    chosen = "what_ran or cuda:all-encoder or tf32_of_mlx"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "REQUIRE_CUDA": "1", "PYTEST_ADDOPTS": ""}
    )
    assert done.returncode == 1, done.stdout
    summary = done.stdout.splitlines()[-1]
    assert " failed" in summary
    assert "passed" not in summary
    assert "skipped" not in summary
