"""Integers of a matrix in groups: w ~ scale * (q - zero), with a whole zero within q's type, as fast kernels need it.

    search  without data: several ranges for each group, and the scale that fits its integers best
    gptq    from the second moments of the inputs (Frantar et al. 2023): rounds a column at a time, and moves the
            columns that are left so that the outputs change least. Columns with large inputs come first; groups stay
            neighbours in a row, with scales chosen before as in search, errors weighted by the inputs' squares

Shapes: O rows, D columns, G groups of b columns in a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.quantization import Packed, Scheme, packed_words

Array = NDArray[np.float32]

ROWS = 256
"""Rows whose scales are chosen at a time."""
COLUMNS = 64
"""Columns that GPTQ rounds before it moves those behind them."""
DAMPING = 0.01
"""Added to the moments' diagonal, as a share of its mean."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Ranges tried for a group, as a share of that from its least to its largest number."""


def searched(w: Array, scheme: Scheme) -> Packed:
    """Round w (O, D) without data."""
    scales, zeros = grid(w, scheme)
    q = np.empty(w.shape, np.uint8)
    for rows, grouped in _in_groups(w, scheme):
        nearest = np.rint(grouped / scales[rows, :, None]) + zeros[rows, :, None]
        q[rows] = np.clip(nearest, 0, 2**scheme.bits - 1).reshape(len(grouped), -1)
    return _packed(q, scales, zeros, scheme)


def gptq(w: Array, moments: Array, scheme: Scheme) -> Packed:
    """Round w (O, D), of which any rows may stand together, by the inputs' moments (D, D), a sum of x x^T.

    Raises `numpy.linalg.LinAlgError` for moments that aren't finite.
    """
    weight = np.maximum(np.diag(moments), DAMPING * np.diag(moments).mean())
    scales, zeros = grid(w, scheme, weight)
    order, factor = _factor(moments)
    top, by_group = np.float32(2**scheme.bits - 1), (np.ascontiguousarray(each.T) for each in (scales, zeros))
    steps, middle = by_group  # (G, O)
    left = np.ascontiguousarray(w.T[order])  # (D, O)
    q = np.empty(w.shape[::-1], np.uint8)
    for begin in range(0, len(left), COLUMNS):
        end = min(begin + COLUMNS, len(left))
        errors = np.empty((end - begin, len(w)), np.float32)
        for i in range(begin, end):
            step, zero = steps[group := order[i] // scheme.group_size], middle[group]
            integers = np.clip(np.rint(left[i] / step + zero), 0, top)
            q[order[i]] = integers
            error = errors[i - begin] = (left[i] - step * (integers - zero)) / factor[i, i]
            left[i + 1 : end] -= factor[i, i + 1 : end, None] * error
        left[end:] -= factor[begin:end, end:].T @ errors
    return _packed(np.ascontiguousarray(q.T), scales, zeros, scheme)


def _factor(moments: Array) -> tuple[NDArray[np.intp], Array]:
    """(columns, those with the largest inputs first; the upper Cholesky factor U of their inverse: H^-1 = U^T U)"""
    h, size = moments.astype(np.float64), np.diag(moments)
    order = np.argsort(-size, kind="stable")
    h = h[order][:, order]
    h[np.diag_indices(len(h))] += DAMPING * size.mean() or 1
    inverse = np.linalg.inv(np.linalg.cholesky(h[::-1, ::-1]))[::-1, ::-1]
    return order, np.triu(inverse).astype(np.float32)


def grid(w: Array, scheme: Scheme, weight: Array | None = None) -> tuple[Array, Array]:
    """Scales and whole zeros (O, G) with the least squared error, of a few ranges; weight (D,): of each column's."""
    shape = len(w), w.shape[1] // scheme.group_size
    scales, zeros = np.empty(shape, np.float32), np.empty(shape, np.float32)
    top = np.float32(2**scheme.bits - 1)
    h = 1 if weight is None else (weight / weight.mean()).reshape(shape[1], -1).astype(np.float32)  # (G, b)
    for rows, grouped in _in_groups(w, scheme):
        low, high = (np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0))
        span = np.where(high > low, high - low, top)[..., None]
        least = np.full(span.shape, np.inf, np.float32)
        best_scale, best_zero = span / top, np.zeros_like(span)
        for shrink in SHRINKS:
            scale = span * np.float32(shrink) / top
            zero = np.clip(np.rint(-low[..., None] * np.float32(shrink) / scale), 0, top)
            for _ in range(2):
                q = np.clip(np.rint(grouped / scale) + zero, 0, top) - zero
                error = (np.square(q * scale - grouped) * h).sum(-1, keepdims=True)
                better = error < least
                least, best_scale = np.where(better, error, least), np.where(better, scale, best_scale)
                best_zero = np.where(better, zero, best_zero)
                fitted, size = ((q * other * h).sum(-1, keepdims=True) for other in (grouped, q))
                scale = np.where((fitted > 0) & (size > 0), fitted / np.where(size > 0, size, 1), scale)
        scales[rows], zeros[rows] = best_scale[..., 0], best_zero[..., 0]
    return scales, zeros


def _in_groups(w: Array, scheme: Scheme) -> Iterator[tuple[slice, Array]]:
    for begin in range(0, len(w), ROWS):
        part = w[begin : begin + ROWS]
        yield slice(begin, begin + ROWS), part.reshape(len(part), -1, scheme.group_size)


def _packed(q: NDArray[np.uint8], scales: Array, zeros: Array, scheme: Scheme) -> Packed:
    return Packed(packed_words(q, scheme.bits), scales, -scales * zeros, scheme)
