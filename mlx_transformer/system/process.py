"""Run a command as a process: its streams, errors on one line, and the exit status. Used by both command lines.

    0    success; for validate: the runtimes agree
    1    a mismatch, only from validate and from quickstart, which validates
    2    an error that the user can correct; the message says how
    3    validate: a requested runtime is not installed
    70   a bug in this program; the traceback is printed
    130  Ctrl-C; in general 128 + N after signal N, e.g. when `train` was told to stop
    141  the reader of the output has gone, e.g. `... | head`

Imports almost nothing, so that Ctrl-C is handled before slow imports begin.
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
"""Parts of MLX's error messages when Metal or CUDA is out of memory. The exception is a plain RuntimeError, raised when
an array is allocated or only when a command buffer runs."""

PLAIN = {"✓": "+", "✗": "x", "…": "~"}
"""ASCII for our symbols if the terminal's encoding lacks them; any other character becomes "?"."""

DIGITS_OF_WIDTH = 4


def run(name: str, command: Callable[[], int | None], whole: bool = True) -> int:
    """Run a command and return its exit status; errors become one line "NAME: ..." on standard error.

    whole: the process ends after the command, so a late Ctrl-C must not print Python's traceback.
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
        if interrupts.waiting:  # Ctrl-C during an import, and a busy machine hasn't raised it yet
            raise KeyboardInterrupt
        return status
    except SystemExit as done:  # e.g. argparse after --help
        if isinstance(done.__context__, BrokenPipeError):  # rich exits with 1, which means a mismatch here
            _drop_output()
            return UNREAD
        return done.code if isinstance(done.code, int) else 0 if done.code is None else FAULT
    except BaseException as error:
        if interrupts.raised or isinstance(error, KeyboardInterrupt):  # a library may have replaced KeyboardInterrupt
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
        # An error in writing a file has its name. A full disk without a name was standard output.
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
    """Flush standard output and return the exit status."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # without _drop_output Python would flush again at exit, and print an error
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return status or UNREAD
        return status or _failed(name, f"standard output: {error.strerror}")
    return status


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library, whose exception class can't be imported."""
    return type(error).__name__ == "PanicException"


def _failed(name: str, message: str, status: int = 2) -> int:
    if status == INTERRUPTED:
        # After KeyboardInterrupt has left code run from a string, Python ends by the signal even if it was caught.
        # Running another string clears this, and namedtuple runs one.
        from collections import namedtuple

        namedtuple("Forgotten", "")
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"{name}:", one_line(message), file=sys.stderr, flush=True)
    return status


def _prepare_streams() -> None:
    """Replace closed standard streams, and print characters that the encoding lacks as in `PLAIN`."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the free number; else the next opened file would become that stream
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")  # pyright: ignore[reportAttributeAccessIssue]
    if sys.stdout is None:
        raise UserError("standard output is closed; send it to a file, or to /dev/null")


def _bound_width() -> None:
    """Ignore absurd widths in the environment, e.g. COLUMNS=99999999, for which drawing help would take forever."""
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
    """Replace characters that standard output can't encode, as in `PLAIN`. For programs not started by `run`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "plain").decode(encoding)


def _drop_output() -> None:
    """Send the rest of the output to nowhere, as its reader has gone or the disk is full."""
    with suppress(OSError, ValueError):  # a stream without a file number
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
