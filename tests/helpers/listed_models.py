"""Models and inputs of searches among given ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from marian_models import write_model
from small_models import random_weights

from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig


def write_listed(model: TransformerConfig | dict[str, Any], place: Path) -> Path:
    """Write a checkpoint of random weights, or of options of Marian's with integers, and return its folder."""
    if isinstance(model, dict):
        import_marian(write_model(place / "marian", model, integers=True), place / "model")
    else:
        save_checkpoint(place / "model", model, random_weights(model), force=True)
    return place / "model"


def listed_inputs(config: TransformerConfig, count: int = 7) -> tuple[list[list[int]], list[list[int]]]:
    """Source rows, and the ids that each may become."""
    random = np.random.default_rng(3)
    lengths, most = random.integers(1, 9, count), min(config.source_vocab_size, config.vocab_size) - 2
    rows = [random.integers(3, most, length).tolist() for length in lengths]
    return rows, [random.choice(np.arange(3, most), size, replace=False).tolist() for size in lengths + 3]
