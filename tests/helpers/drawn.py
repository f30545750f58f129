"""What a figure shows, read from what was drawn: titles, series by their labels, images, words and where they stand.

`exchanged` gives the same figure with two labels that change places: a check that passes it looks at nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np


@dataclass
class Panel:
    """One pair of axes. Series have (x, y); words have (text, x, y); rows and columns are the labels of the ticks."""

    title: str
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    image: np.ndarray | None
    words: list[tuple[str, float, float]]
    rows: list[str]
    columns: list[str]

    def y(self, label: str) -> np.ndarray:
        return self.series[label][1]

    def cells(self) -> list[list[str]]:
        """Words by the cells of the image that they stand in; "" where none does."""
        assert self.image is not None
        found = [["" for _ in range(self.image.shape[1])] for _ in range(self.image.shape[0])]
        for text, x, y in self.words:
            if x == int(x) and y == int(y) and 0 <= x < self.image.shape[1] and 0 <= y < self.image.shape[0]:
                found[int(y)][int(x)] = text
        return found


def panels_of(figure: Any) -> list[Panel]:
    return [_panel(axes) for axes in figure.axes if axes.get_title() or axes.lines or axes.images or axes.containers]


def _panel(axes: Any) -> Panel:
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    labels = [line.get_label() for line in lines]
    bars = [group for group in axes.containers if not group.get_label().startswith("_")]
    names = [*labels, *(group.get_label() for group in bars)]
    assert len(set(names)) == len(names)
    return Panel(
        axes.get_title(),
        {
            label: (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
            for label, line in zip(labels, lines, strict=True)
        }
        | {group.get_label(): _tops(group) for group in bars},
        np.asarray(axes.images[0].get_array()) if axes.images else None,
        [(text.get_text(), *getattr(text, "xy", text.get_position())) for text in axes.texts],
        _written(axes.yaxis) if axes.images else [],
        _written(axes.xaxis) if axes.images or bars else [],
    )


def _tops(bars: Any) -> tuple[np.ndarray, np.ndarray]:
    """Middle and height of each bar."""
    assert all(bar.get_y() == 0 for bar in bars)
    places = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    return np.array(places), np.array([bar.get_height() for bar in bars])


def _written(axis: Any) -> list[str]:
    """Labels of ticks that somebody chose, not the numbers that matplotlib puts there by itself."""
    from matplotlib.ticker import ScalarFormatter

    chosen = not isinstance(axis.get_major_formatter(), ScalarFormatter)
    return [label.get_text() for label in axis.get_ticklabels()] if chosen else []


def exchanged(panels: list[Panel]) -> Iterator[tuple[str, list[Panel]]]:
    """What changed places, and the figure with it; nothing for labels that say the same."""
    for i, j in combinations(range(len(panels)), 2):
        if panels[i].title != panels[j].title:
            other = copy.deepcopy(panels)
            other[i].title, other[j].title = other[j].title, other[i].title
            yield f"titles {panels[i].title!r} and {panels[j].title!r}", other
    for i, panel in enumerate(panels):
        for one, two in combinations(panel.series, 2):
            other = copy.deepcopy(panels)
            names = {one: two, two: one}
            other[i].series = {names.get(label, label): values for label, values in panel.series.items()}
            yield f"series {one!r} and {two!r}", other
        for name in ("rows", "columns"):
            labels = getattr(panel, name)
            if len(set(labels)) > 1:
                other = copy.deepcopy(panels)
                k = next(k for k, label in enumerate(labels) if label != labels[0])
                setattr(other[i], name, [labels[k], *labels[1:k], labels[0], *labels[k + 1 :]])
                yield f"{name} of {panel.title!r}", other
        if len({text for text, _, _ in panel.words}) > 1:
            other = copy.deepcopy(panels)
            a = panel.words[0]
            b = next(word for word in panel.words if word[0] != a[0])
            other[i].words = [(b[0], *a[1:]), *(w if w != b else (a[0], *b[1:]) for w in panel.words[1:])]
            yield f"words {a[0]!r} and {b[0]!r} of {panel.title!r}", other


def exchanged_cells(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, tuple, tuple]]:
    """Of a table: the first cells of two lines, or two of its heads."""
    for i, j in combinations(range(len(rows)), 2):
        names = {i: rows[j][0], j: rows[i][0]}
        if rows[i][1:] != rows[j][1:]:
            yield (
                f"{rows[i][0]!r} and {rows[j][0]!r}",
                head,
                tuple((names.get(k, row[0]), *row[1:]) for k, row in enumerate(rows)),
            )
    for i, j in combinations(range(1, len(head)), 2):
        swapped = list(head)
        swapped[i], swapped[j] = head[j], head[i]
        yield f"heads {head[i]!r} and {head[j]!r}", tuple(swapped), rows
