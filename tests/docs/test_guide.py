"""The guide: its examples are run, its numbers are theirs, and its links to code name what they lead to."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from assemble.markdown import LINK
from documents import Block, blocks
from guide_numbers import CLAIMS, FILE, PAGES, holds, name_of, sources, text_of, value
from imports import ROOT

STEPS = [page for page in PAGES if page.stem != "index" and page != CLAIMS]
TRAINS = "pictures"  # half of the time of all; its numbers are row 41's, which a test computes
BY_NAME = pytest.mark.parametrize("page", STEPS, ids=lambda page: page.stem)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem == TRAINS else ()) for page in STEPS],
    ids=lambda page: page.stem,
)
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
    """Numbers that stand neither in the page's examples nor, as their sentences say where, in the paper or in a row of
    the claims, whose numbers are compared with what the code computes (tests/claims)."""
    return [number for number, source in sources(text) if not source]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_number_is_the_one_of_its_source(page: Path) -> None:
    """One by one: guide_numbers.json says which claim, example or table each is from. A digit that changed is seen, and
    so is a claim that no longer has the number."""
    text = text_of(page)
    listed = [tuple(pair) for pair in json.loads(FILE.read_text(encoding="utf-8"))[name_of(page)]]
    assert [number for number, _ in sources(text)] == [number for number, _ in listed]
    lines = [line for block in blocks(text) for line in block.code.splitlines()]
    for number, source in listed:
        assert holds(source, value(number), lines), (number, source)
        assert source != "recorded" or page == CLAIMS, number


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
    table = [line for line in text_of(ROOT / "docs/guide/index.md").splitlines() if line.startswith("|")]
    listed = [match[3] for match in LINK.finditer("\n".join(table))]
    order = list(dict.fromkeys(listed))
    assert sorted(order) == sorted(page.name for page in STEPS)
    in_site = re.findall(r"docs/guide/(\w+\.md)", text_of(ROOT / "docs/site.toml"))
    assert in_site == ["index.md", *order]


def test_the_slips_of_the_notes_are_named() -> None:
    """On the pages that the index lists, each by what shows it."""
    slips = {page.stem: re.findall(r"^> ?(.*)$", text_of(page), re.MULTILINE) for page in STEPS}
    named = {name: " ".join(lines) for name, lines in slips.items() if lines}
    index = " ".join(text_of(ROOT / "docs/guide/index.md").split())
    listed = re.search(r"\*\*Slips\.\*\*(.*?)\*\*Sources", index)
    assert listed
    assert named.keys() == set(re.findall(r"\((\w+)\.md\)", listed[1]))
