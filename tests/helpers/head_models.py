"""The tiny models of `head_folders` as checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from head_folders import published
from published_folders import left_behind

from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint


def head_model(name: str, folder: Path, **changes: object) -> Path:
    """Write it as a checkpoint, FOLDER/model."""
    assert left_behind(import_huggingface(published(name, folder / "theirs", **changes), folder / "model")) == []
    return folder / "model"


def reranker(folder: Path) -> Path:
    """Write bert-classes with its first class alone, FOLDER/one."""
    opened = open_checkpoint(head_model("bert-classes", folder))
    weights = {name: array[:1] if name.startswith("output_proj.") else array for name, array in opened.tensors()}
    config = replace(opened.config, head=replace(opened.config.head, labels=("relevance",)))
    return save_checkpoint(folder / "one", config, weights, opened.tokenizer_json(), force=True)
