"""Words of a text with their labels (names of persons, parts of speech), by an encoder whose head classifies tokens.

Labels of the form B-PER and I-PER (Ramshaw and Marcus 1995) begin and continue an entity, PER; O is none. Neighbouring
tokens of one label are one entity, unless the later one begins another: what `transformers` calls the aggregation
"simple". Each token has its likeliest label by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.text_pairs import Located, Pair

from .encoder_head import EncoderHead, softmax
from .lines import UNTOLD, Told
from .translate import as_lines

OUTSIDE = "O"
"""The label of what is in no entity."""
BEGINS, CONTINUES = "B-", "I-"


@dataclass(frozen=True)
class Tagged:
    """A part of a text and its label."""

    label: str
    probability: float
    """The mean of its tokens' probabilities."""
    start: int
    """Its first character, counted from 0."""
    end: int
    """The character after its last one."""
    text: str


class _Token(NamedTuple):
    label: str
    begins: bool
    probability: float
    place: tuple[int, int]


def tag(encoder: EncoderHead, texts: str | Sequence[str], told: Told = UNTOLD) -> list[list[Tagged]]:
    """Return the entities of each text, in its order, with their places in it.

    `UserError` for a text that is longer than the model takes, unless `told` is told of it; then its end is left out.
    """
    lines = as_lines(texts)
    located = []
    for number, each in enumerate(encoder.tokenizer.encode_places(lines), told.first_line):
        cut = encoder.is_overlong(len(each.ids), number, told)
        located.append(each.cut(encoder.most) if cut else each)
    logits = encoder.logits([Pair(each.ids, [0] * len(each.ids)) for each in located], told.done)
    labels = encoder.config.head.labels
    return [
        _entities(line, _tokens(each, softmax(rows), labels))
        for line, each, rows in zip(lines, located, logits, strict=True)
    ]


def _tokens(located: Located, shares: NDArray[np.float64], labels: Sequence[str]) -> list[_Token]:
    """The tokens of the text itself; shares (L, C)."""
    tokens = []
    for place, row in zip(located.places, shares, strict=True):
        if place is not None:
            label, best = labels[int(row.argmax())], float(row.max())
            name = label[len(BEGINS) :] if label.startswith((BEGINS, CONTINUES)) else label
            tokens.append(_Token(name, label.startswith(BEGINS), best, place))
    return tokens


def _entities(text: str, tokens: Sequence[_Token]) -> list[Tagged]:
    groups: list[list[_Token]] = []
    for token in tokens:
        if groups and groups[-1][-1].label == token.label and not token.begins:
            groups[-1].append(token)
        else:
            groups.append([token])
    found = []
    for group in groups:
        start, end = trimmed(text, group[0].place[0], group[-1].place[1])
        if group[0].label != OUTSIDE and start < end:
            probability = sum(token.probability for token in group) / len(group)
            found.append(Tagged(group[0].label, probability, start, end, text[start:end]))
    return found


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place without the spaces at its ends, which some vocabularies count to a word."""
    kept = text[start:end].lstrip()
    return end - len(kept), end - len(kept) + len(kept.rstrip())
