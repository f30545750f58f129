"""Runs that end by the clock: the time of each step is recorded, and a resumed run computes the same again."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from tiny_run import metrics, recipe

from mlx_transformer.system.errors import UserError
from mlx_transformer.training import progress as clock_module
from mlx_transformer.training.progress import CLOCK, Clock
from mlx_transformer.training.trainer import Trainer

BY_THE_CLOCK = {
    "steps": None,
    "minutes": 1.0,
    "warmup_steps": None,
    "cooldown": 0.5,
    "checkpoint_seconds": 0,
    "keep": 99,
}


class Time:
    """In place of the module `time`: each look at it is `pace` seconds after the last."""

    def __init__(self, pace: float):
        self.pace, self.now = pace, 1000.0

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now


def at_pace(monkeypatch, pace: float) -> Time:
    time = Time(pace)
    monkeypatch.setattr(clock_module, "time", time)
    return time


def train(folder, out, resume=False, **options):
    return Trainer(recipe(folder, **{**BY_THE_CLOCK, **options}), folder / out, resume).run()


def curve(run):
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in metrics(run, "train")]


def test_time_goes_on_where_it_stopped(tmp_path, monkeypatch):
    at_pace(monkeypatch, 1.0)
    with Clock(tmp_path / CLOCK, 0.0) as clock:
        assert [clock.begin(0), clock.seconds(), clock.begin(1), clock.seconds()] == [1, 2, 3, 4]
    at_pace(monkeypatch, 10.0)
    with Clock(tmp_path / CLOCK, 4.0) as clock:  # after the first step, say
        assert clock.begin(1) == 3
        assert clock.seconds() == 13
        assert clock.begin(2) == 23
    assert (tmp_path / CLOCK).read_text(encoding="utf-8") == "0 1.0\n1 3.0\n2 23.0\n"
    with Clock(None, 7.0) as clock:
        assert clock.begin(5) == 17
    assert [path.name for path in tmp_path.iterdir()] == [CLOCK]


def test_lines_that_are_no_times_are_passed_over(tmp_path, monkeypatch):
    at_pace(monkeypatch, 1.0)
    path = tmp_path / CLOCK
    path.write_bytes(b"0 0.5\n1 1.5\nnonsense\n2\n\xff 3\n3 nan\n4 4.5\n5 5.")  # the last one cut short
    with Clock(path, 0.0) as clock:
        assert [clock.begin(step) for step in (0, 1, 4)] == [0.5, 1.5, 4.5]
        assert [clock.begin(step) for step in (3, 5)] == [5.5, 6.5]
    assert path.read_bytes().endswith(b"\n4 4.5\n3 5.5\n5 6.5\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk(tmp_path):
    with Clock(tmp_path / CLOCK, 0.0) as clock:
        (tmp_path / CLOCK).symlink_to("/dev/full")
        with pytest.raises(UserError, match=r"clock\.txt: could not be written .*--resume"):
            clock.begin(0)


@pytest.mark.slow
def test_killed_and_resumed_at_another_speed(tmp_path, monkeypatch):
    """The curve of the killed run, bit by bit, and from there on a curve of its own; each second counts once."""
    at_pace(monkeypatch, 1.0)
    result = train(tmp_path, "straight")
    straight = curve(tmp_path / "straight")
    assert result.state.step == len(straight) > 10
    assert result.state.seconds == pytest.approx(60, abs=2)
    rates = [rate for _, _, rate in straight]
    top = rates.index(max(rates))
    assert 0.15 < top / len(rates) < 0.4
    assert all(a < b for a, b in itertools.pairwise(rates[: top + 1]))
    assert rates[-1] < 0.2 * max(rates)

    run, killed_at = tmp_path / "killed", 7
    shutil.copytree(tmp_path / "straight", run)
    for path in run.glob("checkpoints/step-*"):  # what a kill leaves: fewer checkpoints, more lines
        if int(path.name.removeprefix("step-")) > 3:
            shutil.rmtree(path)
    lines = (run / CLOCK).read_text(encoding="utf-8").splitlines(keepends=True)
    (run / CLOCK).write_text("".join(lines[:killed_at]) + lines[killed_at][:3])
    at_pace(monkeypatch, 3.0)
    result = train(tmp_path, "killed", resume=True)
    again = curve(run)
    assert again[:killed_at] == straight[:killed_at]
    assert [step for step, _, _ in again] == list(range(1, len(again) + 1))
    assert killed_at < len(again) < len(straight)
    assert result.state.seconds == pytest.approx(60, abs=6)
    assert again[-1][2] < 0.4 * max(rates)


def test_a_run_without_minutes_has_no_clock_file(tmp_path):
    train(tmp_path, "run", steps=2, minutes=None)
    assert not (tmp_path / "run" / CLOCK).exists()
