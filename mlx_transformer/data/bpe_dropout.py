"""BPE dropout (Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization").

Training text is tokenized differently in every epoch: at each step of a word's segmentation, each possible merge is
skipped with probability p. Of the others the merge learned first is made; if all are skipped, the word is done (their
algorithm 1). p = 0 gives the tokenizer's usual tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mlx_transformer.system.errors import Text, UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .epochs import legacy_random
from .ragged import Examples, Ragged, Rows
from .stored_text import encoded

DRAWN = 512  # random numbers drawn at a time
TRIES = 3


class BpeDropout:
    """Tokenizes text with a tokenizer's merges, skipping some at random.

    Raises UserError for a vocabulary without merges, e.g. a unigram model.
    """

    def __init__(self, tokenizer: Tokenizer, dropout: float):
        if tokenizer.merges is None:
            raise UserError(
                Text(
                    "{bpe_dropout}: this vocabulary is SentencePiece's, which isn't cut by merges of bytes: leave it 0"
                )
            )
        specification = tokenizer.own_json()
        self._ids: dict[str, int] = json.loads(specification)["model"]["vocab"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer.merges)
        # (left id, right id): (rank, id of the merged token)
        self._merges = {
            (self._ids[left], self._ids[right]): (rank, self._ids[left + right])
            for rank, (left, right) in enumerate(pairs)
        }
        self._words = tokenizers.Tokenizer.from_str(specification).pre_tokenizer
        self._eos, self.dropout = tokenizer.eos_id, dropout

    def ids(self, text: str, random: Iterator[float]) -> list[int]:
        """Tokenize a text; the ids end with eos. random: numbers in [0, 1)."""
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            ids += self._segments([self._ids[letter] for letter in word], random)
        return [*ids, self._eos]

    def _segments(self, ids: list[int], random: Iterator[float]) -> list[int]:
        merges, dropout = self._merges, self.dropout
        while len(ids) > 1:
            best, place = None, 0
            for i, pair in enumerate(itertools.pairwise(ids)):
                merge = merges.get(pair)
                if merge is not None and (best is None or merge[0] < best[0]) and next(random) >= dropout:
                    best, place = merge, i
            if best is None:
                break
            ids[place : place + 2] = [best[1]]
        return ids


class DroppedPairs(Examples):
    """Pairs that are tokenized anew in each epoch; the tokens depend only on (seed, epoch, pair).

    A side without dropout of n tokens has at most (1 + 4 p) n + 4 with dropout, and at most `max_length` (but n always
    fits). If a draw is longer, it is drawn again up to twice, and then tokenized without dropout.
    """

    def __init__(
        self, source: list[str], target: list[str], tokenizer: Tokenizer, dropout: float, max_length: int, seed: int
    ):
        self._texts, self._seed, self._dropout = (source, target), seed, dropout
        own = BpeDropout(tokenizer, dropout)
        self._bpe = BpeDropout(tokenizer.source, dropout) if tokenizer.separate else own, own
        self._plain: tuple[Ragged, Ragged] = encoded(tokenizer.source, source), encoded(tokenizer, target)
        self.source_lengths, self.target_lengths = (self._bounds(side.lengths, max_length) for side in self._plain)

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        source, target = [], []
        for i in members.tolist():
            random = _numbers(self._seed, epoch, i)
            source.append(self._row(0, i, int(self.source_lengths[i]), random))
            target.append(self._row(1, i, int(self.target_lengths[i]), random))
        return source, target

    def _row(self, side: int, i: int, bound: int, random: Iterator[float]) -> NDArray:
        for _ in range(TRIES):
            ids = self._bpe[side].ids(self._texts[side][i], random)
            if len(ids) <= bound:
                return np.array(ids, np.int32)
        return self._plain[side][i]

    def _bounds(self, lengths: NDArray, max_length: int) -> NDArray:
        bounds = np.ceil(lengths * (1 + 4 * self._dropout)).astype(np.int32) + 4
        return np.maximum(lengths, np.minimum(bounds, max_length))


def _numbers(*seeds: int) -> Iterator[float]:
    """Yield random numbers in [0, 1) forever, from `legacy_random`."""
    random = legacy_random(*seeds)
    while True:
        yield from random.random_sample(DRAWN).tolist()
