"""The rows as pages show them: the table of README.md, and the figures that pages of docs/ name.

PYTHONPATH=.:docs python -m claims.index
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import drawing
from .table import ROWS, called

BEGIN, END = "<!-- rows: made by index.py -->\n", "<!-- /rows -->\n"
ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures/claims"
PICTURE = re.compile(r"^!\[(.+)\]\(\.\./pictures/claims/(\d\d)\.svg\)$", re.MULTILINE)


def index() -> str:
    """Markdown, with links from `docs/claims/`."""
    lines = ["| | claim | code | tests | figure |", "|-|-|-|-|-|"]
    for row in ROWS.values():
        code = ", ".join(f"[{symbol.__name__}]({_file(symbol)})" for symbol in row.symbols)
        tests = ", ".join(
            f"[{name.removeprefix('test_').replace('_', ' ')}](../../tests/{file})"
            for file, _, name in (test.partition("::") for test in row.tests)
        )
        figure = "" if row.shown is None else f"[{row.picture.replace('_', ' ')}]({_file(row.shown)})"
        claim = f"{row.claim} *{row.missing}*" if row.missing else row.claim
        place = f'<a id="row-{row.number}"></a>{row.number}'
        lines.append(f"| {place} | {claim.replace('|', '&#124;')} | {code} | {tests} | {figure} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """A page with the table in its place between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + BEGIN + "\n" + index() + "\n" + end + after


def source_of(symbol: Callable[..., Any]) -> str:
    """The file that defines it, relative to the project's root."""
    return Path(inspect.getsourcefile(inspect.unwrap(symbol)) or "").resolve().relative_to(ROOT).as_posix()


def _file(symbol: Callable[..., Any]) -> str:
    """The same, relative to this folder."""
    source = source_of(symbol)
    return source.removeprefix("docs/claims/") if source.startswith("docs/claims/") else f"../../{source}"


def shown() -> dict[int, str]:
    """The rows whose figures pages show, and how a page calls each."""
    pages = sorted(ROOT.glob("docs/*/*.md"))
    return {int(row): label for page in pages for label, row in PICTURE.findall(page.read_text(encoding="utf-8"))}


def picture(number: int, label: str) -> str:
    """The row's figure or table as an SVG file."""
    row = ROWS[number]
    assert row.shown is not None
    with drawing.style():
        made = called(row.shown)
        figure = drawing.as_figure(made) if isinstance(made, drawing.Table) else made
        return drawing.both_palettes(drawing.inline_svg(figure, "f", label))


if __name__ == "__main__":
    page = Path(__file__).with_name("README.md")
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
    PICTURES.mkdir(exist_ok=True)
    for number, label in shown().items():
        (PICTURES / f"{number:02}.svg").write_text(picture(number, label), encoding="utf-8", newline="\n")
