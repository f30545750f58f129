"""Why positions are encoded as they are: the simpler designs that fail, and what the sinusoids can do.

NumPy in float64, for the tests of the claims. n words, d features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlx_transformer.core.positions import sinusoids

Array = NDArray[np.float64]


def append_position(x: ArrayLike, first: int = 1) -> Array:
    """Rejected: the raw position as one more feature, (n, d) -> (n, d+1). It grows without bound."""
    x = np.asarray(x, dtype=np.float64)
    return np.concatenate([x, np.arange(first, first + len(x), dtype=np.float64)[:, None]], axis=1)


def normalised_positions(n: int) -> Array:
    """Rejected: positions scaled to 0..1, (n,). What one step means depends on the sentence's length."""
    return np.arange(n) / max(n - 1, 1)


def single_sine(positions: ArrayLike) -> Array:
    """Rejected: one sine, (..., 1). Bounded, but far positions collide."""
    return np.sin(np.asarray(positions, dtype=np.float64))[..., None]


def sine_cosine(positions: ArrayLike, *frequencies: float) -> Array:
    """Sine and cosine of each frequency side by side, (..., 2k). Few frequencies collide; the paper takes d/2."""
    angle = np.asarray(positions, dtype=np.float64)[..., None] * np.asarray(frequencies, dtype=np.float64)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)


def frequencies(d_model: int, base: float = 10000.0) -> Array:
    """w_j = 10000^(-2j/d) of the paper's encoding, (d/2,), falling."""
    return base ** (-2 * np.arange(d_model // 2) / d_model)


def longest_wave(d_model: int, base: float = 10000.0) -> float:
    """Positions until the slowest feature comes back."""
    return float(2 * np.pi / frequencies(d_model, base)[-1])


def offset_distance(d_model: int, offset: int) -> float:
    """|PE(t+k) - PE(t)|: by sum(2 - 2 cos(k w_j)) under the root, so the same for every t."""
    return float(np.sqrt(np.sum(2 - 2 * np.cos(offset * frequencies(d_model)))))


def offset_rotation(d_model: int, offset: int) -> Array:
    """The linear map PE(t) -> PE(t + offset), the same for every t: block-diagonal (d, d), one rotation a frequency."""
    matrix = np.zeros((d_model, d_model))
    for j, angle in enumerate(offset * frequencies(d_model)):
        sine, cosine = np.sin(angle), np.cos(angle)
        matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cosine, sine], [-sine, cosine]]
    return matrix


def counter_bits(width: int) -> list[str]:
    """000, 001, ... 111: in a counter, too, the last digit alternates fastest."""
    return [format(value, f"0{width}b") for value in range(2**width)]


def zero_crossings(length: int, d_model: int) -> NDArray[np.int64]:
    """How often the sine of each frequency changes its sign within `length` positions, (d/2,)."""
    sines = sinusoids(length, d_model, dtype=np.float64)[1:, 0::2]
    return np.sum(np.signbit(sines[1:]) != np.signbit(sines[:-1]), axis=0)
