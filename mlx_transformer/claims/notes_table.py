"""The attention table of the notes for YOUR CAT IS A LOVELY CAT, and whether it can be what they say it is.

Where Q = K the scores are symmetric, s_ij = s_ji, and log A_ij = s_ij - z_i for a number z_i of each row. So
log A_ij - log A_ji = z_j - z_i: what is left of it measures how far a table is from any such scores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

WEIGHTS = (
    (0.268, 0.119, 0.134, 0.148, 0.179, 0.152),
    (0.124, 0.278, 0.201, 0.128, 0.154, 0.115),
    (0.147, 0.132, 0.262, 0.097, 0.218, 0.145),
    (0.210, 0.128, 0.206, 0.212, 0.119, 0.125),
    (0.146, 0.158, 0.152, 0.143, 0.227, 0.174),
    (0.195, 0.114, 0.203, 0.103, 0.157, 0.229),
)
DIGITS = 0.0005
"""How far a number of three decimals may be from what it was rounded from."""
LOVELY, A, IS = 4, 3, 2


def asymmetry(weights: ArrayLike) -> float:
    """Largest |log A_ij - log A_ji - (z_j - z_i)| for the z that fit best in the sense of least squares."""
    return float(np.abs(_unfitted(np.log(np.asarray(weights, dtype=np.float64)))).max())


def _unfitted(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    difference = logs - logs.T
    z = difference.mean(axis=0)
    return difference - (z[None, :] - z[:, None])


def explained_by_rounding() -> float:
    """The most by which rounding each weight of the notes can have changed their table's `asymmetry`."""
    weights = np.array(WEIGHTS)
    change = np.zeros_like(weights)
    for place in np.ndindex(*weights.shape):
        moved = np.zeros_like(weights)
        moved[place] = DIGITS / (weights[place] - DIGITS)
        change += np.abs(_unfitted(moved))
    return float(change.max())


def around(first: int, second: int, third: int) -> float:
    """A_ij A_jk A_ki: of symmetric scores the same as A_ik A_kj A_ji, the other way around."""
    return WEIGHTS[first][second] * WEIGHTS[second][third] * WEIGHTS[third][first]


def rounded_up() -> float:
    """Share of random rows of six weights whose three decimals add up to 1.001."""
    scores = np.random.default_rng(0).normal(scale=0.5, size=(100_000, 6))
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return float(np.mean(weights.round(3).sum(axis=1).round(3) == 1.001))
