"""What a checkpoint says of the files that it was imported from, to find them again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import sha256


def place_of(original: Path, files: Iterable[Path], checkpoint: Path) -> dict[str, Any]:
    """A file or folder, by its way from the checkpoint, and the digests of these files."""
    way = Path(os.path.relpath(original.resolve(), checkpoint.resolve())).as_posix()
    return {"place": way, "sha256": {file.name: sha256(file) for file in files}}


def found_at(record: Mapping[str, Any], checkpoint: Path) -> Path:
    """The file or folder that `place_of` wrote down; `UserError` if it isn't there any more, or another one is."""
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
