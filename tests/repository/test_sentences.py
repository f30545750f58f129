"""The one rule for docstrings and comments that a test can hold: no sentence begins with "Of"."""

import io
import re
import tokenize
from pathlib import Path

import pytest
from imports import ROOT

ROOMS = [f"export/{room}" for room in ("explain", "graph", "package", "precision", "targets", "validate")]
BEGINS = re.compile(r"(?:^|[.:;!?] |[.:;!?]\n)\s*(Of [^.]{0,30})")


def begun_with_of(source: str) -> list[str]:
    """Return the sentences of docstrings and comments that begin so, with their lines."""
    found, comment = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            # The end of a line of comment is no end of a sentence.
            comment = f"{comment} {token.string.lstrip('# ')}".strip()
            continue
        if token.type == tokenize.STRING and token.string.startswith('"""'):
            text = re.sub(r"\s*\n\s*(?=\S)", " ", re.sub(r"\n\s*\n", ".\n", token.string.strip('"')))
            found += [f"{token.start[0]}: {each}" for each in BEGINS.findall(text)]
        if token.type not in (tokenize.NL, tokenize.NEWLINE) and comment:
            found += [f"{token.start[0]}: {each}" for each in BEGINS.findall(comment)]
            comment = ""
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_sentence_begins_with_of(room: str) -> None:
    paths = sorted(Path(ROOT, room).rglob("*.py"))
    assert paths
    begun = {path.name: begun_with_of(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: sentences for name, sentences in begun.items() if sentences} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""Of one layer."""\n',
        '"""Sizes. Of one\nlayer."""\n',
        "x = 1  # Of one layer\n",
        "# A layer: Of the\n# last\nx = 1\n",
        '"""First.\n\nOf the second paragraph."""\n',
    ],
)
def test_such_a_sentence_is_seen(source: str) -> None:
    assert len(begun_with_of(source)) == 1


@pytest.mark.parametrize("source", ['"""The best\nOf all."""\n', "# the best\n# Of all\nx = 1\n", 's = "Of text"\n'])
def test_a_line_or_a_text_may_begin_so(source: str) -> None:
    assert begun_with_of(source) == []
