"""The feed-forward net: its formula, and what is left out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.feedforward import FeedForward
from mlx_transformer.nn.parameters import named_parameters

from .drawing import canvas, draw_key, heat_map
from .measure import largest, number
from .row import Found, Row, above, below, equal


def feed_forward() -> Found:
    network, x = base_feed_forward()
    found, weights = np.array(network(x), dtype=np.float64), _float64(network)
    inner = np.array(x, dtype=np.float64) @ weights["up_proj.weight"].T + weights["up_proj.bias"]
    order = mx.array([6, 2, 0, 5, 1, 3, 4])
    changed = mx.abs(network(x.at[:, 3].add(1.0)) - network(x)).max(axis=(0, 2))
    missed = {
        "an identity in place of max": formula_of_feed_forward(weights, x, activation=lambda z: z),
        "b_1 left out": formula_of_feed_forward(weights | {"up_proj.bias": np.zeros(1)}, x),
        "b_2 left out": formula_of_feed_forward(weights | {"down_proj.bias": np.zeros(1)}, x),
    }
    return {
        "parameters of the base model's, 512 to 2048 to 512": sum(weight.size for weight in weights.values()),
        "largest |FFN(x) - the formula in float64|": np.abs(found - formula_of_feed_forward(weights, x)).max(),
        **{f"the same, {name}": np.abs(found - wrong).max() for name, wrong in missed.items()},
        "share of the inner units that max sets to 0": float(np.mean(inner <= 0)),
        "largest |FFN(P x) - P FFN(x)|": largest(network(x[:, order]) - network(x)[:, order]),
        "change of the other positions, one moved by 1": largest(changed[mx.array([0, 1, 2, 4, 5, 6])]),
        "of itself": number(changed[3]),
    }


def base_feed_forward() -> tuple[FeedForward, mx.array]:
    """The net of the paper's base model, and seven positions of two sentences."""
    mx.random.seed(0)
    return FeedForward(TransformerConfig.preset("base", 8, dropout=0.0)), mx.random.normal((2, 7, 512))


def formula_of_feed_forward(
    weights: dict[str, np.ndarray], x: mx.array, activation: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """max(0, x W_1 + b_1) W_2 + b_2 in float64; weights by their names in `FeedForward`, which stores W^T."""
    inner = np.array(x, dtype=np.float64) @ weights["up_proj.weight"].T + weights["up_proj.bias"]
    inner = np.maximum(0, inner) if activation is None else activation(inner)
    return inner @ weights["down_proj.weight"].T + weights["down_proj.bias"]


def _float64(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: np.array(value, dtype=np.float64) for name, value in named_parameters(module)}


def inner_units() -> tuple[np.ndarray, np.ndarray]:
    """x W_1 + b_1 of seven positions, the first units of all (7, 96), and which share of all units is not above 0."""
    network, x = base_feed_forward()
    weights = _float64(network)
    inner = np.array(x, dtype=np.float64) @ weights["up_proj.weight"].T + weights["up_proj.bias"]
    return inner[0, :, :96], np.asarray(np.mean(inner <= 0))


def draw_inner_units() -> Any:
    """Before and after the bend."""
    inner, zero = inner_units()
    figure, panels = canvas(1, 2, width=8.4, height=3.2)
    titles = ("x W_1 + b_1, the first 96 of 2048 units", f"max(0, ·) of them; {zero:.2f} of all units are 0")
    for axes, values, title in zip(panels, (inner, np.maximum(0, inner)), titles, strict=True):
        heat_map(axes, values, signed=True, most=float(np.abs(inner).max()))
        axes.set_yticks(range(7), [f"{n}" for n in range(7)], fontsize=7)
        axes.set(title=title, xticks=[], ylabel="position")
        draw_key(axes, 1.01)
    return figure


ROWS = (
    Row(
        25,
        "The feed-forward net: wider, zero where negative, and back; on each position alone.",
        "FFN(x) = max(0, x W_1 + b_1) W_2 + b_2",
        {
            "parameters of the base model's, 512 to 2048 to 512": equal(2_099_712),
            "largest |FFN(x) - the formula in float64|": below(1e-5),
            "the same, an identity in place of max": above(0.5),
            "the same, b_1 left out": above(0.01),
            "the same, b_2 left out": above(0.01),
            "share of the inner units that max sets to 0": equal(0.5, within=0.02),
            "largest |FFN(P x) - P FFN(x)|": below(1e-6),
            "change of the other positions, one moved by 1": below(1e-6),
            "of itself": above(0.01),
        },
        feed_forward,
        (FeedForward,),
        (
            "claims/test_network.py::test_feed_forward_is_its_formula",
            "claims/test_network.py::test_feed_forward_commutes_with_permutations",
        ),
        figure=draw_inner_units,
    ),
)
