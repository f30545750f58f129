"""Hidden words found by an encoder that was trained to restore them, whatever runtime computes its logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import MASK_TOKEN, Tokenizer

from .line_files import NO_REPORT, LineReport
from .translate import as_lines, fitting_tokenizer


@dataclass(frozen=True)
class Filling:
    """One guess for a hidden word."""

    token: str
    """The text in its place."""
    probability: float
    text: str
    """The line with this guess, and for its other masks their best ones."""


def fill(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    logits: Callable[[list[list[int]]], Any],
    lines: str | Sequence[str],
    top_k: int = 5,
    where: str = "model",
    report: LineReport = NO_REPORT,
) -> list[list[list[Filling]]]:
    """Return for each line, for each <mask> in it, the `top_k` likeliest tokens. A space before a <mask> belongs to it;
    the vocabulary's own spelling, as [MASK], means the same.

    logits: ids (1, L) -> (1, L, V). `UserError` if the model, which `where` names, isn't an encoder with a <mask> in
    its vocabulary, for a line without <mask>, or longer than the model takes, and for a wrong `top_k`. report: of lines
    that are a file's.
    """
    tokenizer = filling_tokenizer(config, tokenizer, where, top_k)
    guesses: list[list[list[Filling]]] = []
    lines = as_lines(lines)
    for ids in masked_rows(config, tokenizer, lines, report.first_line):
        places = [i for i, id in enumerate(ids) if id == tokenizer.mask_id]
        guesses.append(_guesses(tokenizer, ids, places, np.array(logits([ids]), np.float64)[0, places], top_k))
        report.done(len(guesses) / len(lines))
    return guesses


def filling_tokenizer(config: TransformerConfig, tokenizer: Tokenizer | None, where: str, top_k: int = 1) -> Tokenizer:
    """Return the tokenizer of a model that fills in `top_k` guesses; `UserError` for one that can't."""
    tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", "fill")
    most = tokenizer.vocab_size - len(tokenizer.special_ids)
    if tokenizer.mask_id is None:
        raise UserError(f"{where}: its vocabulary has no {MASK_TOKEN}: it wasn't trained to restore text")
    if not 1 <= top_k <= most:
        raise UserError("{top_k}: give 1 to {}", most, top_k=top_k)
    return tokenizer


def masked_rows(
    config: TransformerConfig, tokenizer: Tokenizer, lines: Sequence[str], first_line: int = 1
) -> Iterator[list[int]]:
    """Yield the ids of each line; `UserError` for one without a <mask>, or longer than the model takes."""
    for number, line in enumerate(lines, first_line):
        if len(_parts(tokenizer, line)) == 1:
            raise UserError(f"line {number}: holds no {MASK_TOKEN}; put it where a word is to be found")
        ids = ids_with_masks(tokenizer, line)
        if len(ids) > config.max_positions:
            raise UserError(f"line {number}: {len(ids)} tokens, the model takes at most {config.max_positions}")
        yield ids


def _guesses(
    tokenizer: Tokenizer, ids: list[int], places: list[int], logits: NDArray, top_k: int
) -> list[list[Filling]]:
    """Return for each of the M places of a <mask> its likeliest tokens; logits (M, V)."""
    if not np.isfinite(logits).all():
        raise UserError("the model's logits are not finite; check its weights")
    logits[:, [*tokenizer.special_ids]] = -np.inf
    logits[:, tokenizer.vocab_size :] = -np.inf  # rows that a published table has for no token
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]  # (M, top_k)
    filled = np.array(ids)
    filled[places] = best[:, 0]
    likeliest = []
    for mask, place in enumerate(places):
        guesses = []
        for token in best[mask].tolist():
            text = tokenizer.decode([*filled[:place].tolist(), token, *filled[place + 1 :].tolist()])
            guesses.append(Filling(tokenizer.decode([token]), float(probabilities[mask, token]), text))
        likeliest.append(guesses)
    return likeliest


def ids_with_masks(tokenizer: Tokenizer, line: str) -> list[int]:
    """Return ids of a line, eos included, in which each <mask> is the id of what stands for hidden text; a space before
    it belongs to it. Without a <mask> (in the line, or in the vocabulary) those of the plain text."""
    mask_id = tokenizer.mask_id
    if mask_id is None:
        return tokenizer.encode(line)
    parts = _parts(tokenizer, line)
    if tokenizer.mask_takes_space:
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    begin = len(tokenizer.encode("")) - 1  # tokens that stand before a published encoder's text, as [CLS]
    first, *others = (ids[:-1] for ids in tokenizer.encode_batch(parts))
    encoded = [first, *(ids[begin:] for ids in others)]
    return [*[id for part in encoded for id in (*part, mask_id)][:-1], tokenizer.eos_id]


def _parts(tokenizer: Tokenizer, line: str) -> list[str]:
    """Return what stands before, between and behind the hidden words of a line."""
    return re.split("|".join(map(re.escape, {MASK_TOKEN, tokenizer.mask_token})), line)
