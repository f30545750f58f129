"""Position tables, computed in float64 and rounded to float32 once, so that every runtime has the same bits.

MLX and ONNX models take their tables from here. `export/validate/reference` has the formulas a second time, to check
them independently.
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
    """Sinusoidal encodings (length, d_model) of positions `first`, `first` + 1, ... (section 3.5).

    `sinusoidal`: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same): sine and cosine alternate, as in the
    paper. `sinusoidal_halves`: the same numbers, all sines, then all cosines, as in `transformers` for Marian.
    `sinusoidal_concat`: all sines, then all cosines, with tensor2tensor's frequencies 10000^(-j / (d/2 - 1)). These
    differ from the paper's, so it is no permutation of the other two. A row depends only on its position.
    """
    position = np.arange(first, first + length, dtype=np.float64)[:, None]  # (length, 1)
    half = np.arange(d_model // 2, dtype=np.float64)[None, :]  # (1, d_model / 2)
    exponent = -half / (d_model // 2 - 1) if layout == "sinusoidal_concat" else -2 * half / d_model
    angle = position * 10000.0**exponent  # (length, d_model / 2)
    if layout == "sinusoidal":
        table = np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(length, d_model)
    else:
        table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return table.astype(dtype)


def rotary_tables(length: int, config: TransformerConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin (length, d_k / 2) of the angles pos * base^(-2i/d_k) of rotary positions (Su et al. 2021).

    Angle i rotates the pair (x_i, x_{i + d_k/2}), not neighbours, to match the projections of published checkpoints.
    """
    position = np.arange(length, dtype=np.float64)[:, None]
    pair = np.arange(config.d_k // 2, dtype=np.float64)[None, :]
    angle = position * config.rotary_base ** (-2 * pair / config.d_k)  # (length, d_k / 2)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@lru_cache(maxsize=64)
def distinct_rotations(
    config: TransformerConfig, stack: Stack
) -> tuple[tuple[TransformerConfig, ...], tuple[int, ...]]:
    """Configs of layers with different rotations, and for each layer of the stack the index of its config.

    E.g. Gemma 3 has base 10,000 in five of six layers and 1,000,000 in the sixth: two configs and indices
    (0, 0, 0, 0, 0, 1, ...). A layer without rotary positions counts as a rotation of its own.
    """
    layers = config.layers(stack)
    rotations = [(c.rotary_base, c.d_k) if c.positions == "rotary" else None for c in layers]
    distinct = list(dict.fromkeys(rotations))
    return tuple(layers[rotations.index(r)] for r in distinct), tuple(map(distinct.index, rotations))


def relative_buckets(length: int, config: TransformerConfig, causal: bool) -> NDArray[np.int64]:
    """Row of T5's table for each distance (key position - query position) from 1 - length to length - 1 (Raffel et al.
    2020); returns (2 * length - 1,).

    causal: all rows are for keys up to the query; else the second half of the rows is for keys after it. Of a
    direction's rows, the first half stand for one distance each, the others for ranges that grow geometrically up to
    `relative_distance`.
    """
    distance = np.arange(1 - length, length)
    rows = config.relative_buckets if causal else config.relative_buckets // 2
    after = np.zeros_like(distance) if causal else np.where(distance > 0, rows, 0)
    far = np.maximum(-distance, 0) if causal else np.abs(distance)
    near = rows // 2
    # 1e-9 keeps exact integers from being rounded down after the logarithms' rounding.
    ranges = np.log(np.maximum(far, 1) / near) / np.log(config.relative_distance / near) * (rows - near) + 1e-9
    return after + np.where(far < near, far, np.minimum(near + ranges.astype(np.int64), rows - 1))


WRITES = ("_attention.output_proj", ".down_proj")
"""Name endings of modules whose output has width d_model. The input of all other matrices has width d_model."""


def channels(d_model: int) -> NDArray[np.intp]:
    """Permutation (d_model,) from `sinusoidal` to `sinusoidal_halves`, i.e. [0, 2, 4, ..., 1, 3, 5, ...].

    Models trained here alternate sines and cosines; published models have all sines first. Applying
    `halves[j] = pairs[channels[j]]` to every axis of width d_model converts the weights (`reordered`).
    """
    return np.r_[0:d_model:2, 1:d_model:2]


def reordered(weights: Mapping[str, NDArray], order: NDArray[np.intp]) -> dict[str, NDArray]:
    """Weights of the same model with its d_model channels in another order, e.g. `channels(d_model)`."""
    return {name: _reordered(name, array, order) for name, array in weights.items()}


def _reordered(name: str, array: NDArray, order: NDArray[np.intp]) -> NDArray:
    module = name.rpartition(".")[0]
    if module.endswith(WRITES) or (module.endswith("norm") and not module.endswith(("query_norm", "key_norm"))):
        return array[order]
    return array[:, order] if array.ndim == 2 else array
