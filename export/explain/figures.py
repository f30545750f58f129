"""Draw the page's figures as PNG and SVG files with matplotlib: heads, alignment, predictions, beams, lens, norms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.system.durable import Output, Target, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs

from .content import NAMED, NAMES
from .sentence import ExplainedSentence, Trace, norms, probabilities

FORMATS = ("png", "svg")
HIGH, GOOD, SOFT = "#14508f", "#2f7d4f", "#5c6470"
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a token may be "$"
    "svg.fonttype": "none",
    "svg.hashsalt": "explain",  # makes SVG ids equal in every run
    "font.size": 9,
}
CELL, TITLE = 0.24, 0.45  # inches: a cell of a large matrix, the room for a title

Draw = Callable[[], Any]
"""Makes a matplotlib Figure."""


def claim_figures(folder: Target, force: bool, *read: Path) -> Output:
    """Claim a folder for figures. Raises UserError as `claim` does, and without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UserError(f"--figures needs matplotlib, which is not installed: {needs('plots')}")
    return claim(folder, Kind("set of figures", _holds_figures, folder=True), force, *read)


def _holds_figures(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    known = ("heads-", "difference-", "alignment", "predictions", "beam", "lens", "norms-")
    return all(name.startswith(known) and name.rpartition(".")[2] in FORMATS for name in names)


def write_figures(folder: Output, sentence: ExplainedSentence, traces: Sequence[Trace], data: Mapping[str, Any]) -> int:
    """Write all figures as NAME.png and NAME.svg; return their number.

    data: from `content.content`. With two models, the first is drawn, and the difference of the heads.
    """
    import matplotlib

    figures = dict(_figures(sentence, traces, data))
    with replace_folder(folder) as place, matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font lacks it: a box is drawn
        for name, draw in figures.items():
            figure = draw()
            for kind in FORMATS:
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(place / f"{name}.{kind}", dpi=150, metadata=metadata)
    return len(figures)


def _figures(
    sentence: ExplainedSentence, traces: Sequence[Trace], data: Mapping[str, Any]
) -> Iterator[tuple[str, Draw]]:
    first = traces[0]
    labels = {side: [_marked(text) for text in pieces] for side, pieces in data["pieces"].items()}
    for kind, weights in first.weights.items():
        rows, columns = (labels[side] for side in NAMED[kind])
        yield f"heads-{kind}", lambda w=weights, k=kind, r=rows, c=columns: _heads(w, NAMES[k], r, c)
        if len(traces) == 2:
            apart = traces[1].weights[kind].astype(np.float64) - weights
            yield f"difference-{kind}", lambda w=apart, k=kind, r=rows, c=columns: _heads(w, NAMES[k], r, c, True)
    if "cross" in first.weights:
        layer = data["layer"]
        mean = first.weights["cross"][layer].mean(axis=0)
        title = f"Alignment, layer {layer + 1}"
        yield "alignment", lambda: _matrix(mean, title, labels["target"], labels["source"], 1.0)
    if first.lens:
        yield "predictions", lambda: _predictions(data)
    if data["beam"] is not None:
        yield "beam", lambda: _beam(data)
    if first.lens:
        columns = labels[data["lens"]["positions"]]
        yield "lens", lambda c=columns: _lens(first, data, c, sentence)
    for stack in ("encoder", "decoder"):
        values = {name: x for name, x in norms(first.points).items() if name.startswith(f"{stack}.")}
        side = labels["source" if stack == "encoder" else "target"] if values else []
        if values:
            yield f"norms-{stack}", lambda v=values, s=stack, c=side: _norms(v, s, c)


def _label(data: Mapping[str, Any], id: int) -> str:
    return _marked(data["texts"][id])


def _marked(text: str) -> str:
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    stripped = text.lstrip(" ")
    return "·" * (len(text) - len(stripped)) + stripped


def _panels(
    down: int, across: int, size: tuple[float, float], gap: tuple[float, float], rows: float, columns: float
) -> tuple[Any, list[Any]]:
    """Make a figure with a grid of axes, each of `size` (width, height) in inches, with gaps between them.

    rows, columns: inches for labels on the left and below. Matplotlib's own layouts take seconds with many labels.
    """
    from matplotlib.figure import Figure

    width = across * size[0] + (across - 1) * gap[0] + rows + 0.2
    height = down * size[1] + (down - 1) * gap[1] + columns + TITLE
    figure = Figure(figsize=(width, height))
    axes = []
    for i in range(down * across):
        left = rows + i % across * (size[0] + gap[0])
        bottom = columns + (down - 1 - i // across) * (size[1] + gap[1])
        axes.append(figure.add_axes((left / width, bottom / height, size[0] / width, size[1] / height)))
    return figure, axes


def _room(labels: Sequence[str], points: float) -> float:
    """Inches for the longest label."""
    return 0.15 + 0.0095 * points * max(map(len, labels), default=0)


def _heads(weights: NDArray, title: str, rows: Sequence[str], columns: Sequence[str], difference: bool = False) -> Any:
    """Draw every head (layers, H, L, S), a row of maps per layer; differences relative to each map's largest."""
    layers, heads = weights.shape[:2]
    size = max(1.3, 0.09 * max(len(rows), len(columns)))
    below = _room(columns, 5)
    figure, panels = _panels(layers, heads, (size, size), (0.12, 0.2), _room(rows, 5), below)
    figure.suptitle(f"{title}{', difference' if difference else ''}", y=1 - 0.05 / figure.get_figheight(), va="top")
    for i, axes in enumerate(panels):
        map = weights[i // heads, i % heads]
        most = float(np.abs(map).max()) or 1.0
        if difference:
            axes.imshow(map, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
        else:
            axes.imshow(map, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"{i // heads + 1}.{i % heads + 1}{f'  {most:.1e}' if difference else ''}", fontsize=7, pad=2)
        axes.tick_params(length=0, labelsize=5)
        last, first = i // heads == layers - 1, i % heads == 0
        axes.set_xticks(range(len(columns)) if last else [], columns if last else [], rotation=90)
        axes.set_yticks(range(len(rows)) if first else [], rows if first else [])
    return figure


def _matrix(values: NDArray, title: str, rows: Sequence[str], columns: Sequence[str], most: float) -> Any:
    size = (max(2.5, CELL * len(columns)), CELL * len(rows))
    figure, [axes] = _panels(1, 1, size, (0, 0), _room(rows, 9), _room(columns, 9))
    axes.imshow(values, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    return figure


def _predictions(data: Mapping[str, Any]) -> Any:
    """Draw bars of the most likely tokens, a panel per position."""
    steps = data["steps"]["of"][0]
    read = data["sides"][data["steps"]["positions"]]["ids"]
    across = min(6, len(steps))
    down = -(-len(steps) // across)
    left = _room([_label(data, id) for step in steps for id in step["ids"]], 7)
    figure, panels = _panels(down, across, (1.2, 0.16 * len(steps[0]["ids"]) + 0.1), (left, 0.4), left, 0.25)
    for i, axes in enumerate(panels):
        if i >= len(steps):
            axes.axis("off")
            continue
        step, written = steps[i], data["written"][i]
        colours = [GOOD if id == written else HIGH for id in step["ids"]]
        places = range(len(step["ids"]))
        axes.barh(places, step["p"], color=colours, alpha=0.75)
        axes.set_yticks(places, [_label(data, id) for id in step["ids"]], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.tick_params(axis="x", labelsize=6)
        axes.set_title(f"{i}: {_label(data, read[i])}", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _beam(data: Mapping[str, Any]) -> Any:
    """Draw kept and finished candidates, a column per step, with a thick line for the output's path."""
    beam = data["beam"]
    count = len(beam["step"])
    drawn = [i for i in range(count) if beam["fate"][i] != "d"]
    ended = [i for i in drawn if beam["fate"][i] == "f"]
    path, node = set(), max(ended, key=lambda i: beam["score"][i]) if ended else -1
    while node >= 0:
        path.add(node)
        node = beam["parent"][node]
    place, heights = {-1: (-1.0, 0.0)}, dict.fromkeys(range(max(beam["step"]) + 1), 0)
    for i in [*drawn, *sorted(path - {*drawn})]:
        place[i] = (float(beam["step"][i]), float(heights[beam["step"][i]]))
        heights[beam["step"][i]] += 1
    size = (1.0 * (max(beam["step"]) + 2), 0.4 * max(heights.values()))
    figure, [axes] = _panels(1, 1, size, (0, 0), 0.1, 0.1)
    axes.axis("off")
    axes.set_xlim(-1.5, max(beam["step"]) + 0.7)
    axes.set_ylim(max(heights.values()) - 0.3, -0.6)
    axes.text(-1, 0, "start", ha="center", va="center", color=SOFT)
    for i, (x, y) in place.items():
        if i < 0:
            continue
        x0, y0 = place.get(beam["parent"][i], (x - 1, y))
        style = {"color": GOOD, "linewidth": 2.2} if i in path else {"color": SOFT, "linewidth": 0.7, "alpha": 0.6}
        axes.plot([x0 + 0.3, x - 0.38], [y0, y], zorder=1, **style)
        score = beam["score"][i]
        number = f"log p {beam['log_p'][i]:.3g}" if score is None else f"score {score:.3g}"
        edge = GOOD if beam["fate"][i] == "f" else "#d5d2c9"
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": edge}
        text = f"{_label(data, beam['token'][i])}\n{number}"
        axes.text(x, y, text, ha="center", va="center", fontsize=6.5, bbox=box, zorder=2)
    return figure


def _lens(trace: Trace, data: Mapping[str, Any], labels: Sequence[str], sentence: ExplainedSentence) -> Any:
    """Draw the most likely token after each layer over a shade of its probability, green if it is the token that
    follows."""
    layers = data["lens"]["of"][0]
    values = np.array([probabilities(logits).max(axis=-1) for logits in trace.lens.values()])
    names = [point_name(layer["name"]) for layer in layers]
    figure, [axes] = _panels(
        1, 1, (max(2.5, 0.62 * len(labels)), 0.3 * len(layers)), (0, 0), _room(names, 9), _room(labels, 9)
    )
    axes.imshow(values, cmap="Blues", vmin=0, vmax=2.5, aspect="auto", origin="lower")
    for row, layer in enumerate(layers):
        for column, ids in enumerate(layer["ids"]):
            right = ids[0] == sentence.written[column]
            weight = "bold" if right else "normal"
            colour = GOOD if right else "black"
            text = _label(data, ids[0])[:9]
            axes.text(column, row, text, ha="center", va="center", fontsize=7, weight=weight, color=colour)
    axes.set_title("The classifier after each layer", fontsize=10)
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(layers)), names)
    axes.tick_params(length=0)
    return figure


def _norms(values: Mapping[str, NDArray], stack: str, columns: Sequence[str]) -> Any:
    table = np.array(list(values.values()))
    rows = [point_name(name) for name in values]
    return _matrix(table, f"Norms in the {stack}, up to {table.max():.4g}", rows, columns, float(table.max()) or 1.0)


def point_name(name: str) -> str:
    """A readable name for a point: encoder.layers.0.self_attention -> layer 1: self-attention."""
    _, _, rest = name.partition(".layers.")
    if not rest:
        ends = {"embedding": "embedding", "embedding_norm": "embedding: norm"}
        return ends.get(name.rpartition(".")[2], "after the last norm")
    layer, _, part = rest.partition(".")
    return f"layer {int(layer) + 1}" + (f": {part.replace('_', '-')}" if part else "")
