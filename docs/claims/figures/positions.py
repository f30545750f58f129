"""Figures of the rows about positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from claims import position_study as study
from claims import positions
from mlx_transformer.core.positions import sinusoids

from .drawing import INK, LINE, SERIES, canvas, heat_map, logarithmic, write_cells


def heat_maps() -> Any:
    """Both variants: 80 positions of 64 features."""
    figure, panels = canvas(2, height=3.0)
    for axes, (kind, title) in zip(
        panels,
        {"sinusoidal": "pairs side by side (paper)", "sinusoidal_concat": "halves (tensor2tensor)"}.items(),
        strict=True,
    ):
        heat_map(axes, positions.added(80, 64, kind), signed=True, most=1.0)
        axes.set(title=title, xlabel="feature", ylabel="position")
    return figure


def rejected() -> Any:
    """The simpler codes: growth, one step, and the distance of positions that lie `gap` apart."""
    figure, (growth, step, distance) = canvas(3, width=8.6, height=3.2)
    n = np.arange(1, 1001)
    growth.plot(n, study.append_position(np.zeros((1000, 1)))[:, -1], color=SERIES[1], label="position itself")
    growth.plot(n[::25], np.abs(positions.added(1000)).max(axis=1)[::25], color=SERIES[0], label="sinusoids")
    growth.set(title="largest feature", xlabel="position")
    logarithmic(growth)
    for y, words in enumerate((5, 9)):
        places = study.normalised_positions(words)
        step.plot(places, np.full(words, y), "o-", color=SERIES[y], markersize=4, linewidth=1)
        step.text(0.5, y + 0.14, f"{words} words: a step is {places[1]:g}", ha="center", fontsize=8)
    step.set(title="positions scaled to 0..1", yticks=[], ylim=(-0.4, 1.6))
    for axes in (growth, distance):
        axes.grid(True, linewidth=0.6)
    gaps = np.arange(1, 1501)
    p = np.arange(100)[:, None]
    codes = {
        "one sine": np.min(np.abs(study.single_sine(p + gaps) - study.single_sine(p))[..., 0], axis=0),
        "one pair": np.linalg.norm(study.sine_cosine(gaps, 1.0) - study.sine_cosine(0, 1.0), axis=-1),
        "two pairs": np.linalg.norm(study.sine_cosine(gaps, 1.0, 0.5) - study.sine_cosine(0, 1.0, 0.5), axis=-1),
        "512 features": np.array([study.offset_distance(512, int(gap)) for gap in gaps]),
    }
    for (label, values), colour in zip(codes.items(), (SERIES[1], SERIES[2], SERIES[3], SERIES[0]), strict=True):
        lowest = values.reshape(-1, 10).min(axis=1)  # of ten gaps: the dips are what matters
        distance.plot(gaps[::10] + 5, lowest, color=colour, linewidth=1.1, label=label)
    distance.set(title="smallest distance by gap", xlabel="gap")
    logarithmic(distance)
    growth.legend(fontsize=7.5, loc="center right")
    distance.set_ylim(1e-10, 100)
    distance.legend(fontsize=7.5, loc="lower center", ncols=2, handlelength=1.2)
    return figure


def dot_products() -> Any:
    figure, (axes,) = canvas(height=2.8, width=6)
    values = positions.products(121)
    axes.plot(range(121), values, color=SERIES[0], linewidth=1.4)
    axes.plot(range(4), values[:4], "o", color=SERIES[1], markersize=4)
    for k in range(4):
        axes.annotate(
            f"{values[k]:.2f}", (k, values[k]), (k + 4, values[k] + (5, -1, 0, 0)[k]), fontsize=8, va="center"
        )
    axes.grid(True, linewidth=0.6)
    axes.set(title="PE(t) · PE(t+k), the same for every t, d = 512", xlabel="k")
    return figure


def rotation() -> Any:
    """The same offset from two positions, for three pairs of features."""
    figure, panels = canvas(3, height=2.8)
    pe, offset = sinusoids(40, 512, dtype=np.float64), 4
    for axes, j in zip(panels, (0, 32, 96), strict=True):
        circle = np.linspace(0, 2 * np.pi, 100)
        axes.plot(np.cos(circle), np.sin(circle), color=LINE, linewidth=1)
        angle = offset * study.frequencies(512)[j]
        for t, colour in ((1, SERIES[0]), (12, SERIES[1])):
            start, end = pe[t, 2 * j : 2 * j + 2], pe[t + offset, 2 * j : 2 * j + 2]
            arc = [study.sine_cosine(s, study.frequencies(512)[j]) for s in np.linspace(t, t + offset, 60)]
            axes.plot(*np.array(arc).T, color=colour, linewidth=2)
            for place, point in ((t, start), (t + offset, end)):
                axes.plot([0, point[0]], [0, point[1]], color=colour, linewidth=0.8)
                axes.text(*(1.18 * point), str(place), ha="center", va="center", fontsize=8, color=INK)
        axes.set(
            title=f"pair {j}: {offset} steps = {angle:.3g} rad", aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.4, 1.4)
        )
        axes.axis("off")
    return figure


def counter() -> Any:
    figure, (bits, waves) = canvas(2, height=3.2)
    digits = np.array([list(map(int, row)) for row in study.counter_bits(3)])
    heat_map(bits, digits, most=1.6)
    write_cells(bits, digits.astype(str).tolist(), 9)
    bits.set(title="a counter: the last digit is the fastest", xticks=[], ylabel="value")
    heat_map(waves, sinusoids(33, 16, dtype=np.float64)[:, 0::2], signed=True, most=1.0)
    waves.set(title="sines of 16 features: the first is the fastest", xlabel="frequency", ylabel="position")
    return figure


def raw_gradients() -> Any:
    figure, (axes,) = canvas(height=2.8, width=6)
    raw, coded = positions.gradient_by_position()
    at = np.unique(np.geomspace(1, 1000, 60).astype(int))
    axes.plot(at, raw[at - 1], color=SERIES[1], label="raw position as one feature")
    axes.plot(at, coded[at - 1], color=SERIES[0], label="512 sinusoids")
    axes.grid(True, linewidth=0.6)
    axes.set(title="norm of the gradient of a projection", xlabel="position")
    logarithmic(axes, x=True)
    axes.legend(loc="upper left")
    return figure
