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

from .drawing import Table, canvas, curves, heat_map, logarithmic
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
    """(n, n): norm of the gradient of a random projection of output i by input j, a block of the Jacobian (the table of
    all derivatives)."""
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
    return np.array(LENGTHS, dtype=np.float64), by_distance(recurrent), by_distance(self_attention)


def _last_by_first(network: Network, n: int) -> float:
    x, direction = mx.random.normal((1, n, WIDTH)), mx.random.normal((WIDTH,))
    gradient = mx.grad(lambda x: mx.sum(network(x)[0, -1] * direction))(x)
    return float(np.linalg.norm(np.array(gradient[0, 0], dtype=np.float64)))  # float32's squares vanish


def path_lengths() -> Found:
    whole = sensitivity(self_attention())
    return {
        "outputs that don't depend on an input, one layer of self-attention, 16 positions": int(np.sum(whole == 0)),
        "layers until the last output hears the first input: self-attention": 1 if whole[-1, 0] > 0 else 2,
        "recurrent, in steps": recurrent_steps(),
        "dilated convolutions of two": layers_needed(dilated=True),
        "convolutions of two neighbours": layers_needed(dilated=False),
        **{
            f"million products over {n} positions of 512: attention, recurrent, convolution of 3": [
                products / 1e6 for products in layer_products(n)
            ]
            for n in (100, 1024)
        },
    }


def layer_products(n: int, d_model: int = 512) -> tuple[int, int, int]:
    """Of table 1 of the paper, from the arrays: Q K^T and the sum of values; W x and U h; a convolution of three."""
    attention = 2 * n * d_model * n  # scores (n, n) over d_model each, values (n, d_model) over n each
    recurrent = sum(matrix.size for matrix in (nn.RNN(d_model, d_model).Wxh, nn.RNN(d_model, d_model).Whh))
    return attention, n * recurrent, n * nn.Conv1d(d_model, d_model, 3).weight.size


@lru_cache
def layers_needed(dilated: bool) -> int:
    """The fewest convolutions by which output `WORDS` depends on input 1."""
    return next(n for n in range(1, WORDS + 1) if _last_by_first(convolutions(n, dilated), WORDS) > 0)


def recurrent_steps() -> int:
    """Cells on the way from input 1 to output `WORDS`: those whose state changes when the first input does."""
    network = recurrent()
    x = mx.random.normal((1, WORDS, WIDTH))
    return how_many(mx.any(network(x)[0] != network(x.at[:, 0].add(1.0))[0], axis=-1))


CELLS: dict[str, Callable[[int, int], Any]] = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def cell(name: str, seed: int = 0) -> Network:
    """A layer of one of `CELLS` with fresh weights."""
    mx.random.seed(seed)
    layer = CELLS[name](WIDTH, WIDTH)

    def network(x: mx.array) -> mx.array:
        y = layer(x)
        return y[0] if isinstance(y, tuple) else y  # an LSTM also gives its cells

    return network


def grown(factor: float, squashed: bool = True, seed: int = 0) -> Network:
    """A recurrent net whose U is so many times as large; without tanh unless `squashed`."""
    mx.random.seed(seed)
    layer = nn.RNN(WIDTH, WIDTH, nonlinearity=mx.tanh if squashed else lambda x: x)
    layer.Whh = factor * layer.Whh
    return layer


def keeping_order() -> Found:
    changes = {name: reordered_outputs(cell(name)) for name in CELLS}
    found: dict[str, Any] = {
        f"lion, kills, deer to deer, kills, lion: change of each word's output, {name}": change
        for name, change in changes.items()
    }
    return {**found, "the same, self-attention": reordered_outputs(self_attention())}


def reordered_outputs(network: Network) -> list[float]:
    """Largest change of each of three words' outputs when the first and the last change places."""
    mx.random.seed(5)
    x, order = mx.random.normal((1, 3, WIDTH)), mx.array([2, 1, 0])
    return np.array(mx.abs(network(x[:, order])[0, order] - network(x)[0]).max(axis=-1)).tolist()


EXPLODING: dict[str, Callable[[int], Network]] = {
    "U": lambda seed: grown(1, seed=seed),
    "2 U": lambda seed: grown(2, seed=seed),
    "3 U": lambda seed: grown(3, seed=seed),
    "4 U": lambda seed: grown(4, seed=seed),
    "3 U without tanh": lambda seed: grown(3, squashed=False, seed=seed),
    "LSTM": lambda seed: cell("LSTM", seed),
    "GRU": lambda seed: cell("GRU", seed),
    "self-attention": self_attention,
}


