"""The choice of pairs for validation, where there is no text for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

MOST = 1000  # pairs; one in a hundred of a smaller text


def kept_pairs(count: int, seed: int, name: str, noun: str = "pairs") -> NDArray:
    """Return (count,) bool, True on those that stay for training. `UserError`, with the text's name, for one alone."""
    if count < 2:
        raise UserError(f"{name}: {count} usable {noun}; training needs more, or give validation files")
    order = np.random.default_rng(seed).permutation(count)
    kept = np.ones(count, dtype=bool)
    kept[order[: max(1, min(MOST, count // 100))]] = False
    return kept
