"""The worked example of the notes: the five features of both words CAT, to which their positions' are added."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.positions import Positions, positions_of

from .row import Found

SENTENCE = "YOUR CAT IS A LOVELY CAT".split()
CAT = (171.411, 3276.350, 9192.819, 3633.421, 8390.473)
"""The word's embedding, both times."""
SECOND = (1664.068, 8080.133, 2620.399, 9386.405, 3120.159)
"""Position 1, of the first CAT."""
SIXTH = (1281.458, 7902.890, 912.970, 1659.217, 7018.620)
"""Position 5, of the second. The notes give the first of these; the others are their sums less the word."""


def sums() -> np.ndarray:
    """Both CATs after the positions were added, as the package adds rows of a table: (2, 5)."""
    config = TransformerConfig(vocab_size=8, d_model=5, heads=1, positions="learned", max_positions=6)
    placed = Positions(config, causal=False)
    rows = np.zeros((6, 5), dtype=np.float32)
    rows[1], rows[5] = SECOND, SIXTH
    placed.weight = mx.array(rows)
    words = mx.array(np.tile(np.asarray(CAT, dtype=np.float32), (1, 6, 1)))
    return np.array(placed(words, positions_of(6)).x)[0, [1, 5]]


def first_feature() -> Found:
    first, second = sums()
    return {"first feature of the first CAT": first[0], "of the second": second[0], "features": first.size}


def features() -> Found:
    first, second = sums()
    return {"first CAT": first.tolist(), "second CAT": second[1:].tolist()}
