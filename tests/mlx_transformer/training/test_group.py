"""Several processes that train one model together."""

import os
import re
import signal
import socket
import sys

import numpy as np
import pytest
from command_line import caller, refused
from forked import Process
from imports import ROOT
from tiny_run import COMMAND, metrics, start, write_recipe
from waiting import PATIENCE, until

from mlx_transformer.commands.launching import _port
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
    """Over two epochs whose batches have unequal numbers of tokens: losses and weights to float32's rounding."""
    given = recipe_of(tmp_path, steps=8, learning_rate=1e-3, keep=1)
    status, out, error = ended(launched(given, "--out", tmp_path / "two"))
    assert status == 0, error
    assert re.match(r".*two/model: [\d,]+ parameters, 8 steps", out)
    status, _, error = call("train", given, "--accumulate", RANKS, "--out", tmp_path / "one")
    assert status == 0, error
    two, one = (metrics(tmp_path / name, "train") for name in ("two", "one"))
    assert [entry["step"] for entry in two] == list(range(1, 9))
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


@pytest.mark.slow
def test_one_process_is_a_plain_run(tmp_path):
    given = write_recipe(tmp_path, steps=4)
    alone = launched(given, "--out", tmp_path / "launched", count=1)
    for process in (alone, start("train", given, "--out", tmp_path / "plain")):
        status, _, error = ended(process)
        assert status == 0, error
    found, plain = (weights(tmp_path / name / "model") for name in ("launched", "plain"))
    assert all(found[name].tobytes() == plain[name].tobytes() for name in plain)


def children(process):
    """Process ids of the ranks in the order in which they were started, whatever numbers the system had for them."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="ranks are found in /proc")


def running(folder, process):
    until(lambda: len(metrics(folder, "train")) > 2, process)


BRIEF = "from mlx_transformer.commands import launching\nlaunching.BY_THEMSELVES, launching.ONCE_TOLD = 0.2, 1.0\n"
"""A launcher that gives the others little time to end."""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), *range(1, RANKS)])
def test_a_killed_process_ends_the_others_in_seconds(rank, tmp_path):
    out = tmp_path / "run"
    given, brief = write_recipe(tmp_path, steps=100_000, checkpoint_steps=2), [*COMMAND[:2], BRIEF + COMMAND[2]]
    with launched(given, "--out", out, command=brief) as process:
        running(out, process)
        os.kill(children(process)[rank], signal.SIGKILL)
        until(lambda: process.poll() is not None, seconds=30)
        status, _, error = ended(process)
    assert status == 2
    lines = [line for line in error.splitlines() if line.startswith("mlx-transformer: ")]
    expected = f"rank {rank} was ended by signal 9, so all ended; the last checkpoint is whole"
    assert any(expected in line for line in lines), error
    assert "Traceback" not in error
    # What it had saved is whole, and goes on.
    status, _, error = ended(launched("--resume", out, "--steps", 3 + metrics(out, "train")[-1]["step"]))
    assert status == 0, error


@pytest.mark.slow
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


@pytest.mark.slow
@needs_proc
def test_processes_whose_launcher_was_killed_before_they_knew_it_end(tmp_path):
    with launched(write_recipe(tmp_path, steps=100_000), "--out", tmp_path / "run") as process:
        until(lambda: len(children(process)) == RANKS, process)
        ranks = children(process)
        process.kill()
    try:
        until(lambda: all(stat(rank) == "Z" for rank in ranks))
    finally:
        for rank in ranks:
            if stat(rank) != "Z":
                os.kill(rank, signal.SIGKILL)


def test_a_port_is_kept_for_the_ring_that_takes_it_later():
    with _port() as kept, socket.socket() as other, socket.socket() as ring:
        address = kept.getsockname()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as MLX has them
            ring.setsockopt(socket.SOL_SOCKET, option, 1)
        ring.bind(address)
        ring.listen()
        with socket.create_connection(address, PATIENCE):
            ring.accept()[0].close()


def stat(pid):
    """Z: it is no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# Imported by every process of Python: in rank 0 the end takes longer than the others are given to end by themselves.
SLOW_END = """
import time
from mlx_transformer.commands import launching
from mlx_transformer.training.trainer import Trainer

launching.BY_THEMSELVES = 0.1
finish = Trainer._finish

def slowly(trainer):
    time.sleep(0.5)
    finish(trainer)

Trainer._finish = slowly
"""


@pytest.mark.slow  # two processes without a fork
def test_a_signal_ends_all_and_saves(tmp_path):
    """And nobody is ended while the first still writes."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_END)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    out = tmp_path / "run"
    given = write_recipe(tmp_path, steps=100_000)
    with launched(given, "--out", out, kind=Process, env={**os.environ, "PYTHONPATH": paths}) as process:
        running(out, process)
        process.send_signal(signal.SIGTERM)
        status, _, error = ended(process)
    assert status == 128 + signal.SIGTERM, error
    assert "interrupted: saving step" in error
    assert open_checkpoint(out / "model")
    assert (out / "checkpoints" / f"step-{metrics(out, 'train')[-1]['step']:08d}").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", 2, "--", "validate", "x"], "launch runs train, not 'validate'"),
        (["--", "train"], "give either -n, processes on this machine, or --hostfile"),
        (["-n", 0, "--", "train"], "-n 0: give 1 to "),
        (["-n", 99999, "--", "train"], "processes (at most four per core)"),
        (["--hostfile", "nowhere", "--", "train"], "nowhere: no such hostfile"),
    ],
)
def test_refused(arguments, message, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(call("launch", *arguments), message)


def test_what_all_processes_refuse_is_said_once(tmp_path):
    arguments = ["launch", "-n", RANKS, "--", "train", "nowhere", "--out", "x"]
    patient = f"from mlx_transformer.commands import launching\nlaunching.BY_THEMSELVES = {PATIENCE}\n{COMMAND[2]}"
    given = {
        "command": [sys.executable, "-c", patient],
        "kind": Process,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
    }
    status, out, error = ended(start(*arguments, cwd=tmp_path, **given))
    assert (status, out) == (2, "")
    assert "nowhere: no such recipe file" in error
    assert error.count("\n") == 1


def test_alone(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert joined() is ALONE
    assert (ALONE.rank, ALONE.size, ALONE.leads) == (0, 1, True)
    assert ALONE.broadcast([1.5]) == [1.5]
    assert ALONE.largest(3) == 3
