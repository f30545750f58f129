"""Figures of the claims within a page, with their captions. Those of docs/pictures take the colours of the scheme that
the reader has chosen; those of a trained model are files on white."""

from __future__ import annotations

import html
import re

from mlx_transformer import page as kit


def within(svg: str, name: str, caption: str) -> str:
    """One block of HTML, with the caption to be read. `name`: of this figure, for the ids within it.

    The file's own style is left out: it would colour the whole page, and by the system's palette instead of the page's.
    """
    drawing = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|url\(#|href="#)f-', rf"\g<1>{name}-", drawing)
    lines = "\n".join(line for line in drawing.splitlines() if line.strip())
    return _figure(lines, caption)


def beside(path: str, caption: str) -> str:
    """A figure that is a file of its own, on white."""
    return _figure(f'<img class="on-white" src="{path}" alt="{html.escape(caption)}">', caption)


def titled(table: str, caption: str) -> str:
    """A table in Markdown with a caption."""
    return f'<figure class="claim" markdown>\n\n{table}\n\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>'


def _figure(drawing: str, caption: str) -> str:
    head = '<figure class="claim" tabindex="0" data-search-exclude>'
    return f"{head}\n{drawing}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def palette() -> str:
    """The colours of the figures, in each of the site's two schemes, as the pages of this project have them."""
    css = kit.neighbour_texts(kit.__file__, "page.css")
    light, dark = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[:2]
    return "".join(
        f'[data-md-color-scheme="{scheme}"] figure.claim {{{colours}}}\n'
        for scheme, colours in (("default", light), ("slate", dark))
    )
