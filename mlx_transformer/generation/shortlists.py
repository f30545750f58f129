"""Build a shortlist from a model's own alignments: which target tokens each source token may become.

Each target token of a parallel text counts for the source token that cross-attention weighs most. p(t | s) is the
pair's count divided by all counts of s; the likeliest t of each s are kept. The file has Marian's format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.outputs import Kind, beginning
from mlx_transformer.core.shortlist import HEADER, MAGIC, Shortlist
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .alignment import CrossWeights

PAIRS = 512
"""Pairs aligned and counted at a time."""


class Counts:
    """How often each target token was aligned with each source token."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.keys, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, source: Sequence[int], target: Sequence[int], weights: NDArray) -> None:
        """Count one pair. weights (T, S): target token i was chosen from row i. The source's end token is ignored."""
        if len(target) and len(source) > 1:
            aligned = np.asarray(source)[weights[:, : len(source) - 1].argmax(axis=1)]
            self._merge(aligned * self.vocab_size + np.asarray(target), np.ones(len(target), np.int64))

    def join(self, other: Counts) -> None:
        self._merge(other.keys, other.counts)

    def _merge(self, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.keys, places = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
        total = np.zeros(len(self.keys), np.int64)
        np.add.at(total, places, np.concatenate([self.counts, counts]))
        self.counts = total

    def shortlist(self, source_vocab_size: int, first: int, best: int) -> Shortlist:
        """Keep the `best` likeliest targets of each source token, the lower id on ties.

        p(t | s) has the same divisor for all t, so sorting by counts is enough.
        """
        source, target = np.divmod(self.keys, self.vocab_size)
        order = np.lexsort((target, -self.counts, source))
        source, target = source[order], target[order]
        begins = np.searchsorted(source, source)
        among_best = np.arange(len(source)) - begins < best
        source, target = source[among_best], target[among_best]
        ascending = np.lexsort((target, source))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=source_vocab_size))])
        return Shortlist(first, best, offsets.astype(np.uint64), target[ascending].astype(np.uint32))


def built_shortlist(
    config: TransformerConfig,
    tokenizer: Tokenizer,
    weights: CrossWeights,
    text: ParallelText,
    *,
    first: int = 50,
    best: int = 50,
    done: Callable[[float], None] = lambda share: None,
) -> tuple[Shortlist, int]:
    """Align each pair of a text with the model's attention, and count; return the shortlist and how many pairs were too
    long.

    first: tokens with lower ids are candidates in every sentence. best: most candidates of one source token. Raises
    `UserError` if there is nothing to count.
    """
    if not 1 <= first <= config.vocab_size:
        raise UserError("{first} must be from 1 to the vocabulary's {}", config.vocab_size, first=first)
    counts, skipped = Counts(config.vocab_size), 0
    for begin in range(0, len(text), PAIRS):
        part = slice(begin, begin + PAIRS)
        sources = tokenizer.source.encode_batch(text.source[part])
        targets = [ids[:-1] for ids in tokenizer.encode_batch(text.target[part])]
        fits = [max(len(s), len(t) + 1) <= config.max_positions for s, t in zip(sources, targets, strict=True)]
        pairs = [pair for pair, fitting in zip(zip(sources, targets, strict=True), fits, strict=True) if fitting]
        skipped += len(fits) - len(pairs)
        by_source = weights([source for source, _ in pairs], [target for _, target in pairs]) if pairs else []
        here = Counts(config.vocab_size)
        for (source, target), rows in zip(pairs, by_source, strict=True):
            here.add(source, target, rows)
        counts.join(here)
        done(min(1.0, (begin + PAIRS) / len(text)))
    if not len(counts.keys):
        raise UserError("no pair of the text has words on both sides that the model takes: nothing was counted")
    return counts.shortlist(config.source_vocab_size, first, best), skipped


def _holds_shortlist(path: Path) -> bool:
    head = beginning(path, HEADER.size)
    return len(head) == HEADER.size and HEADER.unpack_from(head)[0] == MAGIC


SHORTLIST_FILE = Kind("shortlist", _holds_shortlist)
