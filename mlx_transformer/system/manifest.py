"""manifest.json: size and SHA-256 of each file in a model's folder, to find damage when the model is opened.

A subfolder with a manifest of its own is listed by that file only, e.g. onnx/manifest.json; its hash keeps the files of
two models from being mixed. Files of other subfolders are listed one by one, e.g. 1_Pooling/config.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from .errors import UserError
from .files import open_file, read_json
from .machine import side_by_side, usable_cores

MANIFEST = "manifest.json"
CARD = "README.md"
"""The only file that is not listed, because people edit it."""
FORMAT = 1

SETTLED = 2_000_000_000
"""Nanoseconds. A file younger than this may change again without a new modification time, so it is hashed again."""

LARGE = 1 << 20
"""Bytes. Reading a smaller file takes less time than starting a thread."""

Entries = dict[str, tuple[str, int]]  # name: (SHA-256, bytes)

_verified: set[tuple[object, ...]] = set()  # files verified by this process


def write_manifest(folder: Path) -> None:
    """Write manifest.json: size and SHA-256 of every file in `folder` except the model card.

    If the parent folder's manifest lists this manifest, it is updated too.
    """
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in _listed(folder)}
    (folder / MANIFEST).write_text(_text({"format": FORMAT, "files": files}), encoding="utf-8")
    around, name = folder.parent, f"{folder.name}/{MANIFEST}"
    if (around / MANIFEST).is_file() and name in (read_manifest(around) or {}):
        (around / MANIFEST).write_bytes(manifest_with(around, {name: (folder / MANIFEST).read_bytes()}))


def _listed(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in (MANIFEST, CARD):
            yield path
        elif path.is_dir() and (path / MANIFEST).is_file():
            yield path / MANIFEST
        elif path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())


def _entry(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def manifest_with(folder: Path, changed: Mapping[str, bytes]) -> bytes:
    """The folder's manifest with new contents for some files. changed: {file: its new bytes}."""
    values = read_json(folder / MANIFEST)
    entries = {name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in changed.items()}
    return _text({**values, "files": {**values["files"], **entries}}).encode()


def read_manifest(folder: Path) -> Entries | None:
    """Read {file: (SHA-256, bytes)}; None if there is no manifest, e.g. in another tool's folder.

    Raises `UserError` if it is damaged or names a file outside the folder.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = read_json(path)
    try:
        version, files = manifest["format"], dict(manifest["files"])
        entries = {name: (str(entry["sha256"]), int(entry["bytes"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: damaged manifest ({error!r}); restore the folder from a copy") from error
    if version != FORMAT:
        raise UserError(f"{path}: format {version!r} is not known to this version (it reads format {FORMAT})")
    for name in entries:
        if not name or name != PurePosixPath(name).as_posix() or name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"{path}: file name {name!r} leaves the folder")
    return entries


def verify_files(folder: Path, used: Collection[str] | None = None, listed: Collection[str] = ()) -> None:
    """Compare a folder with its manifest; raises `UserError` at the first difference.

    Every listed file must exist with its size, and the `used` files (default: all) must match their SHA-256. The
    manifest must list all of `used` and `listed`. Large files are read on several threads. A file is hashed once per
    process unless it changes. A folder without a manifest passes.
    """
    entries = read_manifest(folder)
    if entries is None:
        return
    if unlisted := [name for name in (*(used or ()), *listed) if name not in entries]:
        raise UserError(
            f"{folder / MANIFEST}: damaged manifest ({unlisted[0]} is not listed); restore the folder from a copy"
        )
    for name, (_, size) in entries.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: listed in {MANIFEST} but missing; restore the folder from a copy")
        if (actual := file.stat().st_size) != size:
            raise _differs(folder, name, f"{actual} bytes, expected {size}")
    names = list(entries) if used is None else list(used)
    large = sum(entries[name][1] > LARGE for name in names)
    checks = (partial(_is_whole, folder / name, entries[name][0]) for name in names)
    whole = side_by_side(checks, usable_cores() if large > 1 else 1)  # hashing releases Python's lock
    if damaged := [name for name, same in zip(names, whole, strict=True) if not same]:
        raise _differs(folder, damaged[0], "its SHA-256 differs")


def verify_file(file: Path) -> None:
    """Verify an ONNX file and its data file, e.g. x.onnx and x.onnx_data, if a manifest beside them lists them."""
    listed = read_manifest(file.parent) or {}
    verify_files(file.parent, [name for name in (file.name, f"{file.name}_data") if name in listed])


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal. Raises `UserError` if it can't be read."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(parts: Iterable[bytes]) -> str:
    """The SHA-256 of the concatenated parts, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _text(manifest: Mapping[str, object]) -> str:
    return json.dumps(manifest, indent=2) + "\n"


def _is_whole(file: Path, expected: str) -> bool:
    status = file.stat()
    key = (os.path.realpath(file), status.st_ino, status.st_size, status.st_mtime_ns, expected)
    if key in _verified:
        return True
    same = sha256(file) == expected
    if same and time.time_ns() - status.st_mtime_ns > SETTLED:
        _verified.add(key)
    return same


def _differs(folder: Path, name: str, what: str) -> UserError:
    if name.endswith(f"/{MANIFEST}"):
        inner = name.removesuffix(f"/{MANIFEST}")
        return UserError(
            f"{folder}: the files in {inner}/ and those around it aren't of one export ({name}: {what}); copy the whole"
            " folder again, or make it again"
        )
    return UserError(f"{folder / name}: damaged ({what}); restore it from a copy, or make it again")
