"""Waiting for what another thread or process does."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds: a busy machine takes its time, the limit is for what never comes


def until(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = PATIENCE
) -> None:
    """Naps are counted, not the clock's seconds, which pass for a stopped process too. `process`: it must not end."""
    nap = 0.01
    for _ in range(round(seconds / nap)):
        if condition():
            return
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended: {process.stderr.read()}")
        time.sleep(nap)
    raise AssertionError("it never came")


def port_of(server: subprocess.Popen[str], said: list[str] | None = None) -> int:
    """Where a server of ours listens that was given port 0, once it is ready: one that is chosen for it may be taken
    meanwhile. Its lines up to then go to `said`."""
    assert server.stderr is not None
    for line in server.stderr:
        if said is not None:
            said.append(line)
        if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+) \(ready in", line):
            return int(found[1])
    raise AssertionError(f"it ended with {server.wait()}")
