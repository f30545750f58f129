"""Quantising matrices with NumPy: w ~ q * s, q small integers, s one scale a row or a block of a row.

Rows are a linear's outputs (its columns, where matrices are (D, O)) or a table's entries.

Shapes: O rows, D columns, G blocks of a row, b columns of a block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT8 = 127
# Of activations in 0..255: two products of a pair of columns are summed in 16 bits on x86 CPUs without VNNI.
PAIR = 32767 // 255


def int8_rows(w: NDArray) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(O, D) -> q (O, D) in -127..127 and scales (O,): q * scale is nearest to w; an all-zero row has scale 1.

    The scale is max|w| / 127, or a little more: no two neighbours (columns 0 and 1, 2 and 3, ...) of one sign sum to
    more than 128, so that uint8 x int8 kernels with saturating 16-bit sums (vpmaddubsw; AVX2 and AVX-512 without VNNI)
    are exact. On normal weights this costs a third of a step; seven bits (`reduce_range` elsewhere) would cost a whole.
    """
    largest = np.maximum(np.abs(w).max(axis=1) / INT8, _pairs(w) / (PAIR - 0.5))
    scale = np.where(largest > 0, largest, 1).astype(np.float32)
    q = np.rint(w / scale[:, None])
    return np.clip(q, -INT8, INT8, out=q).astype(np.int8), scale


def _pairs(w: NDArray) -> NDArray:
    """Largest sum of one sign among neighbouring columns, (O,)."""
    padded = np.pad(w, ((0, 0), (0, w.shape[1] % 2)))
    first, second = padded[:, 0::2], padded[:, 1::2]
    positive = (np.maximum(first, 0) + np.maximum(second, 0)).max(axis=1)
    return np.maximum(positive, -(np.minimum(first, 0) + np.minimum(second, 0)).min(axis=1))


def from_int8_rows(q: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """The float32 matrix (O, D) that q (O, D) and scales (O,) stand for."""
    return q.astype(np.float32) * scale[:, None]
