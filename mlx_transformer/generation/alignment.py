"""Word alignments from cross-attention: which source word each target word comes from.

Token i of the target was chosen from row i of the weights, in which the decoder reads token i - 1. Heads are averaged.
A word's weight is summed over its source tokens and averaged over its target tokens.

A shortlist is built from alignments of a parallel text: which target tokens each source token may become. Each target
token counts for the source token that cross-attention weighs most. p(t | s) is the pair's count divided by all counts
of s; the likeliest t of each s are kept. The file has Marian's format.

Shapes: H heads, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.outputs import Kind, beginning
from mlx_transformer.core.shortlist import HEADER, MAGIC, Shortlist
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

SPACES = "ĠĉĊč▁"
"""Space, tab and line ends as a byte-level vocabulary spells them; the last is SentencePiece's space."""

Links = Sequence[tuple[int, int]]
"""(source word, target word), both counted from 0, in target order, e.g. [(0, 0), (2, 1)]."""

CrossWeights = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[NDArray]]
"""(sources, targets without eos) -> for each pair the cross-attention weights (T, S), averaged over heads."""


CrossAttention = Callable[[NDArray, NDArray, NDArray], NDArray]
"""(padded sources (B, S), their mask (B, S), targets (B, T)) -> weights (B, T, S), averaged over heads."""

TOGETHER = 16
"""Pairs of a forward pass."""


@dataclass(frozen=True)
class Alignment:
    """The word links of a translation, and the number of words on each side."""

    links: Links
    source_words: int
    target_words: int

    def __add__(self, other: Alignment) -> Alignment:
        """Join the alignments of two consecutive pieces of a line."""
        later = [(source + self.source_words, target + self.target_words) for source, target in other.links]
        return Alignment(
            [*self.links, *later], self.source_words + other.source_words, self.target_words + other.target_words
        )


def align(tokenizer: Tokenizer, weights: NDArray, source: Sequence[int], target: Sequence[int]) -> Alignment:
    """Align one pair. weights (T, S): token i of the target was chosen from row i."""
    words = words_of(tokenizer.source, source), words_of(tokenizer, target)
    counts = (1 + max((word for word in side if word is not None), default=-1) for side in words)
    return Alignment(word_links(weights, *words), *counts)


def cross_weights_by(attention: CrossAttention, config: TransformerConfig) -> CrossWeights:
    """Return a `CrossWeights` that reads each translation in one forward pass, all its tokens at once (teacher
    forcing)."""

    def padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        lengths = np.array([len(row) for row in rows])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(real.shape, fill, np.int64)
        ids[real] = np.concatenate([np.asarray(row, np.int64) for row in rows])
        return ids, real

    def weights(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[NDArray]:
        weights_of: list[NDArray] = [np.zeros((0, len(source)), np.float32) for source in sources]
        # Pairs of similar length share a pass; an empty target has no weights.
        order = sorted((i for i, row in enumerate(targets) if row), key=lambda i: (len(sources[i]), len(targets[i])))
        for first in range(0, len(order), TOGETHER):
            rows = order[first : first + TOGETHER]
            source = padded([sources[i] for i in rows], config.pad_id)
            read, _ = padded([[config.bos_id, *targets[i][:-1]] for i in rows], config.eos_id)
            for i, each in zip(rows, attention(*source, read), strict=True):
                weights_of[i] = each[: len(targets[i]), : len(sources[i])]
        return weights_of

    return weights


def alignment_layer(config: TransformerConfig) -> int:
    """Choose the decoder layer whose cross-attention aligns best: the last but one (Garg et al. 2019), or the last if
    there are at most three. (In the quickstart's model of two layers the last is right about 92 % of copied digits, the
    first about 84 %.)"""
    return config.decoder_layers - (2 if config.decoder_layers > 3 else 1)


def words_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """Return for each token the number of its word; words are separated by white space.

    None for special tokens, for white space, and for ids that the vocabulary has no token for. E.g. ["▁Good", "▁mor",
    "ning", "</s>"] -> [0, 1, 1, None].
    """
    words: list[int | None] = []
    word, inside, special = -1, False, tokenizer.special_ids - {tokenizer.mask_id}
    for id in ids:
        letters = "" if id in special or id >= tokenizer.vocab_size else tokenizer.token(id)
        if not letters.strip(SPACES):
            words.append(None)
            inside = inside and not letters
            continue
        if letters[0] in SPACES or not inside:
            word += 1
        words.append(word)
        inside = letters[-1] not in SPACES
    return words


def word_links(weights: NDArray, source: Sequence[int | None], target: Sequence[int | None]) -> Links:
    """Return for each target word the source word that it attends to most.

    weights (T, S): token i was chosen from row i. source, target: each token's word, as from `words_of`.
    """
    table = word_weights(weights, source, target)
    return [(int(row.argmax()), j) for j, row in enumerate(table)] if table.shape[1] else []


def word_weights(weights: NDArray, source: Sequence[int | None], target: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the weights between words: (target words, source words)."""
    columns = _members(source)  # (source words, S)
    rows = _members(target)  # (target words, T)
    total = rows @ np.asarray(weights, np.float64) @ columns.T  # (target words, source words)
    return total / np.maximum(rows.sum(axis=1, keepdims=True), 1)


def pharaoh(links: Links) -> str:
    """Return links as word aligners write them, e.g. "0-0 1-2": source word, target word."""
    return " ".join(f"{source}-{target}" for source, target in links)


def _members(words: Sequence[int | None]) -> NDArray[np.float64]:
    """Return a matrix (words, tokens) with 1 where the token is part of the word."""
    count = 1 + max((word for word in words if word is not None), default=-1)
    return np.array([[float(word == i) for word in words] for i in range(count)]).reshape(count, len(words))


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

    first: tokens with lower ids are candidates in every sentence. best: most candidates of a source token. Raises
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
