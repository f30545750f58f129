"""The tiny models of `head_folders` as checkpoints."""

from __future__ import annotations

from pathlib import Path

from head_folders import published

from mlx_transformer.convert import import_huggingface


def head_model(name: str, folder: Path, **changes: object) -> Path:
    """Write it as a checkpoint, FOLDER/model."""
    assert import_huggingface(published(name, folder / "theirs", **changes), folder / "model") == []
    return folder / "model"
