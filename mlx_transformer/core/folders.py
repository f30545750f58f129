"""The kind of folder that a path is, by the files in it, and a digest of all of them."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_transformer.system.durable import previous
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import check_name
from mlx_transformer.system.manifest import CARD, digest_of, sha256

from .outputs import ONNX_CONFIG as ONNX_CONFIG

HUB_NAME = re.compile(r"[a-z0-9]([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII | re.IGNORECASE)
NO_HUB_NAME = re.compile(r"--|\.\.|\.git$")
"""The parts of a name that the Hub refuses that `HUB_NAME` fits."""


def may_be_called(name: str) -> bool:
    """Return whether the Hugging Face Hub takes a repository of that name."""
    return HUB_NAME.fullmatch(name) is not None and NO_HUB_NAME.search(name) is None


def check_there(path: str | Path) -> None:
    """Raise `UserError` if a model is neither on this machine nor may be on the Hugging Face Hub.

    Takes no time: a command asks before it imports what runs models.
    """
    check_name(path)
    path = Path(path)
    if not (path.exists() or previous(path).exists() or may_be_called(str(path))):
        raise UserError(f"{path}: no such folder")


def is_onnx_folder(path: str | Path) -> bool:
    """Return True for an ONNX folder, False for a checkpoint, a run's folder or a published model; `UserError` for
    anything else."""
    check_name(path)
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    if path.is_dir() and (any(path.glob("onnx/*.onnx")) or any(path.glob("*.onnx"))):
        return True
    # Not at the top: running an ONNX folder needs nothing of what reads weights.
    from .adapter import ADAPTER
    from .checkpoint import is_published, resolve

    if is_published(path):
        return False
    try:
        resolve(path)
    except UserError as error:
        if path.is_dir() and not (path / ADAPTER).is_file():
            raise UserError(
                f"{path}: neither a checkpoint folder (config.json, model.safetensors) nor an ONNX folder"
            ) from error
        raise
    return False


def fingerprint(path: Path) -> str:
    """Digest all files of a model, to see whether it is the one that it was: of a checkpoint, the run that holds it, an
    ONNX folder, or one file and the data beside it. A card, which people change, is left out. `UserError` if it is none
    of these."""
    if path.is_file():
        files = [path, *path.parent.glob(f"{path.name}_data")]
        folder = path.parent
    else:
        if is_onnx_folder(path):
            folder = path
        else:
            from .checkpoint import is_published, resolve

            folder = path if is_published(path) else resolve(path)
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != CARD]
    return digest_of(f"{file.relative_to(folder).as_posix()} {sha256(file)}\n".encode() for file in sorted(files))
