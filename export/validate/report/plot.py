"""Error against budget along the network, as one inline SVG for each runtime.

The height of a point is the part of its budget that the worst input used up, on a logarithmic axis: the dashed line is
the budget itself. Each way through the model (one full pass, cached passes) is a line of its own, unless it can't be
told from another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from export.validate.findings import Point
from mlx_transformer.system.chart import colour

WIDTH, HEIGHT = 1000, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 16, 92
LOWEST = 0.01
SAME = 1.04  # times as high: two pixels where an axis has two decades
ASIDE = 7.0  # between the dots of two lines at the same point
WIDEST, NARROWEST = 6.0, 1.6


@dataclass(frozen=True)
class Series:
    """A line: the points of one way through the model, and the names of all ways that have these heights."""

    index: int
    paths: tuple[str, ...]
    points: Sequence[Point]


def series_of(points: Sequence[Point], paths: Sequence[str]) -> list[Series]:
    """Return the lines of one runtime's `points`; `paths` are those of all runtimes, so that each has the same colour
    everywhere."""
    series: list[Series] = []
    for index, path in enumerate(paths):
        own = [p for p in points if p.path == path]
        known = next((i for i, s in enumerate(series) if _same_line(s.points, own)), None)
        if known is not None:
            series[known] = Series(series[known].index, (*series[known].paths, path), series[known].points)
        elif own:
            series.append(Series(index, (path,), own))
    return series


def _same_line(a: Sequence[Point], b: Sequence[Point]) -> bool:
    if not b or [(p.tap, p.passed) for p in a] != [(p.tap, p.passed) for p in b]:
        return False
    heights = [sorted(max(p.worst.share, LOWEST) for p in pair) for pair in zip(a, b, strict=True)]
    return all(low == high or low * SAME >= high for low, high in heights)


def plot(series: Sequence[Series], taps: Sequence[str]) -> str:
    """Draw the lines of one runtime, `taps` in the order of the data."""
    points = [p for s in series for p in s.points]
    column = {tap: i for i, tap in enumerate(taps)}
    shares = [p.worst.share for p in points if math.isfinite(p.worst.share)]
    top = 10 ** math.ceil(math.log10(max([*shares, 1.0]) * 1.5))
    finite = [share for share in shares if share > 0]
    low = max(LOWEST, 10 ** math.floor(math.log10(min([*finite, 0.1]))))
    step = (WIDTH - LEFT - RIGHT) / max(len(taps), 1)

    def x(tap: str) -> float:
        return LEFT + (column[tap] + 0.5) * step

    def y(share: float) -> float:
        part = math.log10(min(max(share, low), top) / low) / math.log10(top / low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error against budget along the network">']
    for i, tap in enumerate(taps):
        if tap.startswith("decoder."):
            parts.append(
                f'<rect class="stack" x="{LEFT + i * step:.1f}" y="{TOP}" width="{step:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"/>'
            )
    for k in range(round(math.log10(low)), round(math.log10(top)) + 1):
        level = 10.0**k
        css = "budget" if k == 0 else "grid"
        parts.append(f'<line class="{css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        word = "budget" if k == 0 else f"{level:g}"
        style = ' class="budget-word"' if k == 0 else ""
        parts.append(f'<text{style} x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{word}</text>')
    parts += _lines(series, x, y)
    at: dict[str, list[int]] = {tap: [s.index for s in series if any(p.tap == tap for p in s.points)] for tap in taps}
    for s in series:
        # Dots of the same point stand side by side, else the last would be the only one to be seen and pointed at.
        apart = {tap: min(ASIDE, step / (len(at[tap]) + 1)) for tap in taps}
        offsets = {p.tap: (at[p.tap].index(s.index) - (len(at[p.tap]) - 1) / 2) * apart[p.tap] for p in s.points}
        parts += [_dot(p, ", ".join(s.paths), x(p.tap) + offsets[p.tap], y(p.worst.share), s.index) for p in s.points]
    every = max(1, math.ceil(len(taps) / 60))
    for tap in taps[::every]:
        place = f"{x(tap):.1f}"
        parts.append(
            f'<text x="{place}" y="{HEIGHT - BOTTOM + 14}" text-anchor="end" '
            f'transform="rotate(-42 {place} {HEIGHT - BOTTOM + 14})">{escape(short(tap))}</text>'
        )
    return "".join([*parts, "</svg>"])


def short(tap: str) -> str:
    """Shorten a name: encoder.layers.0.self_attention -> enc 0 self-attention."""
    words = tap.replace(".layers.", " ").replace("encoder", "enc").replace("decoder", "dec")
    return words.replace(".", " ").replace("_", "-")


def _lines(series: Sequence[Series], x: Callable[[str], float], y: Callable[[float], float]) -> list[str]:
    """Draw each line narrower than those it is drawn over: where they run together, all can be seen."""
    long = [s for s in series if len(s.points) > 1]
    parts = []
    for place, s in enumerate(long):
        width = NARROWEST + (WIDEST - NARROWEST) * (len(long) - 1 - place) / max(3, len(long) - 1)
        line = " ".join(f"{x(p.tap):.1f},{y(p.worst.share):.1f}" for p in s.points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour(s.index)}" stroke-width="{width:.1f}" '
            'stroke-linejoin="round" opacity="0.75"/>'
        )
    return parts


def _dot(p: Point, paths: str, x: float, y: float, index: int) -> str:
    m = p.worst
    ratios = "bits equal" if m.deviation.same_bits else f"rms {m.rms_ratio:.3g}, max {m.max_ratio:.3g}"
    title = f"{p.tap} ({paths}): {m.deviation.detail or ratios}; {m.share:.3g} of the budget, on {p.case}"
    # One over budget is red, with a rim of its line's colour.
    style = f'fill="{colour(index)}"' if p.passed else f'class="over" style="stroke:{colour(index)}"'
    radius = 3.4 if p.passed else 4.4
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}><title>{escape(title)}</title></circle>'
