"""A checkpoint's record of the files that it was imported from, to find them again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object
from mlx_transformer.system.manifest import sha256


def place_of(original: Path, files: Iterable[Path], checkpoint: Path) -> dict[str, Any]:
    """Return a file or folder, by its way from the checkpoint, and the digests of these files."""
    way = Path(os.path.relpath(original.resolve(), checkpoint.resolve())).as_posix()
    return {"place": way, "sha256": {file.name: sha256(file) for file in files}}


def named_alone(file: Path) -> bytes | None:
    """Return what a file with such a record says, the way to the original shortened to its name, beside the checkpoint:
    others needn't know folders of this machine. None where it says no more."""
    record = read_object(file)
    place = record.get("place")
    if not isinstance(place, str) or place == (name := f"../{PurePosixPath(place).name}"):
        return None
    return (json.dumps({**record, "place": name}, indent=2) + "\n").encode()


def original_path(record: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the file or folder that `place_of` wrote down; `UserError` if it isn't there any more, or another one
    is."""
    place, digests = record.get("place"), record.get("sha256")
    if not isinstance(place, str) or not isinstance(digests, dict):
        raise UserError("the checkpoint doesn't say what it was imported from")
    original = Path(os.path.normpath(checkpoint.resolve() / place))
    folder = original if original.is_dir() else original.parent
    for name, digest in digests.items():
        file = folder / Path(str(name)).name
        if not file.is_file():
            raise UserError(f"{file}, from which it was imported, is not there")
        if sha256(file) != digest:
            raise UserError(f"{file} is no longer what was imported")
    return original
