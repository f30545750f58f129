"""Ctrl-C, SIGTERM and kill -9 on a training process: the step is finished, all is saved, --resume goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from combined import thinned_rows
from tiny_run import COMMAND, metrics, start, write_recipe
from waiting import PATIENCE, until

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.training.progress import StopSignal
from mlx_transformer.training.run_folder import Run


def trained_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest_step(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


@pytest.mark.parametrize(
    ("number", "status"), thinned_rows([(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], 3)
)
def test_a_signal_saves_and_resume_goes_on(tmp_path, number, status):
    recipe, run = write_recipe(tmp_path, steps=1_000_000), tmp_path / "run"
    with start("train", recipe, "--out", run) as process:
        until(lambda: trained_steps(run) > 3, process)
        process.send_signal(number)
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, error
    step = newest_step(run)
    assert f"interrupted: saving step {step:,}" in error
    assert "saved; continue with --resume" in error
    assert error.count("interrupted") == 1
    assert "Traceback" not in error
    assert f"{step} steps" in out
    assert open_checkpoint(run).config.d_model == 16  # the model so far is there
    assert metrics(run, "train")[-1]["step"] == step
    assert metrics(run, "valid") == []  # who interrupts does not want to wait for it
    with start("train", recipe, "--out", run, "--resume", "--steps", step + 2) as process:
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert f"resumed from step-{step:08d}" in error
    assert f"{step + 2} steps" in out


def test_a_terminal_that_closes_loses_nothing(tmp_path):
    """Nobody can be told any more; and the signal comes twice, from the system and from the shell."""
    recipe, run = write_recipe(tmp_path, steps=1_000_000), tmp_path / "run"
    reading, terminal = os.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with start("train", recipe, "--out", run, **streams) as process:
        os.close(terminal)
        until(lambda: trained_steps(run) > 3)
        os.close(reading)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        assert process.wait(timeout=PATIENCE) == 129
    step = newest_step(run)
    assert metrics(run, "train")[-1]["step"] == step
    assert open_checkpoint(run / "model").config.d_model == 16


def test_a_second_hangup_finds_the_process_ending_in_order():
    """Between the end of the run and that of the process, too: there the handler that was before would kill it."""
    before, mine = signal.getsignal(signal.SIGHUP), lambda *_: None
    try:
        for handler, after in ((signal.SIG_DFL, signal.SIG_IGN), (mine, mine)):
            signal.signal(signal.SIGHUP, handler)
            with StopSignal() as stop:
                assert not stop.requested()
            assert signal.getsignal(signal.SIGHUP) is handler  # none came
            with StopSignal() as stop:
                signal.raise_signal(signal.SIGHUP)
            assert stop.received == signal.SIGHUP
            assert signal.getsignal(signal.SIGHUP) is after
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_nohup_trains_on(tmp_path):
    recipe, run = write_recipe(tmp_path, steps=1_000_000), tmp_path / "run"
    code = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + COMMAND[2]
    with start("train", recipe, "--out", run, command=[sys.executable, "-c", code]) as process:
        until(lambda: trained_steps(run) > 3, process)
        process.send_signal(signal.SIGHUP)
        steps = trained_steps(run)
        until(lambda: trained_steps(run) > steps + 3, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 143


def test_training_goes_on_when_nobody_reads_what_it_says(tmp_path):
    recipe, run = write_recipe(tmp_path, steps=12, valid_every=3), tmp_path / "run"
    reading, writing = os.pipe()
    os.close(reading)
    with start("train", recipe, "--out", run, stderr=writing) as process:
        os.close(writing)
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "12 steps" in out


def kill_and_resume(tmp_path: Path, kills: int) -> None:
    recipe, run = write_recipe(tmp_path, steps=1_000_000, checkpoint_seconds=0), tmp_path / "run"
    delays = random.Random(time.time_ns())
    reached = 0
    for attempt in range(kills):
        with start("train", recipe, "--out", run, *(["--resume"] if attempt else [])) as process:
            until(lambda least=reached + 2: newest_step(run) >= least, process)
            time.sleep(delays.uniform(0, 0.1))
            known = newest_step(run)
            process.kill()
            process.wait()
        complaints: list[str] = []
        newest = Run.newest(_unlocked(run, complaints))
        assert not complaints
        assert newest is not None
        assert newest[2]["step"] >= known - 1, "a checkpoint is lost"
        reached = newest[2]["step"]
    with start("train", recipe, "--out", run, "--resume", "--steps", reached + 1) as process:
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert f"{reached + 1} steps" in out
    steps = [entry["step"] for entry in metrics(run, "train")]
    assert steps == list(range(1, reached + 2)), "the curve of a run that was never killed"


def _unlocked(folder: Path, complaints: list[str]) -> Run:
    """To look at a run's checkpoints alone."""
    run = Run.__new__(Run)
    run.folder, run.warn = folder, complaints.append
    return run


def test_kill_9_and_resume(tmp_path):
    kill_and_resume(tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_kill_9_of_a_run_by_the_clock(tmp_path):
    """Its rates depend on the time, and still each step that is computed again gives the same loss."""
    options = {"steps": None, "minutes": 2.0, "warmup_steps": None, "cooldown": 1.0, "checkpoint_seconds": 0.5}
    recipe, run = write_recipe(tmp_path, **options), tmp_path / "run"
    earlier: dict[int, tuple[float, float]] = {}
    for attempt in range(3):
        least_steps = len(earlier) + 5
        with start("train", recipe, "--out", run) if attempt == 0 else start("train", "--resume", run) as process:
            until(lambda least=least_steps: trained_steps(run) > least and newest_step(run) > 0, process)
            process.kill()
            process.wait()
        curve = {entry["step"]: (entry["loss"], entry["learning_rate"]) for entry in metrics(run, "train")}
        assert len(curve) > len(earlier)
        assert {step: curve[step] for step in earlier} == earlier
        earlier = curve
    assert len({rate for _, rate in earlier.values()}) == len(earlier)


@pytest.mark.slow
def test_kill_9_and_resume_many_times(tmp_path):
    kill_and_resume(tmp_path, kills=30)
