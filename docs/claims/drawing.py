"""The parts that all figures share: colours of a light and a dark page, heat maps, tables, and how they are written."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from mlx_transformer import page as kit
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs

INK, SOFT, LINE, PAPER = "#1c1f24", "#5f6773", "#d9d7d0", "#ffffff"
SERIES = ("#2f6fb5", "#c4711a", "#6b4fa8", "#2b8a7e")
PAGE_COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", PAPER: "var(--card)"} | {
    colour: f"var(--s{i})" for i, colour in enumerate(SERIES)
}
"""The words that a page has in place of each, so that it is right in the dark too."""
STYLE = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.titlesize": 9.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": LINE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "claims",
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Table:
    """A figure that is best read as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@contextmanager
def style() -> Iterator[None]:
    """Figures are made and written inside of it; a user's own settings stay. `UserError` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(f"figures need matplotlib: {needs('plots')}") from None
    settings: Any = {**matplotlib.rcParamsDefault, **STYLE}
    with matplotlib.rc_context(settings):
        yield


def curves(axes: Any, x: Any, values: Mapping[str, Any], place: Any = "lower left", size: Any = None) -> None:
    """A line with a dot at each x for each label. place: of the legend, or its lower left corner as shares of the
    panel; size: of its letters."""
    for colour, (label, y) in zip(SERIES, values.items(), strict=False):
        axes.plot(x, y, "o-", color=colour, markersize=4, label=label)
    axes.grid(True, linewidth=0.6)
    axes.legend(fontsize=size, loc=place)


def bars(axes: Any, x: Sequence[float], values: Mapping[str, Any], place: Any = "upper right") -> None:
    """A group of bars at each x, one of each label. place: of the legend."""
    width = 0.8 / len(values)
    for i, (label, y) in enumerate(values.items()):
        axes.bar(np.asarray(x) + width * (i - (len(values) - 1) / 2), y, width, color=SERIES[i], label=label)
    axes.legend(fontsize=8, loc=place)


def logarithmic(axes: Any, x: bool = False, y: bool = True) -> None:
    """Scales without a mark for every digit."""
    if x:
        axes.set_xscale("log")
    if y:
        axes.set_yscale("log")
    axes.minorticks_off()


def canvas(columns: int = 1, rows: int = 1, width: float = 7.2, height: float = 2.8) -> tuple[Any, list[Any]]:
    """A figure in inches, and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, list(np.atleast_1d(np.asarray(figure.subplots(rows, columns))).ravel())


def heat_map(axes: Any, values: np.ndarray, signed: bool = False, most: float | None = None, **options: Any) -> None:
    """One cell a number, from transparent at 0 to a colour at `most` (default: the largest); another one below 0."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    up, down = (to_rgb(colour) for colour in SERIES[:2])
    colours = [(0.0, (*up, 0.0)), (1.0, (*up, 0.95))]
    if signed:
        colours = [(0.0, (*down, 0.95)), (0.5, (*down, 0.0)), (0.5, (*up, 0.0)), (1.0, (*up, 0.95))]
    most = float(np.max(np.abs(values))) if most is None else most
    limits = dict(vmin=-most if signed else 0.0, vmax=most)
    shades = LinearSegmentedColormap.from_list("shades", colours)
    axes.imshow(values, cmap=shades, interpolation="none", aspect=options.pop("aspect", "auto"), **limits, **options)
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(LINE)
    axes.tick_params(length=0)


def draw_key(axes: Any, right: float = 1.04, most: float | None = None) -> None:
    """Which colour stands for which number in the heat map, `right` of it in its own widths; up to `most`, or to the
    colour's own limit."""
    image = axes.images[0]
    low, limit = image.get_clim()
    high = limit if most is None else most
    strip = axes.inset_axes((right, 0.0, 0.04, 1.0))
    shades = np.linspace(high, low, 65)[:, None]
    strip.imshow(shades, cmap=image.get_cmap(), vmin=low, vmax=limit, aspect="auto", extent=(0, 1, low, high))
    ticks = (low, 0.0, high) if low < 0 else (low, high)
    strip.set(xticks=[])
    strip.set_yticks(ticks, [f"{tick:.{3 if abs(tick) > 99 else 2}g}" for tick in ticks], fontsize=7.5)
    strip.yaxis.tick_right()
    strip.tick_params(length=0)
    for side in strip.spines.values():
        side.set_visible(True)
        side.set_color(LINE)


def label_cells(axes: Any, rows: Sequence[str], columns: Sequence[str], size: float = 7.5) -> None:
    """Words beside the rows of a heat map, and under its columns."""
    turned = max(map(len, columns), default=0) > 3
    axes.set_xticks(range(len(columns)), columns, rotation=90 if turned else 0, fontsize=size)
    axes.set_yticks(range(len(rows)), rows, fontsize=size)


