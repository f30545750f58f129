"""Durable writes: a file or folder appears complete or not at all, e.g. a checkpoint while training is killed.

Everything is written under a temporary name, flushed to disk and renamed. `core/outputs.py` decides before whether a
path may be written; the rename refuses if another process has written there since.

A process killed at any moment leaves either the old state or the new. It may also leave a temporary folder, which
the next writer removes. Locks keep two processes from writing the same file; the system releases a lock when its
process ends, even by a kill.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import UserError

if sys.platform != "win32":
    import fcntl


def lock(handle: int) -> bool | None:
    """Lock a file or folder until its handle is closed.

    Returns False if another handle holds the lock, None if the system or file system has no locks (e.g. Windows).
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
    """Open a file for reading and writing and lock it; creates it if it is missing.

    Returns None if another handle holds the lock. Raises `OSError`.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if lock(handle) is False:
            os.close(handle)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # the previous owner removed or renamed the file after we opened it: try again


def written_meanwhile(path: Path) -> UserError:
    choices = "choose another name, move it away, or --force to replace it"
    return UserError(f"{path}: another process has written it meanwhile; {choices}")


@contextmanager
def alone(file: Path, named: Path, refusal: Callable[[Path], UserError] = written_meanwhile) -> Iterator[None]:
    """Hold a lock on `file` (a file or folder) for the block. If another process holds it, raise `refusal(named)`."""
    place = file.with_name(f".{file.name}.lock")
    handle = open_locked(place)
    if handle is None:
        raise refusal(named)
    try:
        yield
    finally:
        if sys.platform != "win32":  # Windows can't remove an open file
            place.unlink(missing_ok=True)
        os.close(handle)
        if sys.platform == "win32":
            place.unlink(missing_ok=True)


WITHOUT_REPLACING, SWAPPING = (1, 4), (2, 2)
"""RENAME_NOREPLACE and RENAME_EXCHANGE of Linux; RENAME_EXCL and RENAME_SWAP of macOS."""


class Seen(NamedTuple):
    """State of a file or folder. It differs after a change, and after another file has taken the same name."""

    device: int
    number: int
    changed: int
    """Nanoseconds."""
    size: int


def seen(path: Path) -> Seen | None:
    """Record the state of a path; None if nothing is there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    size = 0 if path.is_dir() else status.st_size
    return Seen(status.st_dev, status.st_ino, status.st_mtime_ns, size)


