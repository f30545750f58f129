"""Ctrl-C and the other signals, from the first line of a program to its last.

    stop_quietly     before anything has begun: one line, and status 130
    Interrupts       while a command runs: KeyboardInterrupt, but not in the midst of an import
    HANGUP, ...      for those who obey signals in their own way: `train` saves, `serve` finishes requests

Imports what is built into Python or loaded by then, so that nothing comes before `stop_quietly`.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import os
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Any

HANGUP: "int | None" = getattr(_signal, "SIGHUP", None)  # Windows has none
POLL_SECONDS = 0.02  # between two looks whether an import that Ctrl-C has met is done
KILL_AFTER_SECONDS = 5.0  # then Ctrl-C ends an import too


def stop_quietly(program: str) -> None:
    """End quietly until `process.run` takes over. For processes that are this program's, from their first line on."""

    def stop(number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    stop.early = True  # type: ignore[attr-defined]
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, stop)


def drop_hung_up() -> None:
    """Drop output after SIGHUP: what is still to be said to a terminal that has gone is said to nobody, and is no
    error."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def restore_handlers(before: "Mapping[int, Callable | int | None]", hung_up: bool) -> None:
    """Give signals back the handlers that they had. `hung_up`: SIGHUP has been obeyed. It often comes twice, from the
    system and from the shell, and the second must not kill a process that is ending in order."""
    import signal  # as those have who obey signals

    for number, handler in before.items():
        late = hung_up and number == HANGUP and handler is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if late else handler)


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt, but not in the midst of an import: libraries would make other errors of it, or
    swallow it. It waits until the import is done; and where a callback has swallowed it, it comes again. A second one
    ends the process at once."""

    def __init__(self, whole: bool):
        self._whole, self._mine, self._naps, self.raised = whole, False, 0, False
        self._thread = _thread.get_ident()

    @property
    def waiting(self) -> bool:
        """Ctrl-C was pressed, and has not been raised yet."""
        return self._naps > 0 and not self.raised

    def __enter__(self) -> None:
        before = _signal.getsignal(_signal.SIGINT)
        if before is not _signal.default_int_handler and not hasattr(before, "early"):  # ignored, or somebody else's
            return
        try:
            _signal.signal(_signal.SIGINT, self._receive)
        except ValueError:  # not the main thread, whose matter signals are
            return
        self._mine, self._hook = True, sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def __exit__(self, *_: object) -> None:
        if self._mine:
            sys.unraisablehook = self._hook
            ended = (
                _signal.SIG_DFL if self.raised else _signal.SIG_IGN
            )  # too late: all is done, and its status is known
            _signal.signal(_signal.SIGINT, ended if self._whole else _signal.default_int_handler)

    def _receive(self, number: int, frame: "FrameType | None") -> None:
        if self._naps * POLL_SECONDS < KILL_AFTER_SECONDS and _importing(frame):
            self._naps += 1
            self._later()
            return
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        self.raised = True
        raise KeyboardInterrupt

    def _unraisable(self, unraisable: "Any") -> None:
        if unraisable.exc_type is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            _signal.signal(_signal.SIGINT, self._receive)
            self._later()
        else:
            self._hook(unraisable)

    def _later(self) -> None:
        _thread.start_new_thread(self._again, ())

    def _again(self) -> None:
        time.sleep(POLL_SECONDS)
        if hasattr(_signal, "pthread_kill"):  # which also ends a wait of that thread
            _signal.pthread_kill(self._thread, _signal.SIGINT)
        else:
            _thread.interrupt_main()


def _importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
