"""The kind of folder that a path is, by the files in it, and a digest of all of them."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import check_name
from mlx_transformer.system.manifest import CARD, digest_of, sha256

ONNX_CONFIG = "mlx_transformer.json"
"""Our config inside an ONNX folder."""


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
