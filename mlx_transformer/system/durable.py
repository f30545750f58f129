"""Files and folders that appear whole or not at all: a temporary name, a flush to disk, one rename. And only where
nothing is lost by it.

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
from pathlib import Path

from mlx_transformer.system.locks import alone, written_meanwhile

from .errors import UserError

if sys.platform != "win32":
    import fcntl


def check_free(out: Path, what: str, ours: Callable[[Path], bool], force: bool = False, *sources: Path) -> None:
    """Raise `UserError` unless a command may write a folder as `out`: it is new or empty, or holds what `ours`
    recognises as an earlier `what`, and `force` replaces it.

    Anything else is never replaced; nor is one of `sources`, the folders that are read, or a folder around it.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; the {what} is a folder: choose another name")
    for source in sources:
        if is_within(source, out) or is_within(source, previous(out)):
            inside = "is" if out.exists() and source.samefile(out) else "holds"
            raise UserError(
                f"{out}: {inside} the folder that is read, whose files would be lost; choose another folder"
            )
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not ours(out):
        raise UserError(f"{out}: holds files that are no {what}; choose another folder, or empty this one")
    if not force:
        raise UserError(f"{out}: holds another {what}; choose another folder, or --force to replace it")


def is_within(path: Path, folder: Path) -> bool:
    """Return whether `path` is `folder` or in it, by whichever names and links."""
    if not folder.exists():
        return False
    path = Path(os.path.realpath(path))
    return any(place.exists() and place.samefile(folder) for place in (path, *path.parents))


def check_unread(out: Path, *read: Path) -> None:
    """Raise `UserError` if a file that is to be written is read as well, by whichever name."""
    if out.exists() and any(path.exists() and out.samefile(path) for path in read):
        raise UserError(f"{out}: is read as well: choose another output")


@contextmanager
def replace_folder(folder: Path, what: str, made_by_any: bool = False) -> Iterator[Path]:
    """Fill the temporary folder that is given; when the block ends it takes the place of `folder`, durably, at once.

    Raises `UserError` ("the {what} could not be written") when the disk refuses, and where `folder` was free and
    another process has filled it meanwhile; not if `made_by_any`: with the same as this one would. After any error
    `folder` is the old one, untouched (or the new one, complete, if only the last flush was refused).
    """
    named, folder = folder, Path(os.path.realpath(folder))  # a link stays a link
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{named}: is a file; the {what} is a folder: choose another name")
    with _replacing(folder, named, f"the {what} ") as temporary:
        was_free = not folder.exists() or not any(folder.iterdir())
        temporary.mkdir()
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        if not (was_free and _put_in_free_place(temporary, folder)):
            if was_free and not made_by_any:
                raise written_meanwhile(named)
            _put_in_place(temporary, folder)


@contextmanager
def replace_files(file: Path) -> Iterator[Path]:
    """Fill the temporary folder that is given with a file of this name and others that it needs; when the block ends
    they take their places beside one another. `file` comes last: it is never there without the others.

    Raises `UserError` when the disk refuses, and where there was no such file and another process has written it
    meanwhile.
    """
    was_free = not file.exists()
    with _replacing(file, file) as temporary:
        temporary.mkdir()
        yield temporary
        made = sorted(temporary.iterdir(), key=lambda path: path.name == file.name)
        for path in made:
            flush(path)
        with alone(file):
            if was_free and file.exists():
                raise written_meanwhile(file)
            if len(made) > 1:  # what stands there must not be read together with the new ones
                file.unlink(missing_ok=True)
            for path in made:
                os.replace(path, file.with_name(path.name))
        flush(file.parent)


def write_text(path: Path, text: str) -> None:
    """Write or replace one file, making folders as needed; raises `UserError`, with the old file untouched, when the
    disk refuses. Anything that is no regular file, such as a pipe, is written to as it is."""
    place = Path(os.path.realpath(path))  # a link stays a link
    with _replacing(place, path) as temporary:
        if place.exists() and not place.is_file():
            place.write_text(text, encoding="utf-8", newline="\n")
            return
        temporary.write_text(text, encoding="utf-8", newline="\n")
        flush(temporary)
        os.replace(temporary, place)
        flush(place.parent)


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
    names = os.fsencode(first), os.fsencode(second)
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return library.renamex_np(*names, 2) == 0  # RENAME_SWAP
        return library.renameat2(-100, names[0], -100, names[1], 2) == 0  # AT_FDCWD, RENAME_EXCHANGE
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
