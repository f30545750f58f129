"""Position tables, computed in float64 and rounded to float32 once, so that every runtime has the same bits.

MLX and ONNX models take their tables from here. `export/validate/reference` has the formulas a second time, to check
them independently.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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


def rotary_tables(
    length: int, config: TransformerConfig, long: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A cos and A sin (length, D / 2) of the angles of rotary positions (Su et al. 2021); D = `config.turned`.

    Angle i rotates the pair (x_i, x_{i + D/2}), not neighbours, to match the projections of published checkpoints. A is
    the `attention_factor` of `rotary_scaling`, else 1. Frequencies and angles are float32, as in transformers and
    mlx-lm: at position 10,000 a float64 angle is another by up to 5e-4.
    """
    position = np.arange(length, dtype=np.float32)[:, None]
    angle = (position * rotary_frequencies(config, long)).astype(np.float64)  # (length, D / 2)
    factor = np.float32(config.rotary_scaling.get("attention_factor", 1))
    return np.cos(angle).astype(np.float32) * factor, np.sin(angle).astype(np.float32) * factor


def rotary_frequencies(config: TransformerConfig, long: bool = False) -> NDArray[np.float32]:
    """Angle per position of each pair (D / 2,): base^(-2i/D), changed by `rotary_scaling`.

    - linear (position interpolation, Chen et al. 2023): f / factor
    - llama3: f / factor for wavelengths 2 pi / f over length / low, f below length / high, between them a mean of both
    - yarn (Peng et al. 2023): f / factor for pairs with less than beta_slow turns within `length`, f for those with
      more than beta_fast, between them a mean that is linear in i
    - longrope (Ding et al. 2024): f / short_i, and f / long_i in texts longer than `length` (`long`)
    - divisors: f / divisors_i, as in GGUF's rope_freqs

    Each operation is rounded to float32, in the order of transformers 5.24.
    """
    scaling, base = config.rotary_scaling, config.rotary_base
    kind, factor = scaling.get("kind"), np.float32(scaling.get("factor", 1))
    pair = np.arange(0, config.turned, 2, dtype=np.float32)
    power = (base ** (pair / np.float32(config.turned)).astype(np.float64)).astype(np.float32)  # exactly rounded
    one = np.float32(1)
    plain = one / power
    if kind in ("longrope", "divisors"):
        name = "divisors" if kind == "divisors" else "long" if long else "short"
        return one / (np.array(scaling[name], np.float32) * power)
    if kind == "llama3":
        low, high, length = (scaling[name] for name in ("low", "high", "length"))
        wavelength = np.float32(2 * np.pi) / plain
        share = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
        mean = (one - share) * plain / factor + share * plain
        return np.where(wavelength > length / low, plain / factor, np.where(wavelength < length / high, plain, mean))
    if kind == "yarn":
        first, last = (
            config.turned * np.log(scaling["length"] / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (scaling["beta_fast"], scaling["beta_slow"])
        )
        if scaling["truncate"]:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, config.turned - 1)
        last += 0.001 if first == last else 0
        index = np.arange(config.turned // 2, dtype=np.float32)
        ramp = np.clip((index - np.float32(first)) / np.float32(last - first), 0, 1).astype(np.float32)
        own = one - ramp
        return (one / (factor * power) * (one - own) + plain * own).astype(np.float32, copy=False)
    return plain / factor


def rotation_of(layer: TransformerConfig) -> tuple[Any, ...] | None:
    """The values that a layer's rotation depends on; None without rotary positions."""
    return (layer.rotary_base, layer.turned, layer.rotary_scaling) if layer.positions == "rotary" else None


def long_from(layer: TransformerConfig) -> int | None:
    """The first position that makes a row long: it is then turned by the frequencies `long` of longrope. None: none.

    As in transformers, a run chooses by its last position, and cached keys stay as they were turned; a search reads its
    rows again there (`decoding/steps.py`). In transformers the longest row of a batch chooses for all, here each row
    for itself.
    """
    scaling = layer.rotary_scaling
    return int(scaling["length"]) if scaling.get("kind") == "longrope" else None


def borders(config: TransformerConfig) -> set[int]:
    """The first positions of long rows (`long_from`) in any layer of a decoder."""
    return {begin for layer in config.layers("decoder") if (begin := long_from(layer)) is not None}


@lru_cache(maxsize=64)
def distinct_rotations(
    config: TransformerConfig, stack: Stack
) -> tuple[tuple[TransformerConfig, ...], tuple[int, ...]]:
    """Configs of layers with different rotations, and for each layer of the stack the index of its config.

    E.g. Gemma 3 has base 10,000 in five of six layers and 1,000,000 in the sixth: two configs and indices
    (0, 0, 0, 0, 0, 1, ...). A layer without rotary positions counts as a rotation of its own.
    """
    layers = config.layers(stack)
    rotations = [rotation_of(c) for c in layers]
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
