"""A page of the site for each claim: its formula, numbers, figure or table, controls, and what notes get wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from claims.formula import as_html, as_mathml

from .captions import beside, titled, within
from .directives import SourceLink
from .symbols import definition

INDEX = "docs/claims/README.md"
SHORT = 45
"""Most letters of a name in the list of pages."""
ANCHOR = re.compile(r'<a id="row-(\d+)"></a>\d+')


def rows() -> Mapping[int, Any]:
    return import_module("claims.table").ROWS  # needs MLX


def path_of(number: int) -> str:
    return f"claims/{number}.md"


def named(row: Any) -> str:
    """Short, for the list of pages: `19 Attention is blind to order`."""
    sentence = re.split(r"[.;]", row.claim)[0]
    return f"{row.number} {sentence if len(sentence) <= SHORT else re.split('[:,]', sentence)[0]}"


def with_links(index: str, address: Callable[[str], str]) -> str:
    """The table of all rows: a row's number leads to its page."""
    return ANCHOR.sub(
        lambda row: (
            f'<a id="row-{row[1]}" href="{address(path_of(int(row[1]))).removesuffix(".md")}.html">{row[1]}</a>'
        ),
        index,
    )


def page(row: Any, root: Path, figure: str | None, link: SourceLink) -> str:
    """Markdown. `figure`: the file of a trained model's figure, relative to the page."""
    parts = [
        f"# {row.number}. {row.claim}",
        f'<div class="formula" tabindex="0">{as_mathml(row.formula)}</div>',
        _numbers(row),
    ]
    parts += [_shown(row, root, figure)]
    if row.missing:
        parts += [f"**Not here yet.** {row.missing}"]
    if row.slip:
        parts += [f"**What notes get wrong.** {row.slip}"]
    controls = "\n".join(f"- {_control(test, root, link)}" for test in row.tests)
    parts += ["## How it is tested", f"Each number is computed anew by the tests. Beside them:\n\n{controls}"]
    code = ", ".join(_source(symbol, root, link) for symbol in (*row.symbols, row.compute, row.shown) if symbol)
    parts += ["## Code", f"{code}. On your machine: `mlx-transformer claims {row.number}`."]
    return "\n\n".join(part for part in parts if part)


def table(row: Any, caption: str = "") -> str:
    """A row's table as a table of the page, with a caption."""
    made = import_module("claims.table").called(row.table)
    lines = [made.head, ["-"] * len(made.head), *made.rows]
    text = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
    return titled(text, caption) if caption else text


def _numbers(row: Any) -> str:
    lines = [f"| {as_html(name).replace('|', '&#124;')} | {escape(c.text())} |" for name, c in row.numbers.items()]
    return "\n".join(["| number | claimed |", "|-|-|", *lines])


def _shown(row: Any, root: Path, figure: str | None) -> str:
    name = import_module("claims.index").shown().get(row.number, row.picture.replace("_", " ").capitalize())
    drawn = root / f"docs/pictures/claims/{row.number:02}.svg"
    if row.table is not None:
        return table(row, name)
    if drawn.is_file():
        return within(drawn.read_text(encoding="utf-8"), f"f{drawn.stem}", name)
    return beside(figure, name) if figure else ""


def _control(test: str, root: Path, link: SourceLink) -> str:
    file, _, name = test.partition("::")
    said = re.search(r'"""(.+?)(?:"""|\n\n)', definition(root / "tests" / file, name).code, re.DOTALL)
    label = name.removeprefix("test_").replace("_", " ")
    return link(f"tests/{file}", name, label) + (f": {' '.join(said[1].split())}" if said else "")


def _source(symbol: Any, root: Path, link: SourceLink) -> str:
    file = import_module("claims.index").source_of(symbol)
    name = symbol.__qualname__
    return link(file, name, f"`{name}`")
