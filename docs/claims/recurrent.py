"""A small recurrent net (Elman 1990, of MLX) and convolutions beside attention: how far a gradient reaches, and over
how many layers or steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.layers import EncoderLayer

from .measure import how_many
from .row import Found

WIDTH = 32
LENGTHS = (4, 8, 16, 32, 64)
WORDS = 16
"""Positions of the pictures and of the path lengths."""

Network = Callable[[mx.array], mx.array]
"""(1, n, WIDTH) -> (1, n, WIDTH)."""


def self_attention(seed: int = 0) -> Network:
    """One encoder layer of the package."""
    mx.random.seed(seed)
    return EncoderLayer(TransformerConfig(vocab_size=8, d_model=WIDTH, heads=4, d_ff=64, dropout=0.0))


def recurrent(seed: int = 0) -> Network:
    """h_t = tanh(W x_t + U h_(t-1) + b)"""
    mx.random.seed(seed)
    return nn.RNN(WIDTH, WIDTH)


def convolutions(layers: int, dilated: bool, seed: int = 0) -> Network:
    """`layers` causal convolutions over two positions each: neighbours, or 1, 2, 4, ... apart."""
    mx.random.seed(seed)
    apart = [2**i if dilated else 1 for i in range(layers)]
    maps = [nn.Linear(2 * WIDTH, WIDTH) for _ in apart]

    def network(x: mx.array) -> mx.array:
        for distance, linear in zip(apart, maps, strict=True):
            before = mx.pad(x, [(0, 0), (distance, 0), (0, 0)])[:, : x.shape[1]]
            x = mx.tanh(linear(mx.concatenate([before, x], axis=-1)))
        return x

    return network


def sensitivity(network: Network, n: int = WORDS) -> np.ndarray:
    """(n, n): norm of the gradient of a random projection of output i by input j, a block of the Jacobian."""
    mx.random.seed(7)
    x, direction = mx.random.normal((1, n, WIDTH)), mx.random.normal((WIDTH,))
    rows = []
    for i in range(n):

        def output(x: mx.array, i: int = i) -> mx.array:
            return mx.sum(network(x)[0, i] * direction)

        rows.append(mx.linalg.norm(mx.grad(output)(x)[0], axis=-1))
    return np.array(mx.stack(rows), dtype=np.float64)


def forgetting() -> Found:
    lengths, forgotten, kept = gradient_by_distance()
    steps = -np.diff(np.log(forgotten)) / np.diff(lengths)
    return {
        "gradient over 64 positions / over 4, recurrent": forgotten[-1] / forgotten[0],
        "the same, attention": kept[-1] / kept[0],
        "what a step leaves of it, recurrent: 4 to 8, to 16, to 32, to 64": np.exp(-steps).tolist(),
    }


@lru_cache
def gradient_by_distance() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions n, and the norm of the gradient of output n by input 1: recurrent, attention; geometric mean of four
    seeds."""
    found = []
    for make in (recurrent, self_attention):
        logs = [[math.log(_last_by_first(make(seed), n)) for seed in range(4)] for n in LENGTHS]
        found.append(np.exp(np.mean(logs, axis=1)))
    return np.array(LENGTHS, dtype=np.float64), found[0], found[1]


def _last_by_first(network: Network, n: int) -> float:
    x, direction = mx.random.normal((1, n, WIDTH)), mx.random.normal((WIDTH,))
    gradient = mx.grad(lambda x: mx.sum(network(x)[0, -1] * direction))(x)
    return float(np.linalg.norm(np.array(gradient[0, 0], dtype=np.float64)))  # float32's squares vanish


def path_lengths() -> Found:
    whole = sensitivity(self_attention())
    return {
        "blocks of the Jacobian that are zero, one layer of self-attention, 16 positions": int(np.sum(whole == 0)),
        "layers until the last output hears the first input: self-attention": 1 if whole[-1, 0] > 0 else 2,
        "recurrent, in steps": recurrent_steps(),
        "dilated convolutions of two": layers_needed(dilated=True),
        "convolutions of two neighbours": layers_needed(dilated=False),
    }


@lru_cache
def layers_needed(dilated: bool) -> int:
    """The fewest convolutions by which output `WORDS` depends on input 1."""
    return next(n for n in range(1, WORDS + 1) if _last_by_first(convolutions(n, dilated), WORDS) > 0)


def recurrent_steps() -> int:
    """Cells on the way from input 1 to output `WORDS`: those whose state changes when the first input does."""
    network = recurrent()
    x = mx.random.normal((1, WORDS, WIDTH))
    return how_many(mx.any(network(x)[0] != network(x.at[:, 0].add(1.0))[0], axis=-1))
