"""`claim` decides whether a file or folder may be written, for the command line and for Python.

It refuses an output, before any work and without touching the disk, if

- the output is an input of the command, contains one, or lies in a folder that is an input;
- it would lie inside a model's or a run's folder;
- something is there already, unless `force` is given and it is an earlier output of the same kind.

`claim` records the state of the path in a `durable.Output`. The final rename compares it, so another process's file
written in between isn't replaced either.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_transformer.page import generator
from mlx_transformer.system.durable import Output, Target, previous, seen
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import check_name, read_json

from .folders import ONNX_CONFIG, Place

BEGINNING = 1 << 16
"""Bytes read from a file to recognise its kind."""


@dataclass(frozen=True)
class Kind:
    """A kind of output, e.g. a checkpoint."""

    name: str
    """The name in errors, e.g. "checkpoint", "ONNX folder" or "page of explain"."""
    ours: Callable[[Path], bool]
    """Whether a path holds an earlier output of this kind, which `force` may replace."""
    folder: bool = False


ONNX_FOLDER = Kind("ONNX folder", lambda folder: Place(folder).holds(ONNX_CONFIG), folder=True)


def claim(out: Target, kind: Kind, force: bool = False, *read: Path | None, own: bool = False) -> Output:
    """Check that `out` may be written; raises `UserError` if something would be lost.

    read: the command's input files and folders; None and missing paths are ignored. own: `out` belongs to a folder that
    the command manages itself, e.g. OUT/onnx of quickstart, so it may lie inside a run. An `Output` is returned
    unchanged. Devices and pipes are always allowed.

    >>> output = claim("en-de-onnx", ONNX_FOLDER, force, checkpoint_folder)
    """
    if isinstance(out, Output):
        return out
    check_name(out)
    out = Path(out)
    if out.exists() and not out.is_dir() and not out.is_file() and not kind.folder:
        return Output(out, kind.name, None, special=True)
    if kind.folder and out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; the {kind.name} is a folder: choose another name")
    if not kind.folder and out.is_dir():
        raise UserError(f"{out}: is a folder; give the name of a file")
    sources = [path for path in read if path is not None and path.exists()]
    for source in sources:
        _check_unread(out, source, kind)
    if not own:
        check_outside(out)
    if _is_free(out):
        return Output(out, kind.name, None if kind.folder else seen(out))
    another = "choose another folder" if kind.folder else "choose another name"
    if not _recognised(out, kind):
        if kind.folder:
            raise UserError(f"{out}: holds files that are no {kind.name}; {another}, or empty this one")
        raise UserError(f"{out}: holds no {kind.name}, and only an earlier one is ever replaced; {another}")
    if not force:
        raise UserError(f"{out}: holds another {kind.name}; {another}, or --force to replace it")
    return Output.any(out, kind.name) if own else Output(out, kind.name, seen(out))


def check_outside(out: Path) -> None:
    """Raise `UserError` if `out` would lie inside a model's or a run's folder, or if no file can be created there."""
    _check_parent(out)
    for folder in Path(os.path.realpath(out)).parents:
        if what := Place(folder).sure:
            raise UserError(f"{out}: would lie inside {folder}, which is {what}; choose a place outside of it")


def is_within(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or inside it, with links resolved."""
    if not folder.exists():
        return False
    path = Path(os.path.realpath(path))
    return any(place.exists() and place.samefile(folder) for place in (path, *path.parents))


def _check_unread(out: Path, source: Path, kind: Kind) -> None:
    """Raise `UserError` if writing `out` would change the input `source`."""
    if kind.folder:
        if is_within(source, out) or is_within(source, previous(out)):
            inside = "is" if out.exists() and source.samefile(out) else "holds"
            what = "folder" if source.is_dir() else "file"
            lost = ", whose files would be lost" if source.is_dir() else ", which would be lost"
            raise UserError(f"{out}: {inside} the {what} that is read{lost}; choose another folder")
    elif out.exists() and any(out.samefile(file) for file in _files(source)):
        raise UserError(f"{out}: is read as well: choose another output")
    if source.is_dir() and is_within(out, source):
        raise UserError(f"{out}: would lie inside {source}, which is read; choose a place outside of it")


def _files(source: Path) -> Iterator[Path]:
    """The files of an input folder, or an input file with the data file beside a graph."""
    if source.is_dir():
        yield from (file for file in source.rglob("*") if file.is_file())
        return
    yield source
    if (data := source.with_name(f"{source.name}_data")).is_file():
        yield data


def _check_parent(out: Path) -> None:
    """Raise `UserError` if no file can be created there."""
    parent = next(folder for folder in Path(os.path.realpath(out)).parents if folder.exists())
    if not parent.is_dir():
        raise UserError(f"{out}: could not be written ({parent} is a file); choose another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{out}: could not be written ({parent} is read-only); choose another place")


def _is_free(out: Path) -> bool:
    """Whether nothing is at the path, or only an empty file or folder."""
    if not out.exists():
        return True
    return not any(out.iterdir()) if out.is_dir() else out.stat().st_size == 0


def _recognised(out: Path, kind: Kind) -> bool:
    try:
        return kind.ours(out)
    except (OSError, ValueError, UserError):
        return False


def beginning(path: Path, size: int = BEGINNING) -> bytes:
    """The first bytes of a regular file; b"" for anything else."""
    with suppress(OSError):
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return file.read(size)
    return b""


# The start of JSON, HTML, XML, scripts, PDF or PostScript, which `translate` never writes.
_DOCUMENT = re.compile(rb"\s*(\{|\[\s*[\[{\"]|<[!?a-zA-Z]|#!|%PDF|%!PS)")


def holds_lines(path: Path) -> bool:
    """Whether a file could be an output of `translate`: UTF-8 text without control characters, and not JSON, HTML, XML
    or a script."""
    return _is_text(data := beginning(path)) and _DOCUMENT.match(data) is None


def holds_json_lines(*keys: str) -> Callable[[Path], bool]:
    """Make a `Kind.ours` for JSON Lines: the first object begins with the first key and has all keys."""

    def ours(path: Path) -> bool:
        line = beginning(path).partition(b"\n")[0]
        if not line.startswith(f'{{"{keys[0]}": '.encode()):
            return False
        return len(line) == BEGINNING or json.loads(line).keys() >= {*keys}

    return ours


def holds_object(*keys: str) -> Callable[[Path], bool]:
    """Make a `Kind.ours` for JSON files: an object with at least these keys."""

    def ours(path: Path) -> bool:
        values = read_json(path)
        return isinstance(values, dict) and values.keys() >= {*keys}

    return ours


def page_kind(command: str) -> Kind:
    """The kind of HTML pages that a command writes; they are recognised by the command's name in them (`page.page`)."""
    mark = generator(command).encode()
    return Kind(f"page of {command}", lambda path: mark in beginning(path, 1000))


def _is_text(data: bytes) -> bool:
    if re.search(rb"[\0-\x08\x0e-\x1a]", data):
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(data) == BEGINNING and error.start >= len(data) - 3  # the last character may be cut off
    return True
