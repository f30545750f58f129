"""Figures of what a trained model has learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from claims import trained as look

from .drawing import INK, LINE, SERIES, canvas, heat_map, label_cells

NAMED = 6
"""Most heads of a stack that stand in one row, with their words beside them."""


def head_grid(trained: look.Trained) -> Any:
    """Every head of every layer for the first sentence: encoder, decoder, and decoder to encoder."""
    source, target = trained.pairs[0]
    maps = look.attention_maps(trained.model, source, target)
    words = {"source": trained.words(source), "target": trained.words(target)}
    sides = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
    places = [(stack, *place) for stack, found in maps.items() for place in np.ndindex(*found.shape[:2])]
    small = all(found.shape[0] * found.shape[1] <= NAMED for found in maps.values())
    across = max(found.shape[0] * found.shape[1] if small else found.shape[1] for found in maps.values())
    down = -(-len(places) // across)
    size = 2.1 if small else 1.0
    figure, panels = canvas(across, down, width=size * across, height=size * 1.05 * down)
    for axes, (stack, layer, head) in zip(panels, places, strict=False):
        heat_map(axes, maps[stack][layer, head], most=1.0)
        axes.set_title(
            f"{stack} {layer + 1}, head {head + 1}" if small else f"{stack} {layer + 1}.{head + 1}", fontsize=8
        )
        if small:
            label_cells(axes, *(words[side] for side in sides[stack]), size=7)
        else:
            axes.set(xticks=[], yticks=[])
    for axes in panels[len(places) :]:
        axes.axis("off")
    return figure


def word_map(trained: look.Trained) -> Any:
    figure, (axes,) = canvas(width=6.6, height=4.6)
    places, words = look.flattened(trained), look.known_words(trained)
    for kind, colour in zip(look.KINDS, SERIES, strict=True):
        own = [i for i, (of, _, _) in enumerate(words) if of == kind]
        axes.plot(*places[own].T, "o", color=colour, markersize=4, label=kind)
        for i in own:
            axes.annotate(words[i][1], places[i], (3, 2), textcoords="offset points", fontsize=7, color=INK)
    axes.set(xticks=[], yticks=[], title="the two directions in which these words' vectors differ most")
    for side in axes.spines.values():
        side.set_color(LINE)
    axes.legend(fontsize=8, loc="upper right")
    return figure


def position_maps(trained: look.Trained) -> Any:
    """Each head's scores of positions alone, trained and before training."""
    scores = {"trained": look.position_scores(trained.model), "before training": look.position_scores(trained.fresh)}
    heads = min(len(scores["trained"]), 8)
    figure, panels = canvas(heads, 2, width=max(5.0, 1.7 * heads), height=5.0)
    for row, (name, found) in enumerate(scores.items()):
        for head in range(heads):
            axes = panels[row * heads + head]
            heat_map(axes, found[head], signed=True, aspect="equal")
            axes.set_title(f"{name}, head {head + 1}", fontsize=8)
            axes.set(xticks=[], yticks=[])
    return figure


def head_distances(trained: look.Trained) -> Any:
    """Distance of every two heads of the encoder, mean of the phrases."""
    phrases = [look.attention_maps(trained.model, *pair)["encoder"] for pair in trained.pairs]
    layers, heads = phrases[0].shape[:2]
    flat = [maps.reshape(layers * heads, *maps.shape[2:]) for maps in phrases]
    found = np.mean([np.abs(m[:, None] - m[None]).sum(axis=-1).mean(axis=-1) / 2 for m in flat], axis=0)
    figure, (axes,) = canvas(width=4.4, height=3.8)
    heat_map(axes, found, most=1.0, aspect="equal")
    names = [f"{layer + 1}.{head + 1}" for layer in range(layers) for head in range(heads)]
    label_cells(axes, names, names, size=8)
    if len(names) <= 12:
        for i, row in enumerate(found):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_title("layer.head against layer.head: 0 alike, 1 nowhere the same")
    return figure
