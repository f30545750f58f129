"""Fill in <mask> with an encoder trained to restore masked words."""

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
    """One guess for a <mask>."""

    token: str
    """The guessed text."""
    probability: float
    text: str
    """The line with this guess in place, and with the best guess for every other <mask>."""


def fill(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    logits: Callable[[list[list[int]]], Any],
    lines: str | Sequence[str],
    top_k: int = 5,
    where: str = "model",
    report: LineReport = NO_REPORT,
) -> list[list[list[Filling]]]:
    """Return, for each line and each <mask> in it, the `top_k` likeliest tokens.

    A <mask> takes the space before it. The vocabulary's own spelling, e.g. [MASK], means the same.

    logits: ids (1, L) -> (1, L, V). where: the model's name in error messages. report: line numbers and progress, if
    the lines are a file's.
    Raises `UserError` if the model isn't an encoder with a mask token, if a line has no <mask> or is longer than the
    model takes, or for a wrong `top_k`.
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
    """Return the tokenizer. Raises `UserError` if the model can't fill in masks, or has fewer than `top_k` tokens."""
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
    """Yield the ids of each line. Raises `UserError` for a line without <mask>, or longer than the model takes."""
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
    """Return the likeliest tokens for each of M masks. places: their positions; logits (M, V)."""
    if not np.isfinite(logits).all():
        raise UserError("the model's logits are not finite; check its weights")
    logits[:, [*tokenizer.special_ids]] = -np.inf
    logits[:, tokenizer.vocab_size :] = -np.inf  # a published embedding table may have more rows than tokens
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
    """Return the ids of a line, eos included, with the mask token's id for each <mask> and the space before it.

    If the line or the vocabulary has no <mask>, these are the ids of the plain text.
    """
    mask_id = tokenizer.mask_id
    if mask_id is None:
        return tokenizer.encode(line)
    parts = _parts(tokenizer, line)
    if tokenizer.mask_takes_space:
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    begin = len(tokenizer.encode("")) - 1  # tokens before the text, e.g. [CLS]
    first, *others = (ids[:-1] for ids in tokenizer.encode_batch(parts))
    encoded = [first, *(ids[begin:] for ids in others)]
    return [*[id for part in encoded for id in (*part, mask_id)][:-1], tokenizer.eos_id]


def _parts(tokenizer: Tokenizer, line: str) -> list[str]:
    """Split a line at its masks."""
    return re.split("|".join(map(re.escape, {MASK_TOKEN, tokenizer.mask_token})), line)
