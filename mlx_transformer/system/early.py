"""Ctrl-C and other signals, from the first line of the program to the last.

    stop_quietly                    before the imports are done: print one line, exit with status 130
    Interrupts                      while a command runs: raise KeyboardInterrupt, but never during an import
    HANGUP, restore_handlers, ...   for commands with handlers of their own: `train` saves, `serve` finishes requests

Imports only modules that Python has loaded anyway, so that `stop_quietly` comes first.
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
POLL_SECONDS = 0.02  # how often to check whether an interrupted import has finished
KILL_AFTER_SECONDS = 5.0  # after this, Ctrl-C interrupts an import too


def stop_quietly(program: str) -> None:
    """On Ctrl-C print one line and exit with 130, until `process.run` takes over. Call it first in a program."""

    def stop(number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    stop.early = True  # type: ignore[attr-defined]
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, stop)


def drop_hung_up() -> None:
    """Send output to nowhere after SIGHUP: the terminal is gone, and writing to it would be an error."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def restore_handlers(before: "Mapping[int, Callable | int | None]", hung_up: bool) -> None:
    """Restore signal handlers. hung_up: SIGHUP has been received.

    SIGHUP often comes twice, from the system and from the shell. The second must not kill a process that is saving.
    """
    import signal  # loaded already by commands that handle signals

    for number, handler in before.items():
        late = hung_up and number == HANGUP and handler is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if late else handler)


class Interrupts:
    """Make Ctrl-C raise KeyboardInterrupt, but never during an import: libraries may swallow it or raise another error.

    It is raised after the import, and again if a callback has swallowed it. A second Ctrl-C ends the process at once.
    """

    def __init__(self, whole: bool):
        self._whole, self._mine, self._naps, self.raised = whole, False, 0, False
        self._thread = _thread.get_ident()

    @property
    def waiting(self) -> bool:
        """Whether Ctrl-C was pressed but KeyboardInterrupt has not been raised yet."""
        return self._naps > 0 and not self.raised

    def __enter__(self) -> None:
        before = _signal.getsignal(_signal.SIGINT)
        if before is not _signal.default_int_handler and not hasattr(before, "early"):  # ignored, or not ours
            return
        try:
            _signal.signal(_signal.SIGINT, self._receive)
        except ValueError:  # only the main thread may handle signals
            return
        self._mine, self._hook = True, sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def __exit__(self, *_: object) -> None:
        if self._mine:
            sys.unraisablehook = self._hook
            ended = _signal.SIG_DFL if self.raised else _signal.SIG_IGN  # the command is done: too late for Ctrl-C
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
        if hasattr(_signal, "pthread_kill"):  # also wakes the main thread if it is waiting
            _signal.pthread_kill(self._thread, _signal.SIGINT)
        else:
            _thread.interrupt_main()


def _importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
