"""Words of a text with their labels (names of persons, parts of speech), by an encoder whose head classifies tokens.

Labels of the form B-PER and I-PER (Ramshaw and Marcus 1995) begin and continue an entity, PER; O is none. Neighbouring
tokens of one label are one entity, unless the later one begins another: what `transformers` calls the aggregation
"simple". Each token has its likeliest label by itself. A text that is too long for one row is read in windows that
overlap; of two that a token is in, the one counts in which more of the text stands around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.heads import BEGINS, CONTINUES, OUTSIDE
from mlx_transformer.core.text_pairs import Window

from .encoder_head import EncoderHead, softmax
from .line_files import NO_REPORT, LineReport
from .translate import as_lines


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


def tag(encoder: EncoderHead, texts: str | Sequence[str], report: LineReport = NO_REPORT) -> list[list[Tagged]]:
    """Return the entities of each text, of any length, in its order, with their places in it."""
    lines = as_lines(texts)
    located = encoder.tokenizer.encode_places(lines)
    windows = [each.windows(encoder.most) for each in located]
    logits = iter(encoder.logits([window.row for each in windows for window in each], report.done))
    labels = encoder.config.head.labels
    tagged = []
    for line, each, own in zip(lines, located, windows, strict=True):
        places = [place for place in each.places if place is not None]
        shares = _joined(len(places), own, [softmax(next(logits)) for _ in own])
        tagged.append(_entities(line, _tokens(places, shares, labels)))
    return tagged


def _joined(count: int, windows: Sequence[Window], shares: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the shares (L, C) of a text's tokens, of those (tokens of a row, C) of its windows."""
    joined = np.zeros((count, shares[0].shape[1]))
    around = np.full(count, -1.0)
    for window, rows in zip(windows, shares, strict=True):
        place = np.arange(window.count)
        before = place if window.first else np.full(window.count, np.inf)
        behind = place[::-1] if window.first + window.count < count else np.full(window.count, np.inf)
        nearest, part = np.minimum(before, behind), slice(window.first, window.first + window.count)
        better = nearest > around[part]
        joined[part][better] = rows[window.at : window.at + window.count][better]
        around[part][better] = nearest[better]
    return joined


def _tokens(places: Sequence[tuple[int, int]], shares: NDArray[np.float64], labels: Sequence[str]) -> list[_Token]:
    """Return the tokens of a text (L), with their shares (L, C)."""
    tokens = []
    for place, row in zip(places, shares, strict=True):
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
    entities = []
    for group in groups:
        start, end = trimmed(text, group[0].place[0], group[-1].place[1])
        if group[0].label != OUTSIDE and start < end:
            probability = sum(token.probability for token in group) / len(group)
            entities.append(Tagged(group[0].label, probability, start, end, text[start:end]))
    return entities


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place without the spaces at its ends, which some vocabularies count to a word."""
    text_left = text[start:end].lstrip()
    return end - len(text_left), end - len(text_left) + len(text_left.rstrip())