def exploding() -> Found:
    ratios = {name: by_length[-1] / by_length[0] for name, by_length in all_gradients().items()}
    return {f"gradient over 64 positions / over 4, {name}": ratio for name, ratio in ratios.items()}


@lru_cache
def all_gradients() -> dict[str, np.ndarray]:
    """By the names of `EXPLODING`, the norm of the gradient of the last output by the first input at `LENGTHS`."""
    return {name: by_distance(make) for name, make in EXPLODING.items()}


def by_distance(make: Callable[[int], Network]) -> np.ndarray:
    """Geometric mean of four seeds, at `LENGTHS`."""
    return np.exp(np.mean([[math.log(_last_by_first(make(s), n)) for s in range(4)] for n in LENGTHS], axis=1))


def list_keeping_order() -> Table:
    networks = {**{name: cell(name) for name in CELLS}, "self-attention": self_attention()}
    rows = tuple((name, *(f"{change:.2g}" for change in reordered_outputs(net))) for name, net in networks.items())
    return Table(("change of a word's output", "lion", "kills", "deer"), rows)


def draw_exploding() -> Any:
    figure, (left, right) = canvas(2, width=8.2)
    gradients = all_gradients()
    curves(left, LENGTHS, {name: gradients[name] for name in ("U", "2 U", "3 U", "4 U")}, "lower left", 8)
    left.set(title="a recurrent net, U as drawn and larger", xlabel="positions")
    curves(right, LENGTHS, {n: gradients[n] for n in ("3 U without tanh", "LSTM", "GRU", "self-attention")}, "best", 8)
    right.set(title="without tanh, with gates, and attention", xlabel="positions")
    for axes in (left, right):
        logarithmic(axes)
    return figure


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
        "A recurrent net forgets step by step: at each, the gradient of the first word falls by a factor.",
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
            "outputs that don't depend on an input, one layer of self-attention, 16 positions": equal(0),
            "layers until the last output hears the first input: self-attention": equal(1),
            "recurrent, in steps": equal(16),
            "dilated convolutions of two": equal(4),
            "convolutions of two neighbours": equal(15),
            "million products over 100 positions of 512: attention, recurrent, convolution of 3": equal(
                10.2, 52.4, 78.6, within=0.05
            ),
            "million products over 1024 positions of 512: attention, recurrent, convolution of 3": equal(
                1074, 537, 805, within=0.5
            ),
        },
        path_lengths,
        (EncoderLayer, sensitivity),
        ("claims/test_beside.py::test_blocks_of_the_jacobian_that_must_be_zero_are",),
        figure=draw_path_lengths,
    ),
    Row(
        46,
        "A recurrent net keeps the order of words by itself; self-attention has to be told.",
        "h_t depends on x_1 ... x_t in their order",
        {
            **{
                f"lion, kills, deer to deer, kills, lion: change of each word's output, {name}": above(0.1, 0.1, 0.1)
                for name in CELLS
            },
            "the same, self-attention": below(1e-5, 1e-5, 1e-5),
        },
        keeping_order,
        (cell, EncoderLayer),
        ("claims/test_beside.py::test_a_net_that_sees_no_order_would_be_seen",),
        table=list_keeping_order,
    ),
    Row(
        48,
        "Through a recurrent net gradients vanish, or explode: it depends on the size of U. Gates forget more slowly.",
        "∂h_t / ∂h_(t-k) = Π diag(1 - h^2) U",
        {
            "gradient over 64 positions / over 4, U": below(1e-12),
            "gradient over 64 positions / over 4, 2 U": below(1e-3),
            "gradient over 64 positions / over 4, 3 U": above(1e-2),
            "gradient over 64 positions / over 4, 4 U": above(100),
            "gradient over 64 positions / over 4, 3 U without tanh": above(1e10),
            "gradient over 64 positions / over 4, LSTM": below(1e-6),
            "gradient over 64 positions / over 4, GRU": below(1e-6),
            "gradient over 64 positions / over 4, self-attention": above(0.01),
        },
        exploding,
        (grown, cell),
        ("claims/test_beside.py::test_only_a_larger_u_explodes",),
        figure=draw_exploding,
    ),
)
