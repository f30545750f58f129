"""A small recurrent net (Elman 1990, of MLX) and convolutions beside attention: how far a gradient reaches, and over
how many layers or steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.layers import EncoderLayer

from .drawing import canvas, curves, heat_map, logarithmic
from .measure import how_many
from .row import Found, Row, above, below, equal

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


def draw_forgetting() -> Any:
    figure, (axes,) = canvas(width=6)
    lengths, forgotten, kept = gradient_by_distance()
    curves(axes, lengths, {"self-attention": kept, "recurrent": forgotten})
    axes.set(title="gradient of the last output by the first input", xlabel="positions")
    logarithmic(axes)
    return figure


def draw_path_lengths() -> Any:
    """Which output hears which input: the blocks of the Jacobian that are not zero."""
    figure, panels = canvas(4, width=7.6, height=2.4)
    layers = layers_needed(dilated=True)
    shown = {
        "self-attention\n1 layer": self_attention(),
        "recurrent\n16 steps": recurrent(),
        f"dilated convolutions\n{layers} layers": convolutions(layers, dilated=True),
        f"convolutions\n{layers} of {layers_needed(dilated=False)} layers": convolutions(layers, dilated=False),
    }
    for axes, (title, network) in zip(panels, shown.items(), strict=True):
        size = sensitivity(network)
        heard = np.log10(np.maximum(size, 1e-12)) + 12
        heat_map(axes, np.where(size > 0, heard, 0), most=12.0, aspect="equal")
        axes.set(title=title, xticks=[], yticks=[], xlabel="input")
    panels[0].set_ylabel("output")
    return figure


ROWS = (
    Row(
        33,
        "A recurrent net goes step by step and forgets: what reaches the first word falls geometrically.",
        "h_t = tanh(W x_t + U h_(t-1) + b)",
        {
            "gradient over 64 positions / over 4, recurrent": below(1e-12),
            "the same, attention": above(0.01),
            "what a step leaves of it, recurrent: 4 to 8, to 16, to 32, to 64": equal(*[0.44] * 4, within=0.03),
        },
        forgetting,
        (recurrent, EncoderLayer),
        ("claims/test_beside.py::test_a_net_that_forgets_nothing_would_be_seen",),
        figure=draw_forgetting,
    ),
    Row(
        34,
        "The longest way between two positions: one layer of self-attention, n recurrent steps, log n convolutions.",
        "1; n; log_2 n dilated; n - 1 of neighbours (table 1 of the paper: O(1), O(n), O(log_k n), O(n/k))",
        {
            "blocks of the Jacobian that are zero, one layer of self-attention, 16 positions": equal(0),
            "layers until the last output hears the first input: self-attention": equal(1),
            "recurrent, in steps": equal(16),
            "dilated convolutions of two": equal(4),
            "convolutions of two neighbours": equal(15),
        },
        path_lengths,
        (EncoderLayer, sensitivity),
        ("claims/test_beside.py::test_blocks_of_the_jacobian_that_must_be_zero_are",),
        figure=draw_path_lengths,
    ),
)
