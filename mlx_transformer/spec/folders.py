"""What kind of folder a path is, by the files in it."""

from __future__ import annotations

from pathlib import Path

from .errors import UserError

SPEC = "mlx_transformer.json"
"""Our config inside an ONNX folder."""


def is_onnx_folder(path: str | Path) -> bool:
    """True for an ONNX folder, False for a checkpoint or a run's folder; `UserError` for anything else."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    if path.is_dir() and (any(path.glob("onnx/*.onnx")) or any(path.glob("*.onnx"))):
        return True
    # Not at the top: running an ONNX folder needs nothing of what reads weights.
    from .adapter import ADAPTER
    from .checkpoint import resolve

    try:
        resolve(path)
    except UserError as error:
        if path.is_dir() and not (path / ADAPTER).is_file():
            raise UserError(
                f"{path}: neither a checkpoint folder (config.json, model.safetensors) nor an ONNX folder"
            ) from error
        raise
    return False
