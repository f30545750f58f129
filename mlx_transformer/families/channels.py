"""The order of the channels: models trained here hold sines and cosines in pairs, published ones all sines first.

With the paper's own frequencies `sinusoidal` is a permutation of `sinusoidal_halves`: the weights of the one, with
`halves[j] = pairs[CHANNELS[j]]` on every axis of width d_model, are those of the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WRITES = ("_attention.output_proj", ".down_proj")
"""Ends of modules whose result is d_model wide; other matrices read such a vector, and norms have one."""


def channels(d_model: int) -> NDArray[np.intp]:
    """CHANNELS: which channel of pairs each one of halves is (d_model,)."""
    return np.r_[0:d_model:2, 1:d_model:2]


def reordered(weights: Mapping[str, NDArray], order: NDArray[np.intp]) -> dict[str, NDArray]:
    """The weights of the same model with its d_model channels in another order."""
    return {name: _reordered(name, array, order) for name, array in weights.items()}


def _reordered(name: str, array: NDArray, order: NDArray[np.intp]) -> NDArray:
    module = name.rpartition(".")[0]
    if module.endswith(WRITES) or (module.endswith("norm") and not module.endswith(("query_norm", "key_norm"))):
        return array[order]
    return array[:, order] if array.ndim == 2 else array
