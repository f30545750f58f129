"""Signals that ask a training run to end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from mlx_transformer.system.process import drop_hung_up

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none


class StopSignal:
    """Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end the run after the step under way; a second Ctrl-C or SIGTERM
    ends it at once. SIGHUP often comes twice, from the system and from the shell, and asks no more than once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._stop_requested = False
        self._before: dict[int, Callable | int | None] = {}

    def asked(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])):
            if number == HANGUP and signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
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
        if number == HANGUP:
            drop_hung_up()
        elif not self._stop_requested:
            self._stop_requested = True
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)
