"""Where each number of the guide comes from, one by one: tests/docs/guide_numbers.json, by page, in the text's order.

    PYTHONPATH=.:docs:tests/helpers python tests/helpers/guide_numbers.py

writes it anew: read the difference before it is committed. Each line is a number, or a number as a word, and its
source: a claim of a row that the sentence names, a line of the page's examples, the paper (`PAPER`), a formula, or what
the sentence itself counts or cites; on the page of the claims also what it says is recorded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from assemble.markdown import lines_of
from claims.table import ROWS
from documents import blocks
from imports import ROOT

CLAIMS = ROOT / "docs/claims/README.md"
"""Its numbers beside those of rows are of one machine and one trained model, which the page says: recorded."""
PAGES = [*sorted((ROOT / "docs/guide").glob("*.md")), CLAIMS]
FILE = ROOT / "tests/docs/guide_numbers.json"
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
WORDS: dict[str, int] = dict(
    zip("three four five six seven eight nine ten eleven twelve".split(), range(3, 13), strict=True)
)
IN_WORDS = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
IN_THE_PAPER = re.compile(r"\b((?:section|table|equation|formula) \d+(?:\.\d+)*)")
IN_A_ROW = re.compile(r"\brows? (\d+(?:(?:, | and |, and row )\d+)*)")
YEAR = re.compile(r"\b((?:19|20)\d\d)(?=[,.);]|$)")
CITED = (IN_A_ROW, IN_THE_PAPER, YEAR)
PAPER = {
    "section 5.1": (4.5, 25_000, 37_000),
    "table 2": (27.3, 28.4),
    "section 6.1": (4,),
}
"""Numbers of the paper, by where they stand there."""


def text_of(page: Path) -> str:
    """A page, but for the table that is made of the rows."""
    return page.read_text(encoding="utf-8").partition("<!-- rows: made by")[0]


def name_of(page: Path) -> str:
    return "claims" if page == CLAIMS else page.stem


def value(number: str) -> float:
    word = WORDS.get(number.lower())
    return float(number.replace(",", "")) if word is None else float(word)


def parts_of(text: str) -> list[tuple[str, bool]]:
    """Sentences of the prose, slips as well, and lines of formulas, in order; whether each is a formula. No code,
    heading or address."""
    found: list[tuple[str, bool]] = []
    prose: list[str] = []

    def flush() -> None:
        told = re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"\]\([^)]*\)", "]", "\n".join(prose)))
        found.extend((each, False) for each in re.split(r"(?<=[.:;!?])\s+", told))
        prose.clear()

    for line, fenced in lines_of(text):
        if not fenced and line.startswith("    "):
            flush()
            found.append((line, True))
        else:
            prose.append("" if fenced or line.startswith(("#", "<!--")) else line.removeprefix("> "))
    flush()
    return found


def holds(source: str, number: float, lines: list[str]) -> bool:
    """Whether a source has this number now. lines: of the page's examples."""
    kind, _, rest = source.partition(": ")
    if kind.startswith("row "):
        claimed = ROWS[int(kind[4:])].numbers.get(rest)
        return claimed is not None and number in (*claimed.values, *map(value, NUMBER.findall(rest)))
    if kind == "example":
        return rest in lines and number in map(value, NUMBER.findall(rest))
    if kind == "paper":
        return number in PAPER.get(rest, ())
    return source in ("cited", "counted", "formula", "recorded")


def sources(text: str, otherwise: str = "") -> list[tuple[str, str]]:
    """(number, source) of each number of a page; `otherwise` for one from nowhere."""
    lines = [line for block in blocks(text) for line in block.code.splitlines()]
    found = []
    for part, formula in parts_of(text):
        cited = [match.span(1) for match in (each for said in CITED for each in said.finditer(part))]
        rows = [int(row) for match in IN_A_ROW.finditer(part) for row in re.findall(r"\d+", match[1])]
        tried = [
            *(f"row {row}: {name}" for row in rows if row in ROWS for name in ROWS[row].numbers),
            *(f"paper: {where}" for where in IN_THE_PAPER.findall(part)),
            *(f"example: {line}" for line in lines),
        ]
        matches = [*NUMBER.finditer(part), *IN_WORDS.finditer(part)]
        for match in sorted(matches, key=lambda match: match.start()):
            if any(begin <= match.start() < end for begin, end in cited):
                found.append((match[0], "cited"))
                continue
            last = "counted" if match[0].isalpha() else "formula" if formula else otherwise
            source = next((each for each in tried if holds(each, value(match[0]), lines)), last)
            found.append((match[0], source))
    return found


def lines_of_file(made: dict[str, list[tuple[str, str]]]) -> str:
    """JSON with a line for each number."""
    pages = []
    for name, found in made.items():
        each = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in found)
        pages.append(f"{json.dumps(name)}: [\n{each}\n]")
    return "{\n" + ",\n".join(pages) + "\n}\n"


if __name__ == "__main__":
    made = {name_of(page): sources(text_of(page), "recorded" if page == CLAIMS else "") for page in PAGES}
    assert all(source for found in made.values() for _, source in found), made
    FILE.write_text(lines_of_file(made), encoding="utf-8", newline="\n")
