"""Position tables, computed once in float64 and rounded to float32, so that every runtime holds the same bits.

Both sides take their tables from here; `export/validate/reference` writes the formulas down a second time, by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .config import Stack, TransformerConfig


def sinusoids(
    length: int, d_model: int, layout: str = "sinusoidal", dtype: DTypeLike = np.float32, first: int = 0
) -> NDArray:
    """Sinusoidal encodings (length, d_model) (section 3.5) of the positions from `first` on; float32 in models, float64
    to study them.

    `sinusoidal`: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same): pairs side by side, as in the paper.
    `sinusoidal_halves`: the same numbers, all sines, then all cosines, as `transformers` has them for Marian.
    `sinusoidal_concat`: all sines, then all cosines, of frequencies 10000^(-j / (d/2 - 1)), as in tensor2tensor; its
    frequencies differ from the paper's, it is not a permutation of them. Every row depends on its position alone.
    """
    position = np.arange(first, first + length, dtype=np.float64)[:, None]
    half = np.arange(d_model // 2, dtype=np.float64)[None, :]
    exponent = -half / (d_model // 2 - 1) if layout == "sinusoidal_concat" else -2 * half / d_model
    angle = position * 10000.0**exponent
    if layout == "sinusoidal":
        table = np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(length, d_model)
    else:
        table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return table.astype(dtype)


def rotary_tables(length: int, config: TransformerConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin (length, d_k / 2), float32, of rotary positions (Su et al. 2021), angle pos * base^(-2i/d_k).

    The pair that an angle turns is (x_i, x_{i + d_k/2}): halves, as published checkpoints store their projections.
    """
    position = np.arange(length, dtype=np.float64)[:, None]
    pair = np.arange(config.d_k // 2, dtype=np.float64)[None, :]
    angle = position * config.rotary_base ** (-2 * pair / config.d_k)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@lru_cache(maxsize=64)
def distinct_rotations(
    config: TransformerConfig, stack: Stack
) -> tuple[tuple[TransformerConfig, ...], tuple[int, ...]]:
    """Layers of a stack that rotate differently, each as its config, and for every layer which of them it rotates like.

    Gemma 3's bases are 10,000 in five layers of six and 1,000,000 in the sixth: two configs, (0, 0, 0, 0, 0, 1, ...).
    """
    layers = config.layers(stack)
    rotations = [(c.rotary_base, c.d_k) if c.positions == "rotary" else None for c in layers]
    distinct = list(dict.fromkeys(rotations))
    return tuple(layers[rotations.index(r)] for r in distinct), tuple(map(distinct.index, rotations))


def relative_buckets(length: int, config: TransformerConfig, causal: bool) -> NDArray[np.int64]:
    """Return the row of a table for each distance, key less query, from 1 - length to length - 1 (2 * length - 1,).

    The first half of the rows is for one distance each, the others for ranges that grow geometrically up to
    `relative_distance`. `causal`: for keys before the query; else half of all rows is for keys after it (Raffel et al.
    2020, T5).
    """
    distance = np.arange(1 - length, length)
    rows = config.relative_buckets if causal else config.relative_buckets // 2
    after = np.zeros_like(distance) if causal else np.where(distance > 0, rows, 0)
    far = np.maximum(-distance, 0) if causal else np.abs(distance)
    near = rows // 2
    # The sum keeps whole numbers whole, whatever the logarithms round to.
    ranges = np.log(np.maximum(far, 1) / near) / np.log(config.relative_distance / near) * (rows - near) + 1e-9
    return after + np.where(far < near, far, np.minimum(near + ranges.astype(np.int64), rows - 1))


WRITES = ("_attention.output_proj", ".down_proj")
"""Ends of modules whose result is d_model wide; other matrices read such a vector, and norms have one."""


def channels(d_model: int) -> NDArray[np.intp]:
    """CHANNELS: which channel of pairs each one of halves is (d_model,).

    Models trained here hold sines and cosines in pairs, published ones all sines first. With the paper's own
    frequencies `sinusoidal` is a permutation of `sinusoidal_halves`: the weights of the one, with
    `halves[j] = pairs[CHANNELS[j]]` on every axis of width d_model, are those of the other.
    """
    return np.r_[0:d_model:2, 1:d_model:2]


def reordered(weights: Mapping[str, NDArray], order: NDArray[np.intp]) -> dict[str, NDArray]:
    """The weights of the same model with its d_model channels in another order."""
    return {name: _reordered(name, array, order) for name, array in weights.items()}


def _reordered(name: str, array: NDArray, order: NDArray[np.intp]) -> NDArray:
    module = name.rpartition(".")[0]
    if module.endswith(WRITES) or (module.endswith("norm") and not module.endswith(("query_norm", "key_norm"))):
        return array[order]
    return array[:, order] if array.ndim == 2 else array