def label_offsets(axes: Any, places: np.ndarray, words: Sequence[str]) -> list[tuple[float, float]]:
    """Where each label stands from its point, in points of 1/72 inch: the first place where it covers no other."""
    across, down = 72 * axes.figure.get_size_inches()
    points = (places - places.min(axis=0)) / np.ptp(places, axis=0) * (0.9 * across, 0.85 * down)
    taken: list[tuple[float, float, float, float]] = []
    chosen = []
    for word, (x, y) in zip(words, points, strict=True):
        width, height = 4.0 * len(word), 7.0
        tries = [(3.0, 2.0 + sign * step) for step in range(0, 60, 4) for sign in (1, -1)]
        tries += [(-3.0 - width, dy) for _, dy in tries]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in sorted(tries, key=lambda t: abs(t[1]))]
        free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
        box = (free or boxes)[0]
        taken.append(box)
        chosen.append((box[0] - x, box[1] - y))
    return chosen


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def write_cells(axes: Any, texts: Sequence[Sequence[str]], size: float = 7.5) -> None:
    """A text in each cell of a heat map."""
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            write_cell(axes, i, j, text, size)


def write_cell(axes: Any, row: int, column: int, text: str, size: float = 7.5) -> None:
    """On a ground of its own where the cell's colour is strong: no ink is read on it in the light and in the dark."""
    shades = [image.cmap(image.norm(image.get_array()[row, column])) for image in axes.images]
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8} if any(shade[3] > 0.7 for shade in shades) else None
    axes.text(column, row, text, ha="center", va="center", fontsize=size, bbox=ground)


def frame_cells(axes: Any, cells: Sequence[tuple[int, int]]) -> None:
    """A frame around each of these cells (row, column) of a heat map."""
    for row, column in cells:
        x, y = np.array([0, 1, 1, 0, 0]) + column - 0.5, np.array([0, 0, 1, 1, 0]) + row - 0.5
        axes.plot(x, y, color=INK, linewidth=1, clip_on=False, zorder=4)


def write_beside(axes: Any, head: str, texts: Sequence[str], size: float = 7.5) -> None:
    """A column of texts to the right of a heat map, one a row, under its head."""
    right = axes.get_xlim()[1] + 0.15
    for row, text in zip((-0.7, *range(len(texts))), (head, *texts), strict=True):
        axes.text(right, row, text, ha="left", va="center", fontsize=size, color=SOFT)


def as_figure(table: Table) -> Any:
    """A table, drawn."""
    lengths = [max(len(row[i]) for row in (table.head, *table.rows)) for i in range(len(table.head))]
    starts = np.cumsum([0, *lengths[:-1]]) + 2.0 * np.arange(len(lengths))
    total = float(starts[-1] + lengths[-1])
    figure, (axes,) = canvas(width=max(3.0, 0.085 * total + 0.3), height=0.26 * (len(table.rows) + 1) + 0.2)
    axes.axis("off")
    axes.set_xlim(0, total)
    axes.set_ylim(len(table.rows) + 0.6, -0.6)
    for y, row in enumerate((table.head, *table.rows)):
        for x, text in zip(starts, row, strict=True):
            axes.text(x, y, text, va="center", fontsize=8.5, color=SOFT if y == 0 else INK)
    axes.axhline(0.5, color=LINE, linewidth=0.8)
    return figure


def png(figure: Any) -> bytes:
    """On white, twice as fine as a screen."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=192, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Any) -> str:
    """A file by itself, on white; the same bytes each time."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", facecolor=PAPER, metadata=NO_METADATA)
    return buffer.getvalue()


NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def both_palettes(inline: str) -> str:
    """What `inline_svg` gives as a file by itself, in the page's colours, light or dark as the reader has it."""
    colours = kit.neighbour_texts(kit.__file__, "page.css").partition("\n* {")[0]
    look = f"<style>\n{colours}\ntext {{ font-family: system-ui, sans-serif; }}\n</style>"
    head, _, rest = inline.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n{look}{rest}\n'


def inline_svg(figure: Any, name: str, label: str) -> str:
    """For a page: its colours, its fonts, names that no other figure has, and `label` for who can't see it; the same
    bytes each time."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<image\b[^>]*?) id="[^"]+"', r"\1", text)  # the same for two keys of the same colours
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text.replace("xlink:href", "href"))
    for colour, variable in PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    width, height = (re.search(rf'\b{side}="([\d.]+)pt"', text) for side in ("width", "height"))
    assert width is not None
    assert height is not None
    attributes = f'viewBox="0 0 {width[1]} {height[1]}" role="img" aria-label="{escape(label)}"'
    attributes += f' style="max-width:{width[1]}pt"'
    text = re.sub(r"<svg.*?>", f"<svg {attributes}>", text, count=1, flags=re.DOTALL)
    return re.sub(r"\n\s*", "\n", text).strip()