@dataclass(frozen=True)
class Output:
    """A path that may be written, as decided by `core.outputs.claim`.

    `Output.any` is for the program's own files, such as a cache: they are replaced without a check.
    """

    path: Path
    """The path as the user typed it."""
    what: str
    """The kind of output for error messages, e.g. "checkpoint"."""
    before: Seen | None
    """State of the path when writing was allowed; only this is replaced. None: nothing was there."""
    checked: bool = True
    """Refuse to write if the path has changed since `before`."""
    special: bool = False
    """A device or pipe: written to directly, without a rename."""

    @classmethod
    def any(cls, path: Path, what: str) -> Output:
        return cls(Path(path), what, None, checked=False)

    @property
    def place(self) -> Path:
        """The path with links resolved, so a link stays a link and its target is replaced."""
        return Path(os.path.realpath(self.path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


Target = str | Path | Output
"""Argument of functions that write: a path, still to be checked by `claim`, or an `Output` that has been."""


@contextmanager
def replace_folder(output: Output) -> Iterator[Path]:
    """Yield a temporary folder to fill; when the block ends, it replaces `output` in one durable step.

    >>> with replace_folder(claim("model", CHECKPOINT)) as folder:
    ...     (folder / "config.json").write_text(text)

    Raises `UserError` if the disk refuses ("the ... could not be written") or another process has written there since
    `claim`. After an error the old folder is untouched, or the new one is complete if only the last flush failed.
    """
    place = output.place
    if place.exists() and not place.is_dir():
        raise UserError(f"{output}: is a file; the {output.what} is a folder: choose another name")
    with _replacing(place, output.path, f"the {output.what} ") as temporary:
        temporary.mkdir()
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        if output.checked and output.before is not None:
            with alone(place, output.path):
                check_unchanged(output)
                _put_in_place(temporary, place)
        elif not _put_in_free_place(temporary, place):
            if output.checked:
                raise written_meanwhile(output.path)
            _put_in_place(temporary, place)


@contextmanager
def replace_files(output: Output, *beside: Output) -> Iterator[Path]:
    """Yield a temporary folder to fill with a file and the files it needs, e.g. x.onnx and x.onnx_data.

    `beside` lists the other files that may be written. When the block ends, all are moved into place, `output` last: it
    never exists without the others. Raises `UserError` if the disk refuses or another process has written one of them
    since it was claimed.
    """
    file = output.place
    with _replacing(file, output.path) as temporary:
        temporary.mkdir()
        yield temporary
        made = sorted(temporary.iterdir(), key=lambda path: path.name == output.path.name)
        for path in made:
            flush(path)
        others = {each.path.name: each for each in beside}
        with alone(file, output.path):
            check_unchanged(output)
            for path in made[:-1]:
                check_unchanged(others[path.name])
            if len(made) > 1:  # nobody may read the old file together with the new data
                file.unlink(missing_ok=True)
            for path in made[:-1]:
                os.replace(path, file.with_name(path.name))
            put_file(made[-1], file, output.path, free=output.before is None or len(made) > 1)
        flush(file.parent)


def write_text(path: Path | Output, text: str) -> None:
    """Write a UTF-8 file, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path | Output, data: bytes) -> None:
    """Write a file durably, creating folders as needed.

    A plain path is replaced without a check; a device or pipe is written to directly. Raises `UserError` if the disk
    refuses, or if another process has written to an `Output` since it was claimed; the old file is then untouched.
    """
    output = path if isinstance(path, Output) else Output.any(path, "file")
    place = output.place
    with _replacing(place, output.path) as temporary:
        if place.exists() and not place.is_file():
            place.write_bytes(data)
            return
        temporary.write_bytes(data)
        flush(temporary)
        put_output(temporary, output)
        flush(place.parent)


def put_output(temporary: Path, output: Output) -> None:
    """Rename a finished file to `output`. Raises `UserError` if the path has changed since it was claimed."""
    place = output.place
    if not output.checked:
        os.replace(temporary, place)
    elif output.before is None:
        put_file(temporary, place, output.path, free=True)
    else:
        with alone(place, output.path):
            check_unchanged(output)
            os.replace(temporary, place)


def check_unchanged(output: Output) -> None:
    """Raise `UserError` if another process has written to `output` since it was claimed."""
    if output.checked and not output.special and seen(output.place) != output.before:
        raise written_meanwhile(output.path)


def put_file(temporary: Path, place: Path, named: Path, free: bool) -> None:
    """Rename a file. free: refuse with `UserError` if the name is taken; the system checks it in the same step."""
    if not free:
        os.replace(temporary, place)
        return
    if _rename(temporary, place, WITHOUT_REPLACING):
        return
    try:
        os.link(temporary, place)
    except FileExistsError:
        raise written_meanwhile(named) from None
    except (OSError, AttributeError, NotImplementedError):  # a file system without links
        if place.exists():
            raise written_meanwhile(named) from None
        os.replace(temporary, place)
    else:
        temporary.unlink()


@contextmanager
def _replacing(place: Path, named: Path, what: str = "") -> Iterator[Path]:
    """Yield a temporary path beside `place` and remove it after the block. Disk errors become a `UserError`."""
    temporary = _temporary(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(place.parent, glob.escape(place.name))
        yield temporary
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":  # importing it takes time
            raise
        raise UserError(
            f"{named}: {what}could not be written ({error}); look for free space and permissions there"
        ) from error
    finally:
        _discard(temporary)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so a kill never leaves part of it under its name."""
    hidden = _temporary(folder)
    try:
        os.rename(folder, hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def taken_away(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Move these files and folders out of `folder` for the block, which may write others in their place.

    They are removed when the block succeeds. If it fails, they come back and replace those. Raises `OSError`.
    """
    clear_leftovers(folder, "replaced")
    moved = folder / f".replaced.{os.getpid()}.tmp"
    moved.mkdir()
    try:
        for name in names:
            if os.path.lexists(folder / name):
                os.rename(folder / name, moved / name)
        yield
    except BaseException:
        for name in names:
            _discard(folder / name)
            if os.path.lexists(moved / name):
                os.rename(moved / name, folder / name)
        moved.rmdir()
        raise
    shutil.rmtree(moved, ignore_errors=True)


def clear_leftovers(parent: Path, name: str) -> None:
    """Remove temporary files and folders of killed processes from `parent`. name: a glob pattern of the names that
    were to be written."""
    for path in parent.glob(f".{name}.*.tmp"):
        process = path.name.split(".")[-2]
        if process.isdigit() and not _other_process(int(process)):
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a file or folder; errors are ignored."""
    with suppress(OSError):
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink(missing_ok=True)


def previous(folder: Path) -> Path:
    """The name of the old folder between two renames, on systems that can't swap two names in one step."""
    return folder.parent / f".{folder.name}.previous"


def _put_in_free_place(temporary: Path, folder: Path) -> bool:
    """Rename the temporary folder to a free name; False if the name has been taken meanwhile."""
    try:
        if sys.platform == "win32" and folder.exists():
            folder.rmdir()
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    flush(folder.parent)
    shutil.rmtree(previous(folder), ignore_errors=True)
    return True


def _put_in_place(temporary: Path, folder: Path) -> None:
    old = previous(folder)
    if not (folder.exists() and _exchange(temporary, folder)):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError:
            if old.exists() and not folder.exists():
                os.rename(old, folder)
            raise
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, so both always exist; False if the system can't."""
    return _rename(first, second, SWAPPING)


def _rename(first: Path, second: Path, how: tuple[int, int]) -> bool:
    """Rename with a flag, `WITHOUT_REPLACING` or `SWAPPING`; False if the system has no such call or it failed."""
    names = os.fsencode(first), os.fsencode(second)
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return library.renamex_np(*names, how[1]) == 0
        return library.renameat2(-100, names[0], -100, names[1], how[0]) == 0  # AT_FDCWD
    except (AttributeError, TypeError, OSError):  # another C library, or Windows
        return False


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.tmp"


def _other_process(process: int) -> bool:
    """Whether a running process other than this one has this id. (In a container a new process often gets the id of the
    old one.)"""
    if process == os.getpid():
        return False
    if sys.platform == "win32":  # os.kill would end the process there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk. Raises `OSError`."""
    if sys.platform == "win32":  # can't open folders, and flushes only files opened for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # fsync leaves data in the drive's cache
                return
            except OSError:  # not supported, e.g. by network drives
                pass
        os.fsync(handle)
    finally:
        os.close(handle)
