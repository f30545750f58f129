"""Make the page: one HTML file with its scripts and numbers inside. It works offline: its policy forbids requests, and
running text as code."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlx_transformer import page as kit
from mlx_transformer.page.script import compact, compact_style, joined

SCRIPTS = ("core.js", "attention.js", "reading.js")


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
HERE = Path(__file__).parent


def page(
    models: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
    policy: str = POLICY,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return a self-contained HTML page.

    models: for the walk through a model, from `payload` or `inside`. data: from `content.content`, for more views of
    one sentence in the first model. policy: the page's Content-Security-Policy. links: {repository file: address}, from
    `links_from`; a file without an address is only named.
    """
    walk = kit.neighbour_texts(__file__, "walk/shell.html")
    shown = {"models": models, "words": words(), "links": links or {}}
    body = f'<div id="walk">{walk}</div>{_json("walk-data", shown)}'
    css = kit.neighbour_texts(kit.__file__, "kit.css") + kit.neighbour_texts(__file__, "walk/walk.css")
    entry = "walk.js" if all("weights" in model for model in models) else "all.js"
    script = f"(() => {{{joined(HERE / 'walk' / entry)}}})();"
    title = "One word through the model"
    if data is not None:
        body += _more(data)
        css += kit.neighbour_texts(__file__, "explain.css")
        drawn = f"const draw = (data, signal) => {{{kit.neighbour_texts(__file__, *SCRIPTS)}}};"
        script += f"(() => {{{compact(drawn)}{joined(HERE / 'following.js')}}})();"
        title = f"explain: {data['text']}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
    return kit.page("explain", title, body, compact_style(css), script, head)


def words() -> dict[str, Any]:
    """The walk's texts, from words.toml."""
    return tomllib.loads(kit.neighbour_texts(__file__, "walk/words.toml"))


def files_named() -> set[str]:
    """The repository's files named in the walk, e.g. docs/claims/README.md."""
    stations = [said for kind in words().values() if isinstance(kind, dict) for said in kind.values()]
    said = [each for each in stations if isinstance(each, dict)]
    guide = {each["guide"] for each in said if "guide" in each} | {page for _, _, page in words()["glossary"].values()}
    code = {each["code"] for each in said if "code" in each}
    return {*(f"docs/guide/{name}.md" for name in guide), "docs/claims/README.md", *code}


def links_from(folder: Path) -> dict[str, str]:
    """{file: address} for a page in a folder of a clone. Empty elsewhere, since such a page may be sent to others."""
    root, place = HERE.parents[1], folder.resolve()
    if not place.is_relative_to(root) or not (root / "docs/guide").is_dir():
        return {}
    return {file: quote(os.path.relpath(root / file, place).replace(os.sep, "/")) for file in files_named()}


def _json(id: str, data: Any) -> str:
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{numbers}</script>'


def _more(data: Mapping[str, Any]) -> str:
    sections = tomllib.loads(kit.neighbour_texts(__file__, "sections.toml"))
    parts = "".join(_section(data, id, each) for id, each in sections.items())
    return (
        f'<div id="more">{_head(data)}{parts}{_foot(data)}'
        f'<dialog id="large" aria-label="one head"></dialog></div>{_json("data", data)}'
    )


def _head(data: Mapping[str, Any]) -> str:
    output = data["output"]
    arrow = f' <span class="arrow">→</span> <span class="output">{escape(output)}</span>' if output else ""
    score = "" if data["score"] is None else f" Score (log p by the length penalty): {data['score']:g}."
    ran = " and ".join(data["runtimes"])
    return (
        f'<h2 id="more-views">More views: {escape(data["text"])}{arrow}</h2>'
        f'<p class="soft">{escape(data["model"])}: {escape(data["architecture"])}, {escape(data["facts"])}. '
        f'<span id="more-ran">Run by {escape(ran)}.{score}</span></p>'
    )


def _section(data: Mapping[str, Any], id: str, entry: Mapping[str, Any]) -> str:
    text = entry["said"] if isinstance(entry["said"], str) else entry["said"][data["architecture"]]
    if data["recurrent"] and "recurrent" in entry:
        text = f"{text} {entry['recurrent']}"
    return (
        f'<section id="{id}-section" aria-labelledby="{id}-title">'
        f'<h3 class="title" id="{id}-title">{entry["title"]}</h3>'
        f'<p class="note">{text}</p><div class="card" id="{id}"></div></section>'
    )


def _foot(data: Mapping[str, Any]) -> str:
    bits = data["maps"]["bits"]
    step = f"1/{2**bits - 1:,}"
    return (
        f'<p class="note">Attention weights are kept in {bits} bits, steps of {step}; differences between two runs in '
        "parts of 1/127 of the largest of each map. All other numbers have four digits. The logit lens is computed in "
        "NumPy from the values that the model showed.</p>"
    )
