"""Figures of the rows about norms, residual connections and contextual vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from mlx import nn

from mlx_transformer.claims import depth, network, norms
from mlx_transformer.nn.norms import LayerNorm

from .drawing import canvas, curves, heat_map, logarithmic


def residuals() -> Any:
    """Both with the four variants: what tells positions apart, and the gradient."""
    figure, (apart, gradient) = canvas(2, width=8.2)
    curves(apart, depth.DEPTHS, depth.told_apart())
    apart.set(title="share of the output that tells positions apart", xlabel="layers")
    curves(gradient, depth.DEPTHS, depth.gradients_by_depth(), "upper left")
    gradient.set(title="norm of the gradient at the input", xlabel="layers")
    for axes in (apart, gradient):
        logarithmic(axes)
    return figure


def normalised_together() -> Any:
    """Which numbers share a mean and a variance, and what another batch changes of a sample's first position."""
    figure, panels = canvas(4, width=7.6, height=2.6)
    for place, norm, name, mark in (
        (0, LayerNorm(16, norms.EPSILON), "layer norm", (0, slice(None))),
        (2, nn.BatchNorm(16), "batch norm", (slice(None), 0)),
    ):
        shared, strips = panels[place : place + 2]
        together = np.zeros((6, 16))
        together[mark] = 1.0
        heat_map(shared, together, most=1.4)
        shared.set(title=f"{name}: one mean", xlabel="features", ylabel="positions", xticks=[], yticks=[])
        outputs = [np.array(each) for each in norms.among_mates(norm)]
        heat_map(strips, np.stack([each[0] for each in outputs]), signed=True)
        strips.set(title=f"its change: {np.abs(outputs[0] - outputs[1]).max():.2g}", xticks=[])
        strips.set_yticks([0, 1], ["batch", "other"], fontsize=8)
    return figure


def contextual() -> Any:
    """The word bank in two sentences, before the encoder and after it."""
    figure, panels = canvas(2, height=2.0)
    for axes, rows, title in zip(panels, network.bank(), ("embedding + position", "encoder's output"), strict=True):
        heat_map(axes, rows, signed=True)
        axes.set(title=f"{title}: change {np.abs(rows[0] - rows[1]).max():.2g}", xticks=[], xlabel="features")
        axes.set_yticks([0, 1], ["river bank", "city bank"], fontsize=8)
    return figure
