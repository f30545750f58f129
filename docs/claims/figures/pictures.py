"""Figure of the row about pictures in place of words."""

from __future__ import annotations

from typing import Any

from claims import pictures

from .drawing import LINE, canvas, heat_map


def in_words() -> Any:
    """Unseen pictures, cut into patches, and what a trained model says of them."""
    seen = pictures.in_words()
    figure, panels = canvas(4, height=2.2)
    for axes, picture, words in zip(panels, seen.pictures, seen.trained, strict=False):
        heat_map(axes, picture.clip(0), most=1.4, aspect="equal")
        axes.set(xticks=[], yticks=[])
        for edge in range(pictures.PATCH, pictures.PIXELS, pictures.PATCH):
            axes.axhline(edge - 0.5, color=LINE, linewidth=0.8)
            axes.axvline(edge - 0.5, color=LINE, linewidth=0.8)
        axes.set_title(" ".join(pictures.WORDS[word] for word in words), fontsize=8.5)
    return figure
