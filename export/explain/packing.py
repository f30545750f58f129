"""Numbers as text, for the page: arrays in base64, of as many bits as the page has room for."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

FINE, COARSE = 16, 8
"""Bits of a weight: four decimals, or two."""

ROOM = 2_400_000
"""Characters of all maps together: the page stays under 3 MB."""


def bits_for(cells: int, models: int, tokens: int) -> int:
    """Bits of each of so many weights, of this many models, on one page; `UserError` where not even the fewest fit."""
    for bits in (FINE, COARSE):
        if _characters(cells, models, bits) <= ROOM:
            return bits
    most = int(tokens * (ROOM / _characters(cells, models, COARSE)) ** 0.5)
    raise UserError(
        f"{tokens} tokens make a page of more than 3 MB with this model: shorten the text to about {most} tokens"
    )


def packed(weights: NDArray[np.float32], bits: int) -> str:
    """Weights from 0 to 1 as whole numbers of so many bits, little-endian."""
    steps = np.rint(np.clip(weights.astype(np.float64), 0, 1) * (2**bits - 1))
    return _text(steps.astype("<u2" if bits == FINE else "u1"))


def unpacked(text: str, bits: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """What `packed` took, to within half a step."""
    data = np.frombuffer(base64.b64decode(text), "<u2" if bits == FINE else "u1")
    return data.reshape(shape) / (2**bits - 1)


def packed_difference(first: NDArray[np.float32], second: NDArray[np.float32]) -> dict[str, Any]:
    """{"largest": of each map (layers, H), "values": second - first of each map in parts of its largest, signed bytes}.

    first, second: (layers, H, L, S)."""
    difference = second.astype(np.float64) - first
    largest = np.abs(difference).max(axis=(2, 3))
    parts = np.rint(difference / np.where(largest, largest, 1)[:, :, None, None] * 127).astype(np.int8)
    return {"largest": [rounded(row) for row in largest], "values": _text(parts)}


def rounded(values: Any, digits: int = 4) -> list[float]:
    """So many significant digits of each number."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, np.float64).ravel()]


def _characters(cells: int, models: int, bits: int) -> int:
    each = models * bits // 8 + (models > 1)
    return -(-cells * each * 4 // 3)


def _text(array: NDArray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
