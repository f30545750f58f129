"""A Mac's own programs, asked and told: its fast cores, its battery, and to stay awake."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import UserError

SYSCTL, PMSET, CAFFEINATE = "/usr/sbin/sysctl", "/usr/bin/pmset", "/usr/bin/caffeinate"
ANSWER_SECONDS = 10


@functools.cache
def performance_cores() -> int | None:
    """Count the cores of a Mac's fastest kind; None elsewhere, and on one whose cores are all alike."""
    output = _output_of(SYSCTL, "-n", "hw.perflevel0.physicalcpu") if sys.platform == "darwin" else ""
    return int(output) if output.strip().isdecimal() and int(output) > 0 else None


def battery_line() -> str | None:
    """Return what a person should know who trains on battery; None for a machine that doesn't say it has one in use."""
    output = _output_of(PMSET, "-g", "batt") if sys.platform == "darwin" else ""
    if "'Battery Power'" not in output:
        return None
    charge = next((word.rstrip(";") for word in output.split() if word.rstrip(";").endswith("%")), "")
    return f"on battery{f', {charge}' if charge else ''}: plug in, for a run empties it, and may be slower until then"


@contextmanager
def keep_awake() -> Iterator[None]:
    """Keep a Mac from sleeping while nobody uses it, until the block or this process ends; a closed lid it sleeps
    under all the same. `UserError` where there is no caffeinate."""
    import subprocess  # what opens a model waits for no more than it needs

    try:
        process = subprocess.Popen(
            [CAFFEINATE, "-i", "-m", "-w", str(os.getpid())], stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise UserError(f"keep-awake needs a Mac's caffeinate ({error.strerror}); leave it out") from error
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _output_of(*command: str) -> str:
    """Return the output of a program, "" of one that fails, or isn't there."""
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=True
        )
        return done.stdout.decode(errors="replace")
    return ""
