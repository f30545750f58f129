"""A terminal of a test's own."""

import os
import re
import subprocess
import time

import pytest
from waiting import PATIENCE

pty = pytest.importorskip("pty")


def on_a_terminal(command: list[str], columns: int, **environment: str) -> str:
    """What the command prints on a terminal of its own, without the control sequences."""
    reading, terminal = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(columns), "LINES": "30", "TERM": "xterm", **environment}
    settings.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings) as process:
        os.close(terminal)
        shown = b""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                piece = os.read(reading, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(timeout=PATIENCE) == 0, shown
    os.close(reading)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
