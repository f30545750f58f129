"""The guide: its examples are run, its numbers are theirs, and its links to code name what they lead to."""

from __future__ import annotations

import contextlib
import io
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from assemble.markdown import LINK, lines_of
from claims.table import ROWS
from documents import Block, blocks
from imports import ROOT
from sacrebleu import CHRF

from mlx_transformer.core.positions import sinusoids
from mlx_transformer.decoding.options import Options
from mlx_transformer.nn.attention import attention_weights
from mlx_transformer.nn.masks import causal_mask
from mlx_transformer.nn.norms import LayerNorm
from mlx_transformer.training.optimizers import noam

STEPS = [page for page in sorted((ROOT / "docs/guide").glob("*.md")) if page.stem != "index"]
TRAINS = "pictures"  # half of the time of all; its numbers are row 41's, which a test computes
PAPER = {"section 5.1": (4.5, 25_000, 37_000), "table 2": (27.3, 28.4), "section 6.1": (4,)}
"""Numbers of the paper, by where they stand there."""
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
IN_THE_PAPER = re.compile(r"\b((?:section|table|equation|formula) \d+(?:\.\d+)*)")
IN_A_ROW = re.compile(r"\brows? (\d+(?:(?:, | and |, and row )\d+)*)")
YEAR = re.compile(r"\b((?:19|20)\d\d)(?=[,.);]|$)")
BY_NAME = pytest.mark.parametrize("page", STEPS, ids=lambda page: page.stem)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem == TRAINS else ()) for page in STEPS],
    ids=lambda page: page.stem,
)
def test_examples_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in their order, as a reader pastes them one after another."""
    monkeypatch.chdir(tmp_path)
    found = blocks(page.read_text(encoding="utf-8"))
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
    assert unproved(page.read_text(encoding="utf-8")) == []


def unproved(text: str) -> list[str]:
    """Numbers of a page's sentences that stand neither in its examples nor, as the sentence says where, in the paper or
    in a row of the claims, whose numbers are compared with what the code computes (tests/claims)."""
    examples = {value(number) for block in blocks(text) for number in NUMBER.findall(block.code)}
    found = []
    for sentence in sentences_of(text):
        proved = set(examples).union(*(PAPER.get(place, ()) for place in IN_THE_PAPER.findall(sentence)))
        for row in (int(row) for rows in IN_A_ROW.findall(sentence) for row in re.findall(r"\d+", rows)):
            for name, claimed in ROWS[row].numbers.items():
                proved |= {*claimed.values, *map(value, NUMBER.findall(name))}
        for cited in (IN_A_ROW, IN_THE_PAPER, YEAR):
            sentence = cited.sub("", sentence)
        found += [number for number in NUMBER.findall(sentence) if value(number) not in proved]
    return found


def sentences_of(text: str) -> list[str]:
    """Prose alone: no code, formula, heading or address."""
    prose = [
        "" if fenced or line.startswith(("    ", "#", "<!--")) else line.removeprefix("> ")
        for line, fenced in lines_of(text)
    ]
    joined = re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"\]\([^)]*\)", "]", "\n".join(prose)))
    return re.split(r"(?<=[.:;!?])\s+", joined)


def value(number: str) -> float:
    return float(number.replace(",", ""))


def test_a_number_from_nowhere_is_seen() -> None:
    """Of a row that the sentence names, or of none; a year and a section are no such numbers."""
    assert unproved("Of 16 blocks (row 34) or 7 heads, 0.5 in 2017; section 5.4 has 4.5.") == ["7", "0.5", "4.5"]


@BY_NAME
def test_links_to_code_say_what_they_lead_to(page: Path) -> None:
    """That the definition is there is tested with all links (tests/repository)."""
    links = [match.groups() for match in LINK.finditer(page.read_text(encoding="utf-8")) if match[3].endswith(".py")]
    directives = re.findall(r"^<!-- (?:twins|excerpt) .* -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert links or directives, "no code beside the text"
    for _, label, file, symbol in links:
        name = label.strip("`")
        assert symbol or file.startswith("../../tests/"), f"{file}: names no definition"
        if label.startswith("`") and re.fullmatch(r"[\w.]+", name):
            assert symbol == name or symbol.endswith(f".{name}"), f"{label} leads to {symbol}"


def test_the_way_leads_through_every_page_in_order() -> None:
    """index.md lists all steps as the site does."""
    table = [
        line for line in (ROOT / "docs/guide/index.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    listed = [match[3] for match in LINK.finditer("\n".join(table))]
    order = list(dict.fromkeys(listed))
    assert sorted(order) == sorted(page.name for page in STEPS)
    in_site = re.findall(r"docs/guide/(\w+\.md)", (ROOT / "docs/site.toml").read_text(encoding="utf-8"))
    assert in_site == ["index.md", *order]


def test_the_slips_of_the_notes_are_named() -> None:
    """On the pages that the index lists, each by what shows it."""
    slips = {page.stem: re.findall(r"^> ?(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in STEPS}
    named = {name: " ".join(lines) for name, lines in slips.items() if lines}
    index = " ".join((ROOT / "docs/guide/index.md").read_text(encoding="utf-8").split())
    listed = re.search(r"\*\*Slips\.\*\*(.*?)\*\*Sources", index)
    assert listed
    assert named.keys() == set(re.findall(r"\((\w+)\.md\)", listed[1]))


def test_the_terms_of_the_walk_stand_on_the_pages_they_lead_to() -> None:
    glossary = tomllib.loads((ROOT / "export/explain/walk/words.toml").read_text(encoding="utf-8"))["glossary"]
    for term, (_, _, guide) in glossary.items():
        text = " ".join((ROOT / f"docs/guide/{guide}.md").read_text(encoding="utf-8").lower().split())
        assert {"√d_k": "square root of d_k"}.get(term, term.lower()) in text, f"{term}: {guide}"


def shares(logits: list[float], temperature: float = 1) -> list[float]:
    return mx.softmax(mx.array(logits) / temperature).tolist()


SAID: dict[tuple[str, str], Callable[[], bool]] = {
    ("attention", "weights that are positive and sum to 1"): lambda: (
        min(row := attention_weights(*[mx.random.normal((1, 1, 4, 8))] * 2)[0, 0, 0].tolist()) > 0
        and math.isclose(sum(row), 1, rel_tol=1e-5)
    ),
    ("masks", "minus infinity is added to a score that must not count, and 0 to the others"): lambda: (
        shares([3, 4 - math.inf])
        == attention_weights(*[mx.ones((1, 1, 2, 8))] * 2, causal_mask(2, 2))[0, 0, 0].tolist()
        == [1, 0]
    ),
    ("residual", "subtract the mean of its D numbers, divide by their standard deviation"): lambda: mx.allclose(
        LayerNorm(3, 1e-5)(mx.array([[1.0, 2, 6]])), mx.array([[-2.0, -1, 3]]) / math.sqrt(14 / 3), atol=1e-4
    ).item(),
    ("loss", "minus the logarithm of the probability that the right word was given: 0 if it was certain"): lambda: (
        -math.log(1) == 0 < -math.log(0.9) < -math.log(0.1)
    ),
    ("optimizer", "rises linearly, then falls with the root of the step"): lambda: (
        math.isclose(noam(200, 512, 400), 2 * noam(100, 512, 400))
        and math.isclose(noam(1600, 512, 400), noam(400, 512, 400) / 2)
    ),
    ("decoding", "So log p is divided by a *length penalty*"): lambda: 1 == Options().penalty(1) < Options().penalty(9),
    ("decoding", "a small one makes the choice surer, a large one evener"): lambda: (
        max(shares([1, 2, 4], 0.5)) > max(shares([1, 2, 4])) > max(shares([1, 2, 4], 2))
    ),
    ("scores", "counts the second one twice as much (beta = 2)"): lambda: CHRF().beta == 2,
    ("positions", "The base of the frequencies is 10000, not 1000"): lambda: math.isclose(
        sinusoids(2, 4)[1, 2], math.sin(10000**-0.5), rel_tol=1e-6
    ),
    ("classifier", "The word with the largest product is the most probable one"): lambda: (
        shares([1, 4, 2]).index(max(shares([1, 4, 2]))) == 1
    ),
}


@pytest.mark.parametrize(("page", "said"), list(SAID), ids=lambda text: text[:24])
def test_what_a_page_says_in_words_is_so(page: str, said: str) -> None:
    text = " ".join((ROOT / f"docs/guide/{page}.md").read_text(encoding="utf-8").split())
    assert said in text
    assert SAID[page, said]()
