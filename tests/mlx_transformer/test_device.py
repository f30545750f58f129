"""What the devices decide, and that a GPU's choices can be rehearsed on a CPU: truly traced, and for nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest
import runtimes
from tiny_step import batch, model, run, step_with
from waiting import PATIENCE

from mlx_transformer import device
from mlx_transformer.device import CPU, GPU, deciding_as, tuning
from mlx_transformer.runtime.decoding import MlxArrays
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path

ROOT = Path(__file__).resolve().parents[2]


def test_choices_follow_the_default_device_or_what_was_said(monkeypatch):
    monkeypatch.delenv(device.VARIABLE, raising=False)
    with mx.stream(mx.cpu):
        assert (tuning(), device.device_kind()) == (CPU, "cpu")
        with deciding_as("gpu"):
            assert tuning() == GPU
            with deciding_as("cpu"):
                assert tuning() == CPU
            elsewhere = []
            thread = threading.Thread(target=lambda: elsewhere.append(tuning()))
            thread.start()
            thread.join()
            assert elsewhere == [GPU]
        assert tuning() == CPU
        monkeypatch.setenv(device.VARIABLE, "cpu")
        assert tuning() == CPU
        monkeypatch.setenv(device.VARIABLE, "tpu")
        with pytest.raises(UserError, match="MLX_TRANSFORMER_DEVICE_CHOICES=tpu: choose cpu or gpu"):
            tuning()


def test_every_choice_has_an_effect():
    with deciding_as("gpu"):
        arrays, step = MlxArrays(), step_with(model())
    assert (arrays.check_every, arrays.drop_below, step.streams) == (GPU.check_every, GPU.drop_below, [])
    with deciding_as("cpu"):
        arrays, step = MlxArrays(), step_with(model())
    assert (arrays.check_every, arrays.drop_below) == (CPU.check_every, CPU.drop_below)
    assert step.streams


traced = pytest.mark.skipif(not runtimes.mlx_gpu() and shutil.which("g++") is None, reason="MLX asks for g++ here")


@traced
def test_a_rehearsed_step_is_traced_once_a_shape():
    traces = []
    with deciding_as("gpu"):
        step = step_with(model())
        original = step.loss
        step.loss = lambda *arguments: (traces.append(1), original(*arguments))[1]
        for seed in range(3):
            run(step, batch(seed=seed))
        assert len(traces) == 1
        run(step, batch(ragged=False))
        assert len(traces) == 2


COMPILED = """
import mlx.core as mx
from mlx_transformer.device import tuning
from mlx_transformer.nn.feedforward import ACTIVATIONS
print(tuning().compiles, ACTIVATIONS["gelu"](mx.array(1.0)).item())
"""


@pytest.mark.skipif(runtimes.mlx_gpu(), reason="a GPU compiles for itself")
def test_a_rehearsed_process_never_compiles_cpp(tmp_path):
    """A g++ first in PATH that says it is there, as MLX asks, and notes what else it is called for."""
    compiler, calls = tmp_path / "g++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\ncase "$1" in --version) exit 0;; esac\necho "$@" >> {calls}\nexit 1\n')
    compiler.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    said = in_a_process(COMPILED, **variables, MLX_TRANSFORMER_DEVICE_CHOICES="gpu")
    assert said.stdout == "True 0.8413447141647339\n", said.stderr
    assert not calls.exists()
    unrehearsed = "import mlx.core as mx; mx.compile(lambda x: mx.exp(x) * x + 1)(mx.array(1.0)).item()"
    in_a_process(unrehearsed, **variables, MLX_TRANSFORMER_DEVICE_CHOICES="")
    assert calls.exists(), "this test would not see a compiler at work"


def test_the_device_can_be_named():
    code = "import mlx.core as mx; from mlx_transformer.device import device_kind; print(device_kind())"
    assert in_a_process(code, MLX_TRANSFORMER_DEVICE="cpu").stdout == "cpu\n"
    said = in_a_process(code, MLX_TRANSFORMER_DEVICE="tpu").stderr
    assert "MLX_TRANSFORMER_DEVICE=tpu: choose cpu or gpu, or unset it" in said
    if not runtimes.mlx_gpu():
        said = in_a_process(code, MLX_TRANSFORMER_DEVICE="gpu").stderr
        assert "MLX_TRANSFORMER_DEVICE=gpu: MLX sees no GPU here" in said


def test_no_other_file_asks_which_device_it_is():
    asking = re.compile(r"default_device|\bDeviceType")
    files = [path for folder in ("mlx_transformer", "export") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if asking.search(path.read_text(encoding="utf-8"))}
    assert found == {"mlx_transformer/device.py"}


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda", "metal"])
def test_memory_is_bounded_and_resident_while_a_gpu_trains_and_as_before_afterwards(monkeypatch, kind):
    limits = {"cache": 70, "wired": 0, "memory": 1350}

    def setter(name):
        def set_limit(bytes):
            before, limits[name] = limits[name], bytes
            return before

        return set_limit

    monkeypatch.setattr(device, "_on_gpu", lambda: kind != "cpu")
    monkeypatch.setattr(device, "device_kind", lambda: kind)
    monkeypatch.setattr(mx, "set_cache_limit", setter("cache"))
    monkeypatch.setattr(mx, "set_wired_limit", setter("wired"))
    monkeypatch.setattr(mx, "set_memory_limit", setter("memory"))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 900})
    expected = {"cpu": (70, 0, 1350), "cuda": (50, 0, 1350), "metal": (50, 900, 800)}[kind]
    during = []

    def interrupted():
        with device.training_memory(50.0, 800.0):
            during.append((limits["cache"], limits["wired"], limits["memory"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert during == [expected]
    assert limits == {"cache": 70, "wired": 0, "memory": 1350}
    with device.training_memory(None):
        assert limits["cache"] == 70
        assert limits["memory"] == (900 if kind == "metal" else 1350)
