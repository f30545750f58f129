"""Texts, or pairs of texts, in classes, by an encoder whose head has them, whatever runtime computes its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_pairs import Pair
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

from .translate import fitting_tokenizer

Text = str | tuple[str, str]
"""One text, or two of which the model says something together."""


@dataclass(frozen=True)
class Scored:
    """A class and how probable it is."""

    label: str
    probability: float


def classify(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    logits: Callable[..., Any],
    texts: Sequence[Text],
    several: bool = False,
    where: str = "model",
) -> list[list[Scored]]:
    """Every class of the model with its probability, the likeliest first, for each text.

    logits: ids (1, L), and token_types (1, L) in a model that reads them -> (1, C). several: a text may be in several
    classes or in none, each with a probability of its own; else, and of more than one class, they sum to 1. `UserError`
    if the model, which `where` names, has no classes of texts, and for a text that is longer than it takes.
    """
    tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", "classify", words=False)
    if config.head.kind != "classes":
        raise UserError(f"{where}: classify needs a head of kind 'classes'; its head is of kind {config.head.kind!r}")
    found = []
    for number, row in enumerate(_rows(tokenizer, texts, config.max_positions), start=1):
        if len(row.ids) > config.max_positions:
            raise UserError(f"text {number}: {len(row.ids)} tokens, the model takes at most {config.max_positions}")
        types = {"token_types": [row.token_types]} if config.token_types else {}
        scores = np.asarray(logits([row.ids], **types), np.float64)[0]
        if not np.isfinite(scores).all():
            raise UserError(f"{where}: its logits are not finite; check its weights")
        shares = 1 / (1 + np.exp(-scores)) if several or len(scores) == 1 else np.exp(scores - scores.max())
        shares = shares if several or len(scores) == 1 else shares / shares.sum()
        order = np.argsort(-shares, kind="stable")
        found.append([Scored(config.head.labels[i], float(shares[i])) for i in order])
    return found


def _rows(tokenizer: Tokenizer, texts: Sequence[Text], most: int) -> Iterator[Pair]:
    """The ids of each text; a pair that is too long loses the ends of its texts."""
    for number, text in enumerate(texts, start=1):
        if isinstance(text, str):
            ids = tokenizer.encode(text)
            yield Pair(ids, [0] * len(ids))
        elif isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
            yield from tokenizer.encode_pairs([text], most)
        else:
            raise UserError(f"text {number}: must be text, or a pair (text, text), not {type(text).__name__}")
