"""From a checkpoint folder to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.spec.checkpoint import resolve
from mlx_transformer.spec.tokenizer import Tokenizer

from .model import Transformer


def load(folder: str | Path) -> tuple[Transformer, Tokenizer | None]:
    """The model of a checkpoint folder (or a run's folder), in evaluation mode, and its tokenizer, if it has one.

    Files are compared with their digests and the weights with the config; `UserError` says what is damaged.
    """
    folder = resolve(folder)
    path = folder / "tokenizer.json"
    return Transformer.load(folder), Tokenizer.load(path) if path.exists() else None
