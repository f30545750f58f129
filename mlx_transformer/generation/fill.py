"""Hidden words found by an encoder that was trained to restore them, whatever runtime computes its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import MASK_TOKEN, SPECIAL_TOKENS, Tokenizer
from mlx_transformer.system.errors import UserError

from .translate import as_lines, fitting_tokenizer


@dataclass(frozen=True)
class Filling:
    """One guess for a <mask>."""

    token: str
    """The text in its place."""
    probability: float
    text: str
    """The line with this guess, and for its other masks their best ones."""


class Filler:
    """`logits(ids (1, L)) -> (1, L, V)`, with a tokenizer."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        logits: Callable[[list[list[int]]], Any],
        where: str = "model",
    ):
        """`where` names the model in errors. `UserError` if it isn't an encoder with a <mask> in its vocabulary."""
        tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder", "fill")
        if tokenizer.mask_id is None:
            raise UserError(f"{where}: its vocabulary has no {MASK_TOKEN}: it wasn't trained to restore text")
        self.config, self.tokenizer, self.logits, self.mask_id = config, tokenizer, logits, tokenizer.mask_id

    def fill(self, lines: str | Sequence[str], top_k: int = 5) -> list[list[list[Filling]]]:
        """For each line, for each <mask> in it, the `top_k` likeliest tokens. A space before a <mask> belongs to it.

        `UserError` for a line without <mask>, or longer than the model takes, and for a wrong `top_k`.
        """
        if not 1 <= top_k <= self.config.vocab_size - len(SPECIAL_TOKENS):
            raise UserError(f"top_k={top_k}: give 1 to {self.config.vocab_size - len(SPECIAL_TOKENS)}")
        return [self._line(line, number, top_k) for number, line in enumerate(as_lines(lines), start=1)]

    def _line(self, line: str, number: int, top_k: int) -> list[list[Filling]]:
        if MASK_TOKEN not in line:
            raise UserError(f"line {number}: holds no {MASK_TOKEN}; put it where a word is to be found")
        ids = ids_with_masks(self.tokenizer, line)
        if len(ids) > self.config.max_positions:
            raise UserError(f"line {number}: {len(ids)} tokens, the model takes at most {self.config.max_positions}")
        places = [i for i, id in enumerate(ids) if id == self.mask_id]
        logits = np.array(self.logits([ids]), np.float64)[0, places]  # (M, V)
        if not np.isfinite(logits).all():
            raise UserError("the model's logits are not finite; check its weights")
        logits[:, [*range(len(SPECIAL_TOKENS)), self.mask_id]] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]  # (M, top_k)
        return [
            [self._filling(ids, places, best[:, 0], mask, int(token), probabilities[mask]) for token in best[mask]]
            for mask in range(len(places))
        ]

    def _filling(
        self, ids: list[int], places: list[int], best: NDArray, mask: int, token: int, probabilities: NDArray
    ) -> Filling:
        filled = list(ids)
        for i, place in enumerate(places):
            filled[place] = token if i == mask else int(best[i])
        return Filling(self.tokenizer.decode([token]), float(probabilities[token]), self.tokenizer.decode(filled))


def ids_with_masks(tokenizer: Tokenizer, line: str) -> list[int]:
    """Ids of a line, eos included, in which each <mask> is the id of what stands for hidden text; a space before it
    belongs to it. Without a <mask> (in the line, or in the vocabulary) those of the plain text."""
    mask_id = tokenizer.mask_id
    if mask_id is None:
        return tokenizer.encode(line)
    parts = line.split(MASK_TOKEN)
    parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    encoded = [ids[:-1] for ids in tokenizer.encode_batch(parts)]
    return [*[id for part in encoded for id in (*part, mask_id)][:-1], tokenizer.eos_id]
