"""What a Mac's programs say, played by scripts; and that elsewhere nobody is asked."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time

import pytest
from waiting import until

from mlx_transformer.system import machine
from mlx_transformer.system import machine as mac
from mlx_transformer.system.errors import UserError


@pytest.fixture
def play(monkeypatch, tmp_path):
    """play("PMSET", "echo text"): the program is this shell script, on a machine that is a Mac."""
    monkeypatch.setattr(sys, "platform", "darwin")
    mac.performance_cores.cache_clear()

    def write(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(mac, name, str(path))
        return path

    yield write
    mac.performance_cores.cache_clear()


@pytest.mark.parametrize(
    ("script", "cores"),
    [
        ('[ "$*" = "-n hw.perflevel0.physicalcpu" ] && echo 6', 6),
        ("echo 12", 12),
        ("echo unknown oid >&2; exit 1", None),  # a Mac with an Intel processor
        ("echo 0", None),
    ],
)
def test_work_is_split_over_the_fast_cores(script, cores, play, monkeypatch):
    play("SYSCTL", script)
    monkeypatch.setattr(machine, "usable_cores", lambda: 10)
    assert mac.performance_cores() == cores
    assert machine.fast_cores() == min(cores or 10, 10)


BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t81%; discharging; 4:05 remaining present: true"
PLUGGED = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t81%; charging; 0:40 remaining present: true"


def test_a_run_on_battery_is_told_so(play):
    play("PMSET", f'cat <<"END"\n{BATTERY}\nEND')
    assert mac.battery_line() == "on battery, 81%: plug in, for a run empties it, and may be slower until then"
    play("PMSET", f'cat <<"END"\n{PLUGGED}\nEND')
    assert mac.battery_line() is None
    play("PMSET", "exit 1")
    assert mac.battery_line() is None


def test_elsewhere_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(subprocess, "run", None)
    mac.performance_cores.cache_clear()
    assert mac.performance_cores() is None
    assert mac.battery_line() is None
    assert machine.fast_cores() == machine.usable_cores()
    mac.performance_cores.cache_clear()


def test_a_mac_is_kept_awake_while_the_block_lasts(play, tmp_path):
    said = tmp_path / "said"
    play("CAFFEINATE", f'echo $$ "$@" > {said}.part; mv {said}.part {said}; exec sleep 600')

    def interrupted():
        with mac.keep_awake():
            until(said.exists)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    process, *arguments = said.read_text().split()
    assert arguments == ["-i", "-m", "-w", str(os.getpid())]
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
    assert time.monotonic() - began < 600


def test_without_caffeinate_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(mac, "CAFFEINATE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"keep-awake needs a Mac's caffeinate \(No such file"), mac.keep_awake():
        raise AssertionError("it began")
