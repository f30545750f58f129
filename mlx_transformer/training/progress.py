"""Where a run stands: its state, its clock, its speed, and the signals that ask it to stop.

OUT/clock.txt: one line a step, "STEP SECONDS": steps done, and the second at which the next one began. The learning
rate of a run that ends by the clock depends on it. A resumed run reads its first steps' seconds from there, up to where
the run before it was killed, and computes the same again.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from mlx_transformer.system.early import HANGUP, drop_hung_up, restore_handlers
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes

from .group import Group
from .options import TrainingOptions

CLOCK = "clock.txt"
LOWER_IS_BETTER = ("loss", "perplexity")


@dataclass
class State:
    """The counters of a run, which every checkpoint stores. `seconds` is training time over all parts of the run."""

    step: int = 0
    epoch: float = 0.0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped_steps: int = 0
    validated_step: int = 0
    """The step of the last validation."""
    best_score: float | None = None
    """The score of the best validation, loss and perplexity with their sign turned; None before the first, or where
    none is kept."""
    best_step: int = 0
    validations_since_best: int = 0

    def progress(self, options: TrainingOptions) -> float:
        """Return the share of the run that is done, by whichever limit comes first."""
        ends = [(self.step, options.steps), (self.epoch, options.epochs), (self.seconds / 60, options.minutes)]
        return max(done / limit for done, limit in ends if limit is not None)

    def note_scores(self, options: TrainingOptions, scores: Mapping[str, float]) -> bool:
        """Count a validation at this step, and say whether it is the best so far; false where no score counts."""
        if options.best is None or options.best not in scores:
            return False
        value = -scores[options.best] if options.best in LOWER_IS_BETTER else scores[options.best]
        if self.best_score is not None and value <= self.best_score:
            self.validations_since_best += 1
            return False
        self.best_score, self.best_step, self.validations_since_best = value, self.step, 0
        return True

    def should_stop_early(self, options: TrainingOptions) -> bool:
        """Say whether `patience` validations in a row were no better than the best before them."""
        return 0 < options.patience <= self.validations_since_best


class Clock:
    """Counts the seconds of training over all parts of a run, of which `seconds` are over: `with Clock(path, seconds)`.

    `path` None: nothing is recorded.
    """

    def __init__(self, path: Path | None, seconds: float):
        self.path = path
        self._file: BinaryIO | None = None
        self._recorded = _read_clock(path) if path is not None else {}
        self._set(seconds)

    def seconds(self) -> float:
        return self._seconds + time.monotonic() - self._since

    def begin(self, done: int) -> float:
        """Return the second at which the step after `done` steps begins: the recorded one, if there is one."""
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


def _read_clock(path: Path) -> dict[int, float]:
    """Read the seconds by steps done; drop a last line that a full disk or a crash cut short, from the file too."""
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


class Speed:
    """Measures target tokens a second, without the time that validation and saving take.

    `recent_seconds` is the time of the last steps, each with 0.95 of the weight of the next.
    """

    def __init__(self) -> None:
        self._mark = time.monotonic()
        self._tokens = self._seconds = self._recent_tokens = self.recent_seconds = 0.0

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that ends now and began at the last `pause`."""
        seconds = time.monotonic() - self._mark
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self._recent_tokens = 0.95 * self._recent_tokens + tokens
        self.recent_seconds = 0.95 * self.recent_seconds + seconds

    def pause(self) -> None:
        self._mark = time.monotonic()

    @property
    def recent(self) -> float:
        """The tokens a second over about the last 20 steps."""
        return self._recent_tokens / max(self.recent_seconds, 1e-9)

    def since_last(self) -> float:
        """Return the tokens a second since the last call."""
        tokens, seconds = self._tokens, self._seconds
        self._tokens = self._seconds = 0.0
        return tokens / max(seconds, 1e-9)


class StopSignal:
    """Catches the signals that ask a run to end.

    Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end the run after the step under way; a second Ctrl-C or SIGTERM ends
    it at once. SIGHUP often comes twice, from the system and from the shell, and asks no more than once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._stop_requested = self._hung_up = False
        self._before: dict[int, Callable | int | None] = {}

    def requested(self) -> bool:
        return self.received is not None

    def agree(self, group: Group) -> int | None:
        """Return the signal that a process of the group had received, in every process; None if none had.

        A signal that comes meanwhile counts at the next call.
        """
        agreed = group.largest(self.received or 0) or None
        self.received = agreed or self.received
        return agreed

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
        restore_handlers(self._before, self._hung_up)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number == HANGUP:
            self._hung_up = True
            drop_hung_up()
        elif not self._stop_requested:
            self._stop_requested = True
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)
