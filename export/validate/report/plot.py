"""Error against budget along the network, as one inline SVG for each runtime.

The height of a point is the part of its budget that the worst input used up, on a logarithmic axis: the dashed line is
the budget itself. Each way through the model (one full pass, cached passes) is a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from export.validate.findings import Point

WIDTH, HEIGHT = 1000, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 16, 92
COLOURS = 4
LOWEST = 0.01


def colour(index: int) -> str:
    return f"var(--s{index % COLOURS})"


def plot(points: Sequence[Point], taps: Sequence[str]) -> str:
    """`points` of one runtime, `taps` in the order of the data."""
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
    for i, path in enumerate(dict.fromkeys(p.path for p in points)):
        parts += _series([p for p in points if p.path == path], x, y, colour(i))
    every = max(1, math.ceil(len(taps) / 60))
    for tap in taps[::every]:
        place = f"{x(tap):.1f}"
        parts.append(
            f'<text x="{place}" y="{HEIGHT - BOTTOM + 14}" text-anchor="end" '
            f'transform="rotate(-42 {place} {HEIGHT - BOTTOM + 14})">{escape(short(tap))}</text>'
        )
    return "".join([*parts, "</svg>"])


def short(tap: str) -> str:
    """encoder.layers.0.self_attention -> enc 0 self-attention"""
    words = tap.replace(".layers.", " ").replace("encoder", "enc").replace("decoder", "dec")
    return words.replace(".", " ").replace("_", "-")


def _series(points: Sequence[Point], x, y, shade: str) -> list[str]:
    line = " ".join(f"{x(p.tap):.1f},{y(p.worst.share):.1f}" for p in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="1.6" opacity="0.75"/>']
    for p in points:
        m = p.worst
        ratios = "bits equal" if m.deviation.same_bits else f"rms {m.rms_ratio:.3g}, max {m.max_ratio:.3g}"
        title = f"{p.tap} ({p.path}): {m.deviation.detail or ratios}; {m.share:.3g} of the budget, on {p.case}"
        style = f'fill="{shade}"' if p.passed else 'class="over"'
        parts.append(
            f'<circle cx="{x(p.tap):.1f}" cy="{y(m.share):.1f}" r="{3.4 if p.passed else 5}" {style}>'
            f"<title>{escape(title)}</title></circle>"
        )
    return parts
