"""Figures of attention beside recurrent nets and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from claims import cost, recurrent

from .drawing import canvas, curves, heat_map, logarithmic


def growth() -> Any:
    figure, (memory, time) = canvas(2)
    n = np.array(cost.LENGTHS)
    attended, stepped = cost.times_by_length()
    held = {"weights of a head, slope 2": cost.weight_bytes(), "activations, slope 1": n * 512 * 4}
    spent = {"attention": 1e3 * np.array(attended), "recurrent, step by step": 1e3 * np.array(stepped)}
    for axes, values, title in (
        (memory, held, "bytes"),
        (time, spent, "milliseconds of CPU time, as measured here"),
    ):
        curves(axes, n, values, "upper left", 8)
        axes.set(title=title, xlabel="positions")
        logarithmic(axes, x=True)
        axes.set_xticks(n, [str(length) for length in n])
    return figure


def forgetting() -> Any:
    figure, (axes,) = canvas(width=6)
    lengths, forgotten, kept = recurrent.gradient_by_distance()
    curves(axes, lengths, {"self-attention": kept, "recurrent": forgotten})
    axes.set(title="gradient of the last output by the first input", xlabel="positions")
    logarithmic(axes)
    return figure


def path_lengths() -> Any:
    """Which output hears which input: the blocks of the Jacobian that are not zero."""
    figure, panels = canvas(4, width=7.6, height=2.4)
    layers = recurrent.layers_needed(dilated=True)
    shown = {
        "self-attention\n1 layer": recurrent.self_attention(),
        "recurrent\n16 steps": recurrent.recurrent(),
        f"dilated convolutions\n{layers} layers": recurrent.convolutions(layers, dilated=True),
        f"convolutions\n{layers} of {recurrent.layers_needed(dilated=False)} layers": recurrent.convolutions(
            layers, dilated=False
        ),
    }
    for axes, (title, network) in zip(panels, shown.items(), strict=True):
        size = recurrent.sensitivity(network)
        heard = np.log10(np.maximum(size, 1e-12)) + 12
        heat_map(axes, np.where(size > 0, heard, 0), most=12.0, aspect="equal")
        axes.set(title=title, xticks=[], yticks=[], xlabel="input")
    panels[0].set_ylabel("output")
    return figure
