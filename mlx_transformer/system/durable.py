"""Files that one process writes at a time. The system drops a lock when its process ends, however it ends.

Files and folders that appear whole or not at all: a temporary name, a flush to disk, one rename. Whether they may be
written is decided before (`core/outputs.py`), and the rename refuses what has come in between.

A process that is killed at any moment leaves the old state or the new one, and perhaps a temporary folder, which the
next writer removes.
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


if sys.platform != "win32":
    import fcntl

WITHOUT_REPLACING, SWAPPING = (1, 4), (2, 2)
"""RENAME_NOREPLACE and RENAME_EXCHANGE of Linux; RENAME_EXCL and RENAME_SWAP of macOS."""


class Seen(NamedTuple):
    """What tells a file or a folder from another that takes its place, or from itself after a change."""

    device: int
    number: int
    changed: int
    """Nanoseconds."""
    size: int


def seen(path: Path) -> Seen | None:
    """Return what stands at a path; None: nothing."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    size = 0 if path.is_dir() else status.st_size
    return Seen(status.st_dev, status.st_ino, status.st_mtime_ns, size)


@dataclass(frozen=True)
class Output:
    """A file or a folder that may be written, as `core.outputs.claim` has decided; or, by `Output.any`, one that is the
    writer's own, such as a cache, and replaced whatever is there."""

    path: Path
    """As the person called it."""
    what: str
    before: Seen | None
    """What stood there when it was decided, which alone is replaced; None: the place was free."""
    checked: bool = True
    """Whether anything but `before` stays."""
    special: bool = False
    """A device or a pipe, which is written to as it is."""

    @classmethod
    def any(cls, path: Path, what: str) -> Output:
        return cls(Path(path), what, None, checked=False)

    @property
    def place(self) -> Path:
        """Where it lies: a link stays a link."""
        return Path(os.path.realpath(self.path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


Target = str | Path | Output
"""What a function that writes takes: a name, about which it decides, or what has been decided."""


@contextmanager
def replace_folder(output: Output) -> Iterator[Path]:
    """Fill the temporary folder that is given; when the block ends it takes its place, durably, at once.

    Raises `UserError` ("the ... could not be written") when the disk refuses, and where another process has written
    there since `output` was decided. After any error what was there is untouched (or the new folder is there, complete,
    if only the last flush was refused).
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
    """Fill the temporary folder that is given with a file of this name and others that it needs, which are among
    `beside`; when the block ends they take their places beside one another. The file itself comes last: it is never
    there without the others.

    Raises `UserError` when the disk refuses, and where another process has written one of them since it was decided.
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
            if len(made) > 1:  # what stands there must not be read together with the new ones
                file.unlink(missing_ok=True)
            for path in made[:-1]:
                os.replace(path, file.with_name(path.name))
            put_file(made[-1], file, output.path, free=output.before is None or len(made) > 1)
        flush(file.parent)


def write_text(path: Path | Output, text: str) -> None:
    """`write_bytes` of text, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path | Output, data: bytes) -> None:
    """Write one file, making folders as needed; raises `UserError`, with the old file untouched, when the disk refuses,
    and where another process has written an `Output` since it was decided. A plain path is replaced whatever is there.
    Anything that is no regular file, such as a pipe, is written to as it is."""
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
    """Give a finished file its name. Raises `UserError` if what stands there isn't what `output` was decided about."""
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
    """Raise `UserError` if another process has written there since it was decided."""
    if output.checked and not output.special and seen(output.place) != output.before:
        raise written_meanwhile(output.path)


def put_file(temporary: Path, place: Path, named: Path, free: bool) -> None:
    """Rename a file; `free`: only if nothing has that name, of which the system decides."""
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
    """Give a temporary name beside `place`, where nothing is left when the block ends. An error of the disk there is a
    `UserError` that names `named`."""
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
    """Remove a folder; killed halfway, no part of it is left under its name."""
    hidden = _temporary(folder)
    try:
        os.rename(folder, hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def taken_away(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Take files and folders of these names out of `folder`; they come back if the block ends in an error, in place of
    what it has put there, and else are removed. Raises `OSError`."""
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
    """Remove what killed processes left of the folders and files in `parent` that fit the glob pattern `name`."""
    for path in parent.glob(f".{name}.*.tmp"):
        process = path.name.split(".")[-2]
        if process.isdigit() and not _other_process(int(process)):
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a file or a folder, as far as the system lets it be removed."""
    with suppress(OSError):
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink(missing_ok=True)


def previous(folder: Path) -> Path:
    """Return where the old folder stands for the instant between two renames, where two names can't be swapped in
    one."""
    return folder.parent / f".{folder.name}.previous"


def _put_in_free_place(temporary: Path, folder: Path) -> bool:
    """Return one rename, of which the system says whether the place is free still: False if it isn't."""
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
    """Swap two names in one step, so that at no instant one of them is free; False where the system doesn't do that."""
    return _rename(first, second, SWAPPING)


def _rename(first: Path, second: Path, how: tuple[int, int]) -> bool:
    """Rename in one of the system's special ways, of Linux and of macOS; False where it can't or won't."""
    names = os.fsencode(first), os.fsencode(second)
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return library.renamex_np(*names, how[1]) == 0
        return library.renameat2(-100, names[0], -100, names[1], how[0]) == 0  # AT_FDCWD
    except (AttributeError, TypeError, OSError):  # another C library, or none: Windows
        return False


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.tmp"


def _other_process(process: int) -> bool:
    """Return whether another process has this number. (In a container a new process often has the number of the old
    one.)"""
    if process == os.getpid():
        return False
    if sys.platform == "win32":  # where os.kill ends the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def flush(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names; raises `OSError`."""
    if sys.platform == "win32":  # has no handle on a folder, and flushes what was opened for writing only
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # fsync alone leaves data in the drive's cache
                return
            except OSError:  # network drives and the like
                pass
        os.fsync(handle)
    finally:
        os.close(handle)
