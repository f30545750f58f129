"""Progress of long work on standard error: a rich progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, TextIO, cast

from rich import console
from rich.console import RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text


class Console(console.Console):
    """rich's console, except that a closed pipe doesn't exit with status 1, which means a mismatch in `validate`."""

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, **options})

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles BrokenPipeError; raises it again for `process.run`."""
        raise


Progress = Callable[[float, str], None]
"""Callback for progress: the finished share of the work, in [0, 1], and a status, e.g. "loss 2.31"."""


def no_progress(share: float, status: str) -> None:
    """A silent `Progress`."""


LOG_SECONDS = 10.0
"""Time between two lines in a log, and before the first line of brief work."""
UNKNOWN = "-:--"
SHORTEST_WINDOW = 20.0
"""Speed is measured over at least this many seconds."""


class Reporter:
    """Show progress: a bar on a terminal, lines in a log.

    >>> with Reporter("training") as reporter:
    ...     reporter.update(0.25, "loss 2.31  10,500 tokens/s")
    ...     reporter.line("saved step 1000")

    `update` takes the finished share in [0, 1] and a status; a log gets at most one line every `LOG_SECONDS`, and one
    at the end. `line` always prints. If the terminal or pipe is closed, work continues without output.
    """

    def __init__(self, title: str, brief: bool = False, silent: bool = False):
        """brief: for work that may be quick: the bar disappears at the end, and a log gets no line in the first
        `LOG_SECONDS`. silent: show nothing, e.g. in a worker process."""
        self.title, self.brief = title, brief
        stream = open(os.devnull, "w", encoding="utf-8") if silent else sys.stderr  # noqa: SIM115 - stays open
        self.file = cast(IO[str], _Lossy(stream))
        self.console = Console(file=self.file)
        self._progress: _Bar | None = None
        self._task: TaskID | None = None
        self._left, self._wide = TimeLeft(), True
        self._last: float | None = time.monotonic() if brief else None
        self._reported = not brief

    def __enter__(self) -> Reporter:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # Without the elapsed time everything fits into 80 columns, with it into 100.
            self._wide = self.console.width >= 100
            elapsed = [TimeElapsedColumn()] if self._wide else []
            self._progress = _Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20 if elapsed else 5),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[status]}"),
                *elapsed,
                TextColumn("left {task.fields[left]}"),
                console=self.console,
                transient=self.brief,
                redirect_stdout=not self.brief,
            )
            self._task = self._progress.add_task(self.title, total=1.0, status="", left=UNKNOWN)
            self._progress.start()
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def columns(self) -> int:
        """The terminal's width; 0 for a log, or for a terminal whose encoding has no block characters."""
        drawn = self._progress is not None and self.console.encoding.startswith("utf")
        return self.console.width if drawn else 0

    def update(self, share: float, status: str, below: str = "") -> None:
        """Show the finished share in [0, 1] and a status. below: a line under the bar, which a log omits."""
        now = time.monotonic()
        self._left.note(now, share)
        if self._progress is not None and self._task is not None:
            self._progress.below = below
            seconds = self._left.seconds(now)
            left = UNKNOWN if seconds is None else duration(seconds)
            left = left if self._wide else left.removeprefix("0:")
            self._progress.update(self._task, completed=min(1.0, share), status=status, left=left)
            return
        soon = self._last is not None and now - self._last < LOG_SECONDS
        if soon and (share < 1 or not self._reported):
            return
        self._last, self._reported = now, True
        seconds = self._left.seconds(now)
        remaining = "" if seconds is None or share >= 1 else f"  left {duration(seconds)}"
        self.line(f"{self.title} {100 * min(1.0, share):3.0f} %  {status}{remaining}")

    def line(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self.file, flush=True)


class TimeLeft:
    """Estimate the remaining seconds from the speed over the last third of the time so far.

    So the estimate soon follows a machine that gets busier or idler, and includes regular pauses, such as validation.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()  # (time, share); the first is from before the last third
        self._begin: float | None = None

    def note(self, now: float, share: float) -> None:
        """Record that `share` of the work is done at time `now` (seconds). The first call of a resumed run has a share
        above 0, which doesn't count as speed."""
        if self._begin is None:
            self._begin = now
        if len(self._noted) < 2 or now - self._noted[-2][0] >= 1:
            self._noted.append((now, share))
        else:
            self._noted[-1] = (now, share)
        since = now - max((now - self._begin) / 3, SHORTEST_WINDOW)
        while len(self._noted) > 2 and self._noted[1][0] <= since:
            self._noted.popleft()

    def seconds(self, now: float) -> float | None:
        """The estimate of the remaining seconds at time `now`; None while the speed is unknown."""
        if not self._noted:
            return None
        (begin, share_then), (_, share) = self._noted[0], self._noted[-1]
        return (now - begin) * max(0.0, 1 - share) / (share - share_then) if share > share_then else None


class _Bar(RichProgress):
    """rich's progress bar with a line below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


@contextmanager
def quiet_progress(title: str | None) -> Iterator[Progress]:
    """Yield a `Progress` callback that shows a temporary bar; without a title it shows nothing."""
    if title is None:
        yield no_progress
        return
    with Reporter(title, brief=True) as reporter:
        yield reporter.update


class _Lossy:
    """A text stream that ignores errors in writing."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, e.g. "0:03:08"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
