"""Small tables that objects show themselves as in Jupyter (`_repr_html_`), in the colours of the page around them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CELL = "text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:0;background:none;overflow-wrap:anywhere"


def table(title: str, rows: Iterable[Sequence[str]], head: bool = False) -> str:
    """HTML of a title above rows, whose first cells name them; head: the first row names the columns. All text is
    escaped."""
    from html import escape

    lines = []
    for number, (name, *cells) in enumerate(rows):
        tag = "th" if head and number == 0 else "td"
        rest = "".join(f'<{tag} style="{CELL}">{escape(cell)}</{tag}>' for cell in cells)
        name = f'<th scope="row" style="{CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        lines.append(f'<tr style="background:none">{name}{rest}</tr>')
    caption = f'<caption style="{CELL};font-weight:600;color:inherit;caption-side:top">{escape(title)}</caption>'
    return f'<table style="border-collapse:collapse;font-size:13px">{caption}{"".join(lines)}</table>'
