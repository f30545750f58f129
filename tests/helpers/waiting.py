"""Waiting for what another thread or process does."""

from __future__ import annotations

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
