"""The words that two sentences do not share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby

# Words, or what stands between them; a sign each where a script writes no spaces.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_PARTS = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+|\s+|[^\w\s]")

MAX_WORD_PAIRS = 4_000_000
"""The most pairs of words that are compared; sentences with more differ as a whole."""

Marked = list[tuple[str, bool]]
"""A sentence in pieces: (text, whether the other one lacks it)."""


def marked(a: str, b: str) -> tuple[Marked, Marked]:
    """Mark the words of both sentences; joined, the pieces of each are the sentence."""
    if a == b:
        return [(a, False)], [(b, False)]
    words = _PARTS.findall(a), _PARTS.findall(b)
    if len(words[0]) * len(words[1]) > MAX_WORD_PAIRS:
        return [(a, True)], [(b, True)]
    codes = SequenceMatcher(None, *words, autojunk=False).get_opcodes()
    first = ((words[0][i:j], tag != "equal") for tag, i, j, _, _ in codes)
    second = ((words[1][i:j], tag != "equal") for tag, _, _, i, j in codes)
    return list(_joined(first)), list(_joined(second))


def _joined(pieces: Iterator[tuple[Sequence[str], bool]]) -> Iterator[tuple[str, bool]]:
    for differs, group in groupby(((word, differs) for words, differs in pieces for word in words), lambda p: p[1]):
        yield "".join(word for word, _ in group), differs
