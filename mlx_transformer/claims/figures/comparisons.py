"""Figures of attention beside recurrent nets and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_transformer.claims import cost, recurrent

from .drawing import SERIES, canvas, heat_map, logarithmic


def growth() -> Any:
    figure, (memory, time) = canvas(2)
    n = np.array(cost.LENGTHS)
    memory.plot(n, cost.weight_bytes(), "o-", color=SERIES[0], markersize=4, label="weights of a head, slope 2")
    memory.plot(n, n * 512 * 4, "o-", color=SERIES[1], markersize=4, label="activations, slope 1")
    memory.set(title="bytes", xlabel="positions")
    logarithmic(memory, x=True)
    attended, stepped = cost.times_by_length()
    time.plot(n, 1e3 * np.array(attended), "o-", color=SERIES[0], markersize=4, label="attention")
    time.plot(n, 1e3 * np.array(stepped), "o-", color=SERIES[1], markersize=4, label="recurrent, step by step")
    time.set(title="milliseconds of CPU time, as measured here", xlabel="positions")
    logarithmic(time, x=True)
    for axes in (memory, time):
        axes.grid(True, linewidth=0.6)
        axes.set_xticks(n, [str(length) for length in n])
        axes.legend(fontsize=8, loc="upper left")
    return figure


def forgetting() -> Any:
    figure, (axes,) = canvas(width=6)
    lengths, forgotten, kept = recurrent.gradient_by_distance()
    axes.plot(lengths, kept, "o-", color=SERIES[0], markersize=4, label="self-attention")
    axes.plot(lengths, forgotten, "o-", color=SERIES[1], markersize=4, label="recurrent")
    axes.grid(True, linewidth=0.6)
    axes.set(title="gradient of the last output by the first input", xlabel="positions")
    logarithmic(axes)
    axes.legend(loc="lower left")
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
