"""Line charts as inline SVG, e.g. the loss of several runs by step. Hovering over a point shows its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Curve = list[tuple[int, float]]
"""(step, value), steps ascending."""

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 26
COLOURS = 8
MOST_POINTS = 400  # of a curve: the plot is about as many pixels wide


def colour(index: int) -> str:
    return f"var(--s{index % COLOURS})"


def figure(title: str, curves: Sequence[tuple[int, str, Curve]], logarithmic: bool = False, unit: str = "step") -> str:
    """Draw curves in one chart, in a <figure> with a title.

    curves: (index of the colour, name, points). logarithmic: ignored unless all values are above 0. unit: of the
    horizontal axis, e.g. "step".
    """
    drawn = [(index, name, thinned(curve)) for index, name, curve in curves if curve]
    values = [value for _, _, curve in drawn for _, value in curve]
    logarithmic = logarithmic and min(values) > 0
    scale = math.log10 if logarithmic else float
    low, high = min(map(scale, values)), max(map(scale, values))
    low, high = _apart(low, high)
    last = max(step for _, _, curve in drawn for step, _ in curve)
    first = min(step for _, _, curve in drawn for step, _ in curve)

    def x(step: int) -> float:
        return LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in _ticks(low, high, logarithmic):
        place = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for step, anchor in ((first, "start"), (last, "end"))[: 1 if first == last else 2]:
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,}</text>')
    for index, name, curve in drawn:
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline fill="none" stroke="{colour(index)}" stroke-width="1.6" points="{line}"/>')
        kind = "dot" if len(curve) > 1 else "alone"  # dots are invisible until hovered over
        dots = curve if len(curve) <= 60 else curve[:: max(1, len(curve) // 60)]
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="5" fill="{colour(index)}" class="{kind}">'
            f"<title>{escape(name)}, {unit} {step:,}: {value:.6g}</title></circle>"
            for step, value in dots
        ]
    return f'<figure class="card"><figcaption>{escape(title)}</figcaption>{"".join(parts)}</svg></figure>'


def thinned(curve: Curve) -> Curve:
    """Thin a long curve to about `MOST_POINTS` points: means of neighbours, then the last point unchanged."""
    if len(curve) <= MOST_POINTS:
        return curve
    size = math.ceil(len(curve) / MOST_POINTS)
    groups = [curve[i : i + size] for i in range(0, len(curve) - 1, size)]
    means = [(group[len(group) // 2][0], sum(value for _, value in group) / len(group)) for group in groups]
    return [*means, curve[-1]]


def _apart(low: float, high: float) -> tuple[float, float]:
    """Widen an axis whose values differ only by rounding."""
    size = max(abs(low), abs(high))
    if high - low >= max(1e-12, 1e-9 * size):
        return low, high
    margin = max(0.5, 1e-3 * size)
    return low - margin, high + margin


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if logarithmic and high - low >= 1:
        every = math.ceil((high - low) / 20)
        return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]
    if logarithmic:
        return _ticks(10.0**low, 10.0**high, False)
    span = high - low
    step = 10 ** math.floor(math.log10(span / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 4.5)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if 1e4 <= abs(value) < 1e12:
        unit, letter = next((u, s) for u, s in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= u)
        return f"{value / unit:.3g} {letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
