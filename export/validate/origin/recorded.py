"""The original of a checkpoint, where the checkpoint says which it was and it is still there."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.families.conversion import ORIGIN
from mlx_transformer.families.hub import cached_model
from mlx_transformer.families.marian_files.conversion import ORIGIN as MARIAN
from mlx_transformer.families.origin import original_path
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object
from mlx_transformer.system.manifest import verify_files

from .marian import Marian


def recorded(against: str, checkpoint: Path) -> Path:
    """Return the file or folder that a checkpoint was imported from; `UserError` says why it can't be had."""
    file = checkpoint / (MARIAN if against == Marian.name else ORIGIN)
    try:
        if not file.is_file():
            raise UserError("the checkpoint doesn't say what it was imported from")
        record = read_object(file)
        if against == Marian.name and (copy := checkpoint / Path(str(record.get("model"))).name).is_file():
            verify_files(checkpoint, [copy.name])
            return copy
        if "repository" in record:
            return cached_model(str(record["repository"]), str(record.get("revision")))
        return original_path(record, checkpoint)
    except UserError as error:
        raise UserError(
            f"--against {against}: {error}: give --original, the file or folder that was imported"
        ) from None
