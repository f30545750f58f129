"""Self-contained HTML pages and their parts: tables, cards, legends, and small tables for Jupyter.

All pages share one style with light and dark colours (page.css) and need no network.
"""

from __future__ import annotations

TYPE_CHECKING = False  # models import this module, so it must load fast
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

LEFT = ' style="text-align:left;vertical-align:top"'  # Jupyter aligns cells to the right


def page(command: str, title: str, body: str, css: str = "", script: str = "", head: str = "") -> str:
    """Make a self-contained HTML page.

    command: name of the command writing the page, e.g. "explain". It is stored in the page, as commands only
    overwrite their own pages (`core.outputs.page_kind`). body, head: HTML. css: added after page.css. script: runs at
    the end of the body.
    """
    from html import escape

    run = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'{generator(command)}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{head}<title>{escape(title)}</title>'
        f"<style>{_base()}{css}</style></head><body><main>{body}</main>{run}</body></html>\n"
    )


def generator(command: str) -> str:
    """The meta tag with the command that wrote a page."""
    return f'<meta name="generator" content="mlx-transformer {command}">'


def _base() -> str:
    from .script import compact_style

    return compact_style(neighbour_texts(__file__, "page.css"))


def neighbour_texts(file: str, *names: str) -> str:
    """The joined text of style sheets or scripts in a module's folder. file: the module's `__file__`."""
    from pathlib import Path

    return "".join(Path(file).parent.joinpath(name).read_text(encoding="utf-8") for name in names)


def data_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] = (),
    marked: Collection[int] = (),
    named: bool = False,
) -> str:
    """Make an HTML table. Cells of head and rows are HTML already, so escape text before.

    head: names of the columns, or empty. numbers: indices of right-aligned columns. marked: indices of rows to
    highlight. named: the first cell of each row is its heading.
    """
    css = dict.fromkeys(numbers, ' class="n"')

    def cell(tag: str, scope: str, place: int, text: str) -> str:
        return f"<{tag}{scope}{css.get(place, '')}>{text}</{tag}>"

    def line(place: int, row: Sequence[str]) -> str:
        cells = (
            cell("th", ' scope="row"', i, text) if named and i == 0 else cell("td", "", i, text)
            for i, text in enumerate(row)
        )
        return f"<tr{' class=differs' if place in marked else ''}>{''.join(cells)}</tr>"

    names = "".join(cell("th", ' scope="col"', i, word) if word else "<td></td>" for i, word in enumerate(head))
    top = f"<thead><tr>{names}</tr></thead>" if names else ""
    return f"<table>{top}<tbody>{''.join(line(place, row) for place, row in enumerate(rows))}</tbody></table>"


def card(html: str) -> str:
    """Put HTML into a frame, which scrolls sideways if its content is too wide."""
    return f'<div class="card">{html}</div>'


def key(names: Iterable[tuple[str, str]]) -> str:
    """Make the legend of a chart. names: (colour, name) of each line."""
    from html import escape

    dots = " ".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in names)
    return f'<p class="key">{dots}</p>'


def table(title: str, rows: Iterable[Sequence[str]], head: bool = False) -> str:
    """Make a small table for notebooks: a title, and rows whose first cell is their heading. All text is escaped.

    head: the first row has the names of the columns.
    """
    from html import escape

    lines = []
    for number, (name, *cells) in enumerate(rows):
        tag = "th" if head and number == 0 else "td"
        rest = "".join(f"<{tag}{LEFT}>{escape(cell)}</{tag}>" for cell in cells)
        lines.append(f'<tr><th scope="row"{LEFT}>{escape(name)}</th>{rest}</tr>')
    return f"<p><b>{escape(title)}</b></p><table>{''.join(lines)}</table>"
