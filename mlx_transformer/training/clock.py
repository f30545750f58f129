"""A run's training time. The learning rate of a run that ends by the clock depends on it, so there it is recorded.

OUT/clock.txt: one line a step, "STEP SECONDS": steps done, and the second at which the next one began. A resumed run
reads its first steps' seconds from there, up to where the run before it was killed, and computes the same again.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes

CLOCK = "clock.txt"


class Clock:
    """`with Clock(path, seconds) as clock`: seconds of training over all parts of a run, of which `seconds` are over.

    `path` None: nothing is recorded.
    """

    def __init__(self, path: Path | None, seconds: float):
        self.path = path
        self._file: BinaryIO | None = None
        self._recorded = _read(path) if path is not None else {}
        self._set(seconds)

    def seconds(self) -> float:
        return self._seconds + time.monotonic() - self._since

    def begin(self, done: int) -> float:
        """The second at which the step after `done` steps begins: the recorded one, if there is one."""
        if done in self._recorded:
            self._set(self._recorded[done])
            return self._seconds
        seconds = self.seconds()
        if self.path is not None:
            try:
                self._file = self._file or self.path.open("ab", buffering=0)
                self._file.write(f"{done} {seconds!r}\n".encode())
            except OSError as error:
                message = f"{self.path}: could not be written ({error}); fix that and continue with --resume"
                raise UserError(message) from error
        return seconds

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _set(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()


def _read(path: Path) -> dict[int, float]:
    """Seconds by steps done. A last line that a full disk or a crash cut short is dropped, from the file too."""
    data = read_bytes(path) if path.exists() else b""
    complete_lines = data[: data.rfind(b"\n") + 1]
    if len(complete_lines) < len(data):
        os.truncate(path, len(complete_lines))
    seconds_at: dict[int, float] = {}
    for line in complete_lines.splitlines():
        with suppress(ValueError):
            done, seconds = line.split()
            seconds_at[int(done)] = float(seconds)
    return {done: seconds for done, seconds in seconds_at.items() if math.isfinite(seconds)}
