"""Boxes, arrows and words as SVG within a page: it takes the page's colours, light and dark."""

from __future__ import annotations

import html


class Svg:
    """Lengths in pixels of a drawing that scales with the page. `title`: what a screen reader says of it."""

    def __init__(self, width: float, title: str):
        self.width, self.title = width, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, title: str, note: str = "") -> None:
        middle = x + width / 2
        self.parts.append(f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        self.text(middle, y + height / 2 + (-3 if note else 4), title, "title")
        if note:
            self.text(middle, y + height / 2 + 14, note, "note")

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        self.parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10"/>')
        self.text(x + width - 8, y + 14, label, "count")

    def text(self, x: float, y: float, words: str, kind: str = "words") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(html.unescape(words))}</text>')

    def path(self, way: str, kind: str) -> None:
        end = ' marker-end="url(#head)"' if kind == "arrow" else ""
        self.parts.append(f'<path class="{kind}" d="{way}"{end}/>')

    def figure(self, height: float, caption: str) -> str:
        """One block of HTML, without an empty line, as Markdown wants it."""
        head = (
            f'<figure class="drawn" tabindex="0"><svg viewBox="0 0 {self.width:g} {height:g}" role="img" '
            f'aria-label="{html.escape(self.title)}"><defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
        )
        return "\n".join([head, *self.parts, f"</svg><figcaption>{html.escape(caption)}</figcaption></figure>"])
