"""Several processes that train one model together."""

import os
import re
import signal
import time

import numpy as np
import pytest
from command_line import caller, refused
from tiny_run import metrics, start, write_recipe
from waiting import PATIENCE, until

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.training.group import ALONE, VARIABLE, joined

RANKS = 2
call = pytest.fixture(caller)


def weights(folder):
    return dict(open_checkpoint(folder).tensors())


def ended(process):
    out, error = process.communicate(timeout=PATIENCE)
    return process.returncode, out, error


def launched(*arguments, count=RANKS, **options):
    return start("launch", "-n", count, "--", "train", *arguments, **options)


def recipe_of(folder, **training):
    """Without dropout, which each process draws for itself."""
    path = write_recipe(folder, **training)
    path.write_text(path.read_text(encoding="utf-8").replace("[model]", "[model]\ndropout = 0.0"), encoding="utf-8")
    return path


def test_two_processes_are_one_with_twice_the_batches(tmp_path, call):
    """Over 50 steps whose batches have unequal numbers of tokens: losses and weights to float32's rounding."""
    given = recipe_of(tmp_path, steps=50, learning_rate=1e-3, keep=1)
    status, out, error = ended(launched(given, "--out", tmp_path / "two"))
    assert status == 0, error
    assert re.match(r".*two/model: [\d,]+ parameters, 50 steps", out)
    status, _, error = call("train", given, "--accumulate", RANKS, "--out", tmp_path / "one")
    assert status == 0, error
    two, one = (metrics(tmp_path / name, "train") for name in ("two", "one"))
    assert [entry["step"] for entry in two] == list(range(1, 51))
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose([e[name] for e in two], [e[name] for e in one], rtol=2e-4)
    assert [e["epoch"] for e in two] == [e["epoch"] for e in one]
    found, expected = weights(tmp_path / "two" / "model"), weights(tmp_path / "one" / "model")
    for name, array in found.items():
        assert np.abs(array - expected[name]).max() < 1e-4, name
    assert metrics(tmp_path / "two", "valid")[-1]["loss"] == pytest.approx(
        metrics(tmp_path / "one", "valid")[-1]["loss"], rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_a_run_of_several_processes_goes_on_where_it_was(tmp_path):
    """Dropout included, bit for bit."""
    given = write_recipe(tmp_path, steps=6)
    for name, steps in (("whole", [6]), ("parts", [3, 6])):
        for i, count in enumerate(steps):
            arguments = ["--resume", tmp_path / name] if i else [given, "--out", tmp_path / name]
            status, _, error = ended(launched(*arguments, "--steps", count))
            assert status == 0, error
    whole, parts = weights(tmp_path / "whole" / "model"), weights(tmp_path / "parts" / "model")
    assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


def test_one_process_is_a_plain_run(tmp_path):
    given = write_recipe(tmp_path, steps=4)
    alone = launched(given, "--out", tmp_path / "launched", count=1)
    for process in (alone, start("train", given, "--out", tmp_path / "plain")):
        status, _, error = ended(process)
        assert status == 0, error
    found, plain = (weights(tmp_path / name / "model") for name in ("launched", "plain"))
    assert all(found[name].tobytes() == plain[name].tobytes() for name in plain)


def children(process):
    """Process ids of the ranks, rank 0 first."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return sorted(int(pid) for pid in file.read().split())


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="ranks are found in /proc")


def running(folder, process):
    until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder, "train")) > 2, process)


@needs_proc
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), *range(1, RANKS)])
def test_a_killed_process_ends_the_others_in_seconds(rank, tmp_path):
    out = tmp_path / "run"
    with launched(write_recipe(tmp_path, steps=100_000, checkpoint_steps=2), "--out", out) as process:
        running(out, process)
        os.kill(children(process)[rank], signal.SIGKILL)
        before = time.monotonic()
        status, _, error = ended(process)
    assert time.monotonic() - before < 30
    assert status == 2
    lines = [line for line in error.splitlines() if line.startswith("mlx-transformer: ")]
    expected = f"rank {rank} was ended by signal 9, so all ended; the last checkpoint is whole"
    assert any(expected in line for line in lines), error
    assert "Traceback" not in error
    # What it had saved is whole, and goes on.
    status, _, error = ended(launched("--resume", out, "--steps", 3 + metrics(out, "train")[-1]["step"]))
    assert status == 0, error


@needs_proc
def test_processes_whose_launcher_was_killed_save_and_end(tmp_path):
    out = tmp_path / "run"
    with launched(write_recipe(tmp_path, steps=100_000), "--out", out) as process:
        running(out, process)
        ranks = children(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    until(lambda: all(stat(rank) == "Z" for rank in ranks))
    assert open_checkpoint(out / "model")


def stat(pid):
    """Z: it is no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_signal_ends_all_and_saves(tmp_path):
    out = tmp_path / "run"
    with launched(write_recipe(tmp_path, steps=100_000), "--out", out) as process:
        running(out, process)
        process.send_signal(signal.SIGTERM)
        status, _, error = ended(process)
    assert status == 128 + signal.SIGTERM, error
    assert "interrupted: saving step" in error
    assert open_checkpoint(out / "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", 2, "--", "validate", "x"], "launch runs train, not 'validate'"),
        (["--", "train"], "give either -n, processes on this machine, or --hostfile"),
        (["-n", 0, "--", "train"], "-n 0: give 1 to "),
        (["-n", 99999, "--", "train"], "processes, four a core"),
        (["--hostfile", "nowhere", "--", "train"], "nowhere: no such hostfile"),
    ],
)
def test_refused(arguments, message, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(call("launch", *arguments), message)


def test_what_all_processes_refuse_is_said_once(tmp_path):
    arguments = ["launch", "-n", RANKS, "--", "train", "nowhere", "--out", "x"]
    status, out, error = ended(start(*arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}))
    assert (status, out) == (2, "")
    assert "nowhere: no such recipe file" in error
    assert error.count("\n") == 1


def test_alone(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert joined() is ALONE
    assert (ALONE.rank, ALONE.size, ALONE.leads) == (0, 1, True)
    assert ALONE.broadcast([1.5]) == [1.5]
    assert ALONE.largest(3) == 3
