"""Files that one process writes at a time. The system drops a lock when its process ends, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_transformer.system.errors import UserError

if sys.platform != "win32":
    import fcntl


def lock(handle: int) -> bool | None:
    """Lock a file or a folder until its handle is closed.

    False if another handle has the lock; None where the system or the file system has none.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_locked(path: Path) -> int | None:
    """Return a handle to read and write a file, which is made where there is none, with its lock; None if another
    handle has it. Raises `OSError`."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if lock(handle) is False:
            os.close(handle)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # between the two steps who had the lock has removed the file, or given it another name


def written_meanwhile(path: Path) -> UserError:
    return UserError(f"{path}: another process has written it meanwhile; choose another name, or --force to replace it")


@contextmanager
def alone(file: Path, named: Path, refusal: Callable[[Path], UserError] = written_meanwhile) -> Iterator[None]:
    """Let no other process into such a block for the same file or folder. If one is in it, raise what `refusal` makes
    of `named`."""
    place = file.with_name(f".{file.name}.lock")
    handle = open_locked(place)
    if handle is None:
        raise refusal(named)
    try:
        yield
    finally:
        if sys.platform != "win32":  # where there is no lock, and no open file can be removed
            place.unlink(missing_ok=True)
        os.close(handle)
        if sys.platform == "win32":
            place.unlink(missing_ok=True)
