"""All of it as one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .formula import as_html
from .row import Row, dotted, shown

GENERATOR = '<meta name="generator" content="mlx-transformer claims">'
"""By which an earlier page is known."""

Values = Mapping[str, tuple[float, ...]]


def page(articles: Sequence[str], rows: Sequence[Row]) -> str:
    """Self-contained HTML, light and dark. `articles`: one of each row, by `article`."""
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#row-{row.number}" title="{escape(row.claim)}">{row.number}</a>' for row in rows)
    nav = f'<nav aria-label="rows">{links}</nav>' if len(rows) > 1 else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{GENERATOR}'
        f"<title>What is claimed of the Transformer</title><style>{css}</style></head><body><main>"
        "<h1>What is claimed of the Transformer</h1>"
        '<p class="soft">Each claim with its formula and the numbers that the tests assert, computed when this page was'
        f" made by the code that is named.</p>{nav}{''.join(articles)}</main></body></html>\n"
    )


def article(row: Row, found: Values | None, figure: str, reason: str = "") -> str:
    """One row. `figure`: HTML, or nothing."""
    numbers = _numbers(row, found) if found is not None else f'<p class="soft">{escape(reason)}</p>'
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in (row.missing, row.slip) if note)
    code = ", ".join(f"<code>{escape(dotted(symbol))}</code>" for symbol in row.symbols)
    tests = ", ".join(f"<code>{escape(test)}</code>" for test in row.tests)
    return (
        f'<article id="row-{row.number}"><h2><a href="#row-{row.number}">{row.number}</a>{escape(row.claim)}</h2>'
        f'<p class="formula">{as_html(row.formula)}</p>{numbers}{figure}{notes}'
        f'<p class="soft">Code: {code}. Tests: {tests}.</p></article>'
    )


def _numbers(row: Row, found: Values) -> str:
    cells = []
    claims = any(claimed.sign != "recorded" for claimed in row.numbers.values())
    for name, values in found.items():
        claimed = row.numbers.get(name)
        text = ""
        if claimed is not None and claimed.sign != "recorded":
            wrong = "" if claimed.holds(values) else ' <span class="wrong">does not hold</span>'
            text = f"{escape(claimed.text())}{wrong}"
        asked = f"<td>{text}</td>" if claims else ""
        cells.append(f'<tr><th scope="row">{as_html(name)}</th><td>{escape(shown(values))}</td>{asked}</tr>')
    head = '<th scope="col">claimed</th>' if claims else ""
    return (
        '<div class="wide" tabindex="0" role="group" aria-label="numbers"><table><thead><tr>'
        f'<th scope="col">number</th><th scope="col">computed</th>{head}</tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )


def drawn(svg: str, first: int) -> str:
    return f'<figure id="figure-{first}" tabindex="0" aria-label="figure">{svg}</figure>'


def drawn_above(first: int) -> str:
    return f'<p class="soft"><a href="#figure-{first}">Figure at row {first}</a></p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], first: int) -> str:
    """A table of a row as HTML."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(line[0])}</th>{"".join(f"<td>{escape(c)}</td>" for c in line[1:])}</tr>'
        for line in rows
    )
    return (
        f'<figure id="figure-{first}" tabindex="0" aria-label="table"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></figure>"
    )
