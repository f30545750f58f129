"""All of it as one page that needs no network, in the look of all pages (mlx_transformer/page)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from mlx_transformer import page as kit

from .formula import as_html, as_mathml
from .row import Row, dotted, shown

"""By which an earlier page is known."""
TITLE = "What is claimed of the Transformer"

Values = Mapping[str, tuple[float, ...]]


def page(articles: Sequence[str], rows: Sequence[Row]) -> str:
    """Self-contained HTML, light and dark. `articles`: one of each row, by `article`."""
    links = "".join(f'<a href="#row-{row.number}" title="{escape(row.claim)}">{row.number}</a>' for row in rows)
    nav = f'<nav aria-label="rows">{links}</nav>' if len(rows) > 1 else ""
    said = "Each claim with its formula and the numbers that the tests assert, computed when this page was made by the"
    body = f'<h1>{TITLE}</h1><p class="soft">{said} code that is named.</p>{nav}{"".join(articles)}'
    return kit.page("claims", TITLE, body, kit.neighbour_texts(__file__, "page.css"))


def article(row: Row, found: Values | None, figure: str, reason: str = "") -> str:
    """One row. `figure`: HTML, or nothing."""
    numbers = _numbers(row, found) if found is not None else f'<p class="soft">{escape(reason)}</p>'
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in (row.missing, row.slip) if note)
    code = ", ".join(f"<code>{escape(dotted(symbol))}</code>" for symbol in row.symbols)
    tests = ", ".join(f"<code>{escape(test)}</code>" for test in row.tests)
    return (
        f'<article class="card" id="row-{row.number}">'
        f'<h2><a href="#row-{row.number}">{row.number}</a>{escape(row.claim)}</h2>'
        f'<div class="formula" tabindex="0">{as_mathml(row.formula)}</div>{numbers}{figure}{notes}'
        f'<p class="soft">Code: {code}. Tests: {tests}.</p></article>'
    )


def _numbers(row: Row, found: Values) -> str:
    rows = []
    claims = any(claimed.sign != "recorded" for claimed in row.numbers.values())
    for name, values in found.items():
        claimed = row.numbers.get(name)
        text = ""
        if claimed is not None and claimed.sign != "recorded":
            wrong = "" if claimed.holds(values) else ' <span class="wrong">does not hold</span>'
            text = f"{escape(claimed.text())}{wrong}"
        rows.append([as_html(name), escape(shown(values)), text][: 2 + claims])
    head = ["number", "computed", "claimed"][: 2 + claims]
    shown_numbers = kit.data_table(head, rows, named=True)
    return f'<div class="wide" tabindex="0" role="group" aria-label="numbers">{shown_numbers}</div>'


def drawn(svg: str, first: int) -> str:
    return f'<figure id="figure-{first}" tabindex="0" aria-label="figure">{svg}</figure>'


def drawn_above(first: int) -> str:
    return f'<p class="soft"><a href="#figure-{first}">Figure at row {first}</a></p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], first: int) -> str:
    """A table of a row as HTML."""
    shown = kit.data_table([escape(cell) for cell in head], [[escape(c) for c in line] for line in rows], named=True)
    return f'<figure id="figure-{first}" tabindex="0" aria-label="table">{shown}</figure>'
