"""Small tables that objects show themselves as in Jupyter (`_repr_html_`), in the colours of the page around them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEFT = ' style="text-align:left;vertical-align:top"'  # Jupyter sets cells to the right


def table(title: str, rows: Iterable[Sequence[str]], head: bool = False) -> str:
    """HTML of a title above rows, whose first cells name them; head: the first row names the columns. All text is
    escaped."""
    from html import escape

    lines = []
    for number, (name, *cells) in enumerate(rows):
        tag = "th" if head and number == 0 else "td"
        rest = "".join(f"<{tag}{LEFT}>{escape(cell)}</{tag}>" for cell in cells)
        lines.append(f'<tr><th scope="row"{LEFT}>{escape(name)}</th>{rest}</tr>')
    return f"<p><b>{escape(title)}</b></p><table>{''.join(lines)}</table>"
