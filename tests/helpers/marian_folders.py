"""Marian folders for tests, and damage to them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from small_models import encoder_decoder, random_weights

from mlx_transformer.convert import to_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

PAPER = encoder_decoder("paper")


def written(folder: Path, config: TransformerConfig = PAPER, **changes) -> Path:
    """folder/ours, a checkpoint of random weights, and folder/theirs, the Marian made of it; returns the latter."""
    weights = {**random_weights(config), **changes}
    save_checkpoint(folder / "ours", config, weights, force=True)
    return to_huggingface(folder / "ours", folder / "theirs")


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors")
