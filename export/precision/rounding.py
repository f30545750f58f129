"""Quantising matrices with NumPy: w ~ q * s with small integers q and a scale s per row or per block of a row.

Rows are the outputs of a linear map (the columns of a (D, O) matrix) or the entries of a table.

Shapes: O rows, D columns, G blocks of a row, b columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

INT8 = 127
# The largest sum of two neighbours: x86 CPUs without VNNI add two products with activations in 0..255 in 16 bits.
PAIR = 32767 // 255
COARSER = 2.0
"""How much coarser one step for all rows may be than the rows' own steps."""
ROWS = 4096
"""Rows quantised at a time."""
BLOCK = 32
"""Columns of a block, which share a scale."""


def int8_rows(w: NDArray) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise rows: (O, D) -> q (O, D) in -127..127 and scales (O,), so that q * scale is nearest to w.

    The scale is max|w| / 127 or a little more: two neighbours (columns 0 and 1, 2 and 3, ...) of the same sign sum to
    at most 128. Kernels for uint8 x int8 with saturating 16-bit sums are then exact (vpmaddubsw; AVX2 and AVX-512
    without VNNI). On normal weights this costs a third of a step; seven bits (elsewhere `reduce_range`) would cost a
    whole step. The scale of an all-zero row is 1.
    """
    return _in_parts(_int8_rows, w)


def _int8_rows(w: NDArray) -> tuple[NDArray, NDArray]:
    largest = np.maximum(np.abs(w).max(axis=1) / INT8, _pairs(w) / (PAIR - 0.5))
    scale = np.where(largest > 0, largest, 1).astype(np.float32)
    q = np.rint(w / scale[:, None])
    return np.clip(q, -INT8, INT8, out=q).astype(np.int8), scale


def one_multiplier(w: NDArray) -> np.float32 | None:
    """One multiplier m for all rows of a matrix (O, D): w ~ q / m. Sums of neighbours are limited as in `int8_rows`.

    None if its steps would be more than `COARSER` times the steps of `int8_rows` (root mean square), or w is zero.
    """
    scale = int8_rows(w)[1][w.any(axis=1)].astype(np.float64)
    if not len(scale) or scale.max() > COARSER * np.sqrt(np.square(scale).mean()):
        return None
    return np.float32(1 / scale.max())


def _in_parts(quantise: Callable[[NDArray], tuple[NDArray, NDArray]], w: NDArray) -> tuple[NDArray, NDArray]:
    """Quantise `ROWS` rows at a time: intermediate arrays take several times the memory of the rows."""
    if len(w) <= ROWS:
        return quantise(w)
    q, scale = quantise(w[:ROWS])
    parts = np.empty((len(w), *q.shape[1:]), q.dtype), np.empty((len(w), *scale.shape[1:]), scale.dtype)
    for begin in range(0, len(w), ROWS):
        part = slice(begin, begin + ROWS)
        parts[0][part], parts[1][part] = quantise(w[part])
    return parts


def int8_matrix(w: NDArray, multiplier: np.float32) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix with a known multiplier, w ~ q / multiplier: (O, D) -> q (O, D) and equal scales (O,).

    Raises `ValueError` if a value is beyond 127 steps: the multiplier belongs to another matrix.
    """

    def rounded(w: NDArray) -> tuple[NDArray, NDArray]:
        q = np.rint(w * multiplier)
        if (largest := np.abs(q).max(initial=0)) > INT8:
            raise ValueError(f"its largest value is {largest:.0f} steps of 1/{multiplier:.9g}, a byte holds {INT8}")
        return q.astype(np.int8), np.full(len(w), 1 / multiplier, np.float32)

    return _in_parts(rounded, w)


def _pairs(w: NDArray) -> NDArray:
    """The largest magnitude of a sum of two neighbouring columns, counting only positive or only negative numbers:
    (O, D) -> (O,)."""
    if w.shape[1] % 2:
        w = np.pad(w, ((0, 0), (0, 1)))
    part = np.maximum(w, 0)
    positive = (part[:, 0::2] + part[:, 1::2]).max(axis=1)
    np.minimum(w, 0, out=part)
    return np.maximum(positive, -(part[:, 0::2] + part[:, 1::2]).min(axis=1))


def from_int8_rows(q: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """The float32 matrix (O, D) of q (O, D) and scales (O,)."""
    return q.astype(np.float32) * scale[:, None]


def block_rows(w: NDArray, bits: int, block: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise blocks of rows: (O, D) -> q (O, G, b) in 0..2^bits - 1 and scales (O, G).

    (q - 2^(bits-1)) * scale is nearest to w. At 4 bits or fewer, several scales are tried for each block (`SHRINKS`),
    and the least squared error wins. A scale may be negative: its sign puts the number with the largest magnitude at
    -2^(bits-1), the end with one more step. D is padded with zeros to G * b.
    """
    return _in_parts(lambda rows: _block_rows(rows, bits, block), w)


def _block_rows(w: NDArray, bits: int, block: int) -> tuple[NDArray, NDArray]:
    half = 1 << (bits - 1)
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % block))).reshape(len(w), -1, block)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(axis=2, keepdims=True), axis=2)
    best = np.where(largest != 0, largest, half).astype(np.float32) / -half
    least = np.full(best.shape, np.inf, np.float32)
    first = best
    # At 8 bits the search would gain only a hundredth of the error.
    for shrink in SHRINKS if bits <= 4 else (1.0,):
        scale = first * np.float32(shrink)
        q = np.clip(np.rint(padded / scale), -half, half - 1)
        error = np.square(q * scale - padded).sum(axis=2, keepdims=True)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    q = np.clip(np.rint(padded / best), -half, half - 1) + half
    return q.astype(np.uint8), best[:, :, 0].astype(np.float32)


# Scales tried, in units of max|w| / 2^(bits-1). Below 1 the largest values are clipped and the many small values get
# finer steps; above 1 the largest value no longer lies at the end.
SHRINKS = (1.0, 0.85, 0.9, 0.95, 1.07, 1.14)


def from_block_rows(q: NDArray[np.uint8], scale: NDArray[np.float32], bits: int, width: int) -> NDArray[np.float32]:
    """Undo `block_rows`: the float32 matrix (O, D), D = `width`."""
    w = (q.astype(np.float32) - np.float32(1 << (bits - 1))) * scale[:, :, None]
    return w.reshape(len(q), -1)[:, :width]


def packed(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack two 4-bit values into a byte along the last axis, the first in the lower half; 8-bit values stay."""
    if bits == 8:
        return q
    flat = q.reshape(-1) if q.shape[-1] % 2 else q
    flat = np.pad(flat, (0, 1)) if flat.shape[-1] % 2 else flat
    return flat[..., 0::2] | (flat[..., 1::2] << np.uint8(4))
