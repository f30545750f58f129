"""The edge of a command's process: its streams, and an exit status that never lies. For both command lines.

    0    done; of validate: equal
    1    of validate, and of quickstart, which validates: a mismatch; nothing else ends with it
    2    what a person can mend: one line says what is wrong, where, and what to do
    3    of validate: a runtime that was asked for is not there
    70   a fault of this program, with its traceback
    130  Ctrl-C; 128 + N: another signal that `train` has obeyed
    141  nobody reads the output any more

Imports next to nothing, so that Ctrl-C is in good hands before the rest is imported.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from contextlib import suppress

from .early import Interrupts
from .errors import UserError, error_line, one_line
from .lazy import what_is_missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FAULT, INTERRUPTED, UNREAD = 70, 130, 141

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))

DEVICE_IS_FULL = ("[metal::malloc]", "insufficient memory", "outofmemory", "out of memory", "cudamalloc")
"""Words of what MLX raises, a bare RuntimeError, where Metal or CUDA has no room: when it asks for an array, or only
when a command buffer is run."""

PLAIN = {"✓": "+", "✗": "x", "…": "~"}
"""The replacements for our marks where the terminal's encoding lacks them; "?" for any other character."""

DIGITS_OF_WIDTH = 4


def run(name: str, command: Callable[[], int | None], whole: bool = True) -> int:
    """Run a command and return its exit status; whatever goes wrong becomes one line on standard error.

    `name` begins that line. `whole`: the process ends with the command, so that a late Ctrl-C must find no Python that
    would print a traceback.
    """
    interrupts = Interrupts(whole)
    try:
        with interrupts:
            return _flushed(name, _status(name, command, interrupts))
    except KeyboardInterrupt:
        return _failed(name, "interrupted", INTERRUPTED)


def _status(name: str, command: Callable[[], int | None], interrupts: Interrupts) -> int:
    try:
        _prepare_streams()
        _bound_width()
        status = command() or 0
        if interrupts.waiting:  # one that waits for an import to be done, on a machine that had no time to look again
            raise KeyboardInterrupt
        return status
    except SystemExit as done:  # argparse's, after --help
        if isinstance(done.__context__, BrokenPipeError):  # rich's, whose own status would be that of a mismatch
            _drop_output()
            return UNREAD
        return done.code if isinstance(done.code, int) else 0 if done.code is None else FAULT
    except BaseException as error:
        if interrupts.raised or isinstance(error, KeyboardInterrupt):  # a library may have made another error of it
            hint = str(error) if isinstance(error, KeyboardInterrupt) else ""
            return _failed(name, f"interrupted; {hint}" if hint else "interrupted", INTERRUPTED)
        return _explained(name, error)


def _explained(name: str, error: BaseException) -> int:
    if isinstance(error, UserError):
        return _failed(name, str(error), error.status)
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return UNREAD
    if isinstance(error, OSError):
        # Whatever writes a file names it in its errors.
        where = error.filename or ("standard output" if error.errno in NO_ROOM else None)
        return _failed(name, f"{where}: {error.strerror}" if where and error.strerror else str(error))
    if isinstance(error, MemoryError):
        return _failed(name, f"out of memory ({error}); try smaller batches or a smaller model")
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in DEVICE_IS_FULL):
        return _failed(
            name,
            f"out of memory on the device (MLX: {error_line(error)}); in training set --memory to "
            "less than it has, or lower --batch-tokens; elsewhere lower --beam, give shorter lines or take a smaller "
            "model",
        )
    if isinstance(error, ModuleNotFoundError) and (missing := what_is_missing(error)):
        return _failed(name, f"this needs {missing}")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("click", "rich"):
        return _failed(name, f"{error.name}, which the command line needs, is not installed: pip install {error.name}")
    if is_panic(error):
        return _failed(name, f"a library could not take this input ({error}); look for a damaged file")
    import traceback

    traceback.print_exc()
    message = traceback.format_exception_only(error)[-1].strip()
    return _failed(name, f"this is a bug in mlx-transformer: {message}; please report it with the lines above", FAULT)


def _flushed(name: str, status: int) -> int:
    """Return the exit status, after the last of the output is out."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # else Python tries once more when it ends, and says so
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return status or UNREAD
        return status or _failed(name, f"standard output: {error.strerror}")
    return status


def is_panic(error: BaseException) -> bool:
    """Return whether it is what libraries written in Rust raise where they give up; no class of it can be imported."""
    return type(error).__name__ == "PanicException"


def _failed(name: str, message: str, status: int = 2) -> int:
    if status == INTERRUPTED:
        # Python ends by the signal where an interruption has left the code of a string, though it was caught since,
        # until the code of another string has run; a namedtuple is made of one.
        from collections import namedtuple

        namedtuple("Forgotten", "")
    with suppress(OSError, ValueError):  # nobody can be told
        print(f"{name}:", one_line(message), file=sys.stderr, flush=True)
    return status


def _prepare_streams() -> None:
    """Close the gap that a closed stream leaves, and let no encoding refuse a character."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: else the next file would be taken for the stream
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")  # pyright: ignore[reportAttributeAccessIssue]
    if sys.stdout is None:
        raise UserError("standard output is closed; send it to a file, or to /dev/null")


def _bound_width() -> None:
    """Forget widths that no terminal has: help is as wide as they say, and takes as long."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        width = os.environ.get(name, "0")
        if not (width.isascii() and width.isdigit() and len(width) <= DIGITS_OF_WIDTH):
            del os.environ[name]


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("plain", _plain)


def printable(text: str) -> str:
    """Return a text with what standard output can't say put plainly, or as a question mark, for those who didn't come
    by `run`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "plain").decode(encoding)


def _drop_output() -> None:
    """Send what is still to be written nowhere: who reads it has gone, or there is no room for it."""
    with suppress(OSError, ValueError):  # a stream without a number
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
