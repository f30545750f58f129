"""The page: one self-contained HTML file, drawn by its own script from the numbers in it. Works without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from mlx_transformer.system import page as kit

SCRIPTS = ("core.js", "attention.js", "reading.js")

NEXT = "The likeliest next tokens; bold and green the one that follows. Dashed: it was given, not chosen."
STEPS = {
    "encoder": "The likeliest tokens at each position; bold and green the one that stands there.",
    "decoder": NEXT,
    "encoder-decoder": NEXT,
}

TITLES = {
    "follow": "Follow a word",
    "maps": "Every head of every layer",
    "alignment": "Alignment",
    "steps": "Predictions, step by step",
    "beam": "Beam search",
    "lens": "What each layer would say",
    "norms": "Length of the vectors",
}
SAID = {
    "follow": "Point at a token, or reach it with Tab: blue is what it looks at, orange what looks at it. A click "
    "keeps it.",
    "maps": "Click a map for a large one with its numbers.",
    "alignment": "From which source tokens each token was written: cross-attention of one layer, the mean of its heads."
    " A token is chosen at the position of the one before it.",
    "beam": "All candidates of each step, best first: what was kept, what ended, and, pale, what was dropped. "
    "The thick line is the output.",
    "lens": "The classifier read after each layer, as if it were the last (the logit lens): its likeliest token. "
    "Framed in green where that is the token that follows.",
    "norms": "Euclidean norm at each position: of the residual stream, or of what each sub-layer adds to it.",
}


def page(data: Mapping[str, Any]) -> str:
    """Return what `content.content` returns as a self-contained HTML page."""
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    body = (
        f"{_head(data)}{''.join(_section(data, id) for id in TITLES)}{_foot(data)}"
        '<dialog id="large" aria-label="one head"></dialog>'
        f'<script type="application/json" id="data">{numbers}</script>'
    )
    return kit.page(
        f"explain: {data['text']}",
        body,
        kit.texts_beside(__file__, "explain.css"),
        f"(() => {{{kit.texts_beside(__file__, *SCRIPTS)}}})();",
        '<link rel="icon" href="data:,">',
    )


def _head(data: Mapping[str, Any]) -> str:
    output = data["output"]
    arrow = f' <span class="arrow">→</span> <span class="output">{escape(output)}</span>' if output else ""
    score = "" if data["score"] is None else f" Score (log p by the length penalty): {data['score']:g}."
    ran = " and ".join(data["runtimes"])
    return (
        f"<h1>{escape(data['text'])}{arrow}</h1>"
        f'<p class="soft">{escape(data["model"])}: {escape(data["architecture"])}, {escape(data["facts"])}. '
        f"Run by {escape(ran)}.{score}</p><noscript><p>This page draws with JavaScript, which is off.</p></noscript>"
    )


def _section(data: Mapping[str, Any], id: str) -> str:
    said = STEPS[data["architecture"]] if id == "steps" else SAID[id]
    return (
        f'<section id="{id}-section" aria-labelledby="{id}-title"><h2 id="{id}-title">{TITLES[id]}</h2>'
        f'<p class="note">{said}</p><div class="card" id="{id}"></div></section>'
    )


def _foot(data: Mapping[str, Any]) -> str:
    bits = data["maps"]["bits"]
    step = f"1/{2**bits - 1:,}"
    return (
        f'<p class="note">Attention weights are kept in {bits} bits, steps of {step}; differences between two runs in '
        "parts of 1/127 of the largest of each map. All other numbers have four digits. The logit lens is computed in "
        "NumPy from the values that the model showed.</p>"
    )
