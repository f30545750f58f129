"""The attention table of a sentence: which word looks at which, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mlx_transformer.system.errors import UserError


def attention_table(queries: Sequence[str], keys: Sequence[str], weights: ArrayLike) -> str:
    """Rows of weights (T, S), one query word each, under the key words, with three decimals and the row's sum."""
    rows = np.asarray(weights, dtype=np.float64)
    if rows.shape != (len(queries), len(keys)):
        raise UserError(f"attention_table: weights are {rows.shape}, words ask for {(len(queries), len(keys))}")
    cells = [["", *keys, "sum"]]
    cells += [[word, *(f"{w:.3f}" for w in row), f"{row.sum():.3f}"] for word, row in zip(queries, rows, strict=True)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    first, *rest = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], rest, strict=True))])
        for line in cells
    )
