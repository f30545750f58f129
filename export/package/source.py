"""A checkpoint opened to be exported: all that goes into the package is checked before anything is written."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.config import SINUSOIDS, TransformerConfig
from mlx_transformer.system.errors import UserError

LARGEST_TABLE = 1 << 28
"""Bytes of the constant table of positions in each graph."""


def open_source(checkpoint: str | Path) -> tuple[Checkpoint, str | None]:
    """The checkpoint, and the text of its tokenizer.json, if it has one. `UserError` if either is damaged, or has more
    positions than a graph should hold."""
    opened = open_checkpoint(checkpoint)
    tokenizer = opened.tokenizer_json()
    size, limit = table_size(opened.config), LARGEST_TABLE
    if size > limit:
        positions = opened.config.max_positions
        raise UserError(
            f"{opened.folder}: max_positions={positions:,} makes a table of {size / 1e6:,.0f} MB, a graph takes"
            f" {limit / 1e6:,.0f}: lower max_positions in its config.json to {positions * limit // size:,} or less"
        )
    return opened, tokenizer


def table_size(c: TransformerConfig) -> int:
    """Bytes of the constants that a graph needs for its positions; a learned table is no constant."""
    widths = {**dict.fromkeys(SINUSOIDS, 4 * c.d_model), "rotary": 4 * c.d_k, "relative": 16}
    return widths.get(c.positions, 0) * c.max_positions
