"""Ctrl-C and SIGTERM during training."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """Ctrl-C and SIGTERM end the run after the step under way; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Callable | int | None] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread: the caller deals with signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)
