"""The page: one self-contained HTML file, drawn by its own script from the numbers in it. Works without a network."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from html import escape
from typing import Any

from mlx_transformer import page as kit

SCRIPTS = ("core.js", "attention.js", "reading.js")


def page(data: Mapping[str, Any]) -> str:
    """Return what `content.content` returns as a self-contained HTML page."""
    sections = tomllib.loads(kit.texts_beside(__file__, "sections.toml"))
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    body = (
        f"{_head(data)}{''.join(_section(data, id, shown) for id, shown in sections.items())}{_foot(data)}"
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


def _section(data: Mapping[str, Any], id: str, shown: Mapping[str, Any]) -> str:
    said = shown["said"] if isinstance(shown["said"], str) else shown["said"][data["architecture"]]
    if data["recurrent"] and "recurrent" in shown:
        said = f"{said} {shown['recurrent']}"
    return (
        f'<section id="{id}-section" aria-labelledby="{id}-title"><h2 id="{id}-title">{shown["title"]}</h2>'
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
