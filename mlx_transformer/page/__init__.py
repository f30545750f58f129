"""The parts of pages: the shell of one that needs no network, its tables, and the small ones that objects show
themselves as in Jupyter. One style for all, light and dark: page.css."""

from __future__ import annotations

TYPE_CHECKING = False  # a model imports this, and most never show a page
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

LEFT = ' style="text-align:left;vertical-align:top"'  # Jupyter sets cells to the right


def page(command: str, title: str, body: str, css: str = "", script: str = "", head: str = "") -> str:
    """Return a self-contained HTML page: `body` is HTML, and so is what else goes into the `head`; `css` is the page's
    own, behind page.css; `script` runs at the end. It names the command that writes it, which replaces only its own
    pages (`core.outputs.page_kind`)."""
    from html import escape

    run = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'{generator(command)}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{head}<title>{escape(title)}</title>'
        f"<style>{_base()}{css}</style></head><body><main>{body}</main>{run}</body></html>\n"
    )


def generator(command: str) -> str:
    """Return the line of a page's head that names the command that wrote it."""
    return f'<meta name="generator" content="mlx-transformer {command}">'


def _base() -> str:
    from .script import compact_style

    return compact_style(neighbour_texts(__file__, "page.css"))


def neighbour_texts(file: str, *names: str) -> str:
    """Return the text of the style sheets or scripts that lie beside a module, `file`, one after the other."""
    from pathlib import Path

    return "".join(Path(file).parent.joinpath(name).read_text(encoding="utf-8") for name in names)


def data_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] = (),
    marked: Collection[int] = (),
    named: bool = False,
) -> str:
    """Return a table. All cells are HTML already, those of the head too; no head: no row of names. `numbers`: the
    columns set to the right. `marked`: the rows that stand out. named: the first cell of a row is its name."""
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
    """Return HTML in a frame of its own, which scrolls sideways where it is too wide."""
    return f'<div class="card">{html}</div>'


def key(names: Iterable[tuple[str, str]]) -> str:
    """Return the legend of coloured lines: (colour, name) of each."""
    from html import escape

    dots = " ".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in names)
    return f'<p class="key">{dots}</p>'


def table(title: str, rows: Iterable[Sequence[str]], head: bool = False) -> str:
    """Return what a notebook shows: a title above rows, whose first cells name them, in the colours of the page around
    it. head: the first row names the columns. All text is escaped."""
    from html import escape

    lines = []
    for number, (name, *cells) in enumerate(rows):
        tag = "th" if head and number == 0 else "td"
        rest = "".join(f"<{tag}{LEFT}>{escape(cell)}</{tag}>" for cell in cells)
        lines.append(f'<tr><th scope="row"{LEFT}>{escape(name)}</th>{rest}</tr>')
    return f"<p><b>{escape(title)}</b></p><table>{''.join(lines)}</table>"
