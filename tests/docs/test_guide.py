"""The guide: its examples are run, its numbers are theirs, and its links to code name what they lead to."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from assemble.markdown import LINK, lines_of
from documents import Block, blocks
from imports import ROOT

PAGES = sorted((ROOT / "docs/guide").glob("*.md"))
STEPS = [page for page in PAGES if page.stem != "index"]
BY_NAME = pytest.mark.parametrize("page", STEPS, ids=lambda page: page.stem)
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
IN_THE_PAPER = re.compile(r"\b(?:section|table|equation|formula) \d+(?:\.\d+)*")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@BY_NAME
def test_examples_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in their order, as a reader pastes them one after another."""
    monkeypatch.chdir(tmp_path)
    found = blocks(text_of(page))
    assert found
    names: dict[str, object] = {"__name__": page.stem}
    for code, said in zip(found[::2], found[1::2], strict=True):
        assert (code.kind, said.kind) == ("python", "text"), code
        assert printed(code, names) == said.code, f"{page.name}:{said.line}"


def printed(block: Block, names: dict[str, object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.code, f"line {block.line}", "exec"), names)
    return out.getvalue()


@BY_NAME
def test_numbers_are_those_of_the_examples(page: Path) -> None:
    assert unproved(text_of(page)) == []


def unproved(text: str) -> list[str]:
    """Sentences with a number that stands neither in the page's examples nor, as they say where, in the paper."""
    known = {value(number) for block in blocks(text) for number in NUMBER.findall(block.code)}
    return [sentence for sentence in sentences(text) if not numbers_in(sentence) <= known]


def sentences(text: str) -> list[str]:
    """Of the prose, slips as well: no code, formula, heading or address."""
    skipped = ("    ", "#", "<!--")
    lines = [("" if fenced or line.startswith(skipped) else line) for line, fenced in lines_of(text)]
    prose = "\n".join(line.removeprefix("> ") for line in lines)
    in_lines = re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"\]\([^)]*\)", "]", prose))
    return re.split(r"(?<=[.:;!?])\s+", in_lines)


def numbers_in(sentence: str) -> set[float]:
    return set() if IN_THE_PAPER.search(sentence) else {value(number) for number in NUMBER.findall(sentence)}


def value(number: str) -> float:
    return float(number.replace(",", ""))


@pytest.mark.parametrize(
    ("sentence", "faults"),
    [
        ("Six words, 8 heads of 64.", 0),
        ("It has 9 heads.", 1),
        ("It has 2,048.0 of them, and 2048 more.", 0),
        ("It has 37,000 pieces (section 5.1).", 0),
        ("> The slip is 52,\n> not 512.", 1),
        ("> It is not 2,048,\n> but 64.", 0),
        ("    formula 52", 0),
        ("See [the page](other9.md) of layer_9.", 0),
    ],
)
def test_a_number_from_nowhere_is_seen(sentence: str, faults: int) -> None:
    page = f"# 77\n\n{sentence}\n\n```python\nprint(8, 64 * 32)\n```\n\n```text\n8 2048\n```\n"
    assert len(unproved(page)) == faults


@BY_NAME
def test_links_to_code_say_what_they_lead_to(page: Path) -> None:
    """That the definition is there is tested with all links (tests/repository)."""
    links = [match.groups() for match in LINK.finditer(text_of(page)) if match[3].endswith(".py")]
    directives = re.findall(r"^<!-- (?:twins|excerpt) .* -->$", text_of(page), re.MULTILINE)
    assert links or directives, "no code beside the text"
    for _, label, file, symbol in links:
        name = label.strip("`")
        assert symbol or file.startswith("../../tests/"), f"{file}: names no definition"
        if label.startswith("`") and re.fullmatch(r"[\w.]+", name):
            assert symbol == name or symbol.endswith(f".{name}"), f"{label} leads to {symbol}"


def test_the_way_leads_through_every_page_in_order() -> None:
    """index.md lists all steps as the site does."""
    listed = [match[3] for match in LINK.finditer(text_of(ROOT / "docs/guide/index.md")) if match[3].endswith(".md")]
    order = list(dict.fromkeys(listed))
    assert sorted(order) == sorted(page.name for page in STEPS)
    in_site = re.findall(r"docs/guide/(\w+\.md)", text_of(ROOT / "docs/site.toml"))
    assert in_site == ["index.md", *order]


def test_the_slips_of_the_notes_are_named() -> None:
    """Three: the base of the frequencies, the width, the table of weights."""
    slips = {page.stem: re.findall(r"^> (.*)$", text_of(page), re.MULTILINE) for page in STEPS}
    named = {name: " ".join(lines) for name, lines in slips.items() if lines}
    assert named.keys() == {"positions", "attention"}
    assert re.search(r"10000, not 1000\b.*512, not 52\b", named["positions"])
    assert re.search(r"is said to be of Q = K = X\..*1\.001 is no fault but rounding", named["attention"])
