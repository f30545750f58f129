"""rich's console as commands use it.

How long work tells whoever started it how far it is; `progress.py` shows that to a person.

Progress of long work: a rich progress bar on a terminal, plain lines in a log. Always on standard error.
"""

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
    """rich's own ends the process with status 1 when nobody reads its output, which to `validate` is a mismatch."""

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, **options})

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is handled, which passes on to `process.run`."""
        raise


Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, in [0, 1], and what is being done."""


def no_progress(share: float, status: str) -> None:
    """Show nothing: the `Progress` of callers who don't want to know."""


LOG_SECONDS = 10.0
"""Between two lines in a log, and before the first one of brief work."""
UNKNOWN = "-:--"
SHORTEST_WINDOW = 20.0
"""Seconds over which a speed is measured, at least."""


class Reporter:
    """`with Reporter("training") as r: r.update(done_share, "loss 2.31  10,500 tokens/s"); r.line("saved ...")`.

    `update` takes the share of the work done in [0, 1] and a short status; in a log it prints at most one line every
    `LOG_SECONDS`, and one at the end. `line` is for events and is always printed. The work goes on where nobody can
    read of it any more: a closed terminal or pipe is no error.
    """

    def __init__(self, title: str, brief: bool = False, silent: bool = False):
        """brief: of work that may take no time: no bar stays on a terminal, and a log is told nothing before
        `LOG_SECONDS` have passed. silent: nothing is shown, as in a process that another one speaks for."""
        self.title, self.brief = title, brief
        stream = open(os.devnull, "w", encoding="utf-8") if silent else sys.stderr  # noqa: SIM115 - as long as this
        self.file = cast(IO[str], _Lossy(stream))
        self.console = Console(file=self.file)
        self._progress: _Bar | None = None
        self._task: TaskID | None = None
        self._left, self._wide = TimeLeft(), True
        self._last: float | None = time.monotonic() if brief else None
        self._reported = not brief

    def __enter__(self) -> Reporter:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # All of it fits 80 columns, the elapsed time from 100 on.
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
        """The width of the terminal with the bar; 0 for a log, or a terminal that has no blocks to draw with."""
        drawn = self._progress is not None and self.console.encoding.startswith("utf")
        return self.console.width if drawn else 0

    def update(self, share: float, status: str, below: str = "") -> None:
        """below: a line under the bar, of what a log does without."""
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
    """Estimates the seconds that are left, from the speed over the last third of the time so far.

    So it soon follows a machine that becomes busy or free, and a pause that comes again and again, such as a
    validation, counts with its share.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()  # (when, share), the first from before that third
        self._begin: float | None = None

    def note(self, now: float, share: float) -> None:
        """`share` of the work is done at the second `now`. A resumed run begins with a share that took no time."""
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
        """Return the estimate at the second `now`; None where nothing is known of the speed yet."""
        if not self._noted:
            return None
        (begin, share_then), (_, share) = self._noted[0], self._noted[-1]
        return (now - begin) * max(0.0, 1 - share) / (share - share_then) if share > share_then else None


class _Bar(RichProgress):
    """rich's bar with a line under it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


@contextmanager
def quiet_progress(title: str | None) -> Iterator[Progress]:
    """Give `update` of a brief `Reporter`; without a title nothing is shown."""
    if title is None:
        yield no_progress
        return
    with Reporter(title, brief=True) as reporter:
        yield reporter.update


class _Lossy:
    """A text stream that drops what can't be written."""

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
    """Return hours, minutes and seconds: 0:03:08."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
