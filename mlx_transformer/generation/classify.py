"""Texts, or pairs of texts, in classes, by an encoder whose head has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.text_pairs import Pair
from mlx_transformer.system.errors import UserError

from .encoder_head import EncoderHead, softmax
from .line_files import NO_REPORT, LineReport

Text = str | tuple[str, str]
"""One text, or two of which the model says something together."""


@dataclass(frozen=True)
class Scored:
    """A class and how probable it is; by a head of scores (`core/heads.py`) its score, whatever number that is."""

    label: str
    probability: float


def classify(
    encoder: EncoderHead, texts: Sequence[Text], several: bool | None = None, report: LineReport = NO_REPORT
) -> list[list[Scored]]:
    """Return every class of the model with its probability, the likeliest first, for each text.

    several: a text may be in several classes or in none, each with a probability of its own; else, and of more than one
    class, they sum to 1; None: as the model's config says, by which they may be scores. `UserError` for a text that is
    longer than the model takes, unless `report` counts it; a pair that is too long loses the ends of its texts.
    """
    rows = text_rows(encoder, texts, report)
    return [scored(encoder, logits, several) for logits in encoder.logits(rows, report.done)]


def scored(encoder: EncoderHead, logits: NDArray[np.float64], several: bool | None = None) -> list[Scored]:
    """Return what the logits (C,) of a text mean, as `classify` does."""
    head = encoder.config.head
    if head.scores and several is None:
        return [Scored(head.labels[i], float(logits[i])) for i in np.argsort(-logits, kind="stable")]
    alone = (head.several if several is None else several) or len(head.labels) == 1
    shares = np.exp(-np.logaddexp(0, -logits)) if alone else softmax(logits)
    return [Scored(head.labels[i], float(shares[i])) for i in np.argsort(-shares, kind="stable")]


def text_rows(encoder: EncoderHead, texts: Sequence[Text], report: LineReport) -> list[Pair]:
    """Return the ids of each text, in their order; what is too long is cut, or refused, as `classify` says."""
    for number, text in enumerate(texts, report.first_line):
        if not isinstance(text, str) and not _is_pair(text):
            raise UserError(f"text {number}: must be text, or a pair (text, text), not {type(text).__name__}")
    pairs = [text for text in texts if isinstance(text, tuple)]
    encoded = iter(encoder.tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    joined = iter(encoder.tokenizer.encode_pairs(pairs) if pairs else ())
    rows = []
    for number, text in enumerate(texts, report.first_line):
        if isinstance(text, tuple):
            row = next(joined)
            if len(row.ids) > encoder.most:
                [row] = encoder.tokenizer.encode_pairs([text], encoder.most)
                if report.on_overlong is not None:
                    report.on_overlong(number)
            rows.append(row)
            continue
        ids = next(encoded)
        if len(ids) > encoder.most:
            if report.on_overlong is None:
                raise UserError(f"text {number}: {len(ids)} tokens, the model takes at most {encoder.most}")
            report.on_overlong(number)
            ids = [*ids[: encoder.most - 1], ids[-1]]
        rows.append(Pair(ids, [0] * len(ids)))
    return rows


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
