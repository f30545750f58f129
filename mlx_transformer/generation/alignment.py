"""Which word of a source each word of its translation was made of, as cross-attention says it.

The row of attention weights from which a token was chosen is that of the token before it, which the decoder had read
last. Heads are averaged; a word's weight is the sum of its source tokens', and the mean over its target tokens.

Shapes: H heads, T target, S source tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.text.tokenizer import Tokenizer

SPACES = "ĠĉĊč▁"
"""Space, tab and line ends, as the vocabulary spells bytes; and a space as SentencePiece does."""

Links = Sequence[tuple[int, int]]
"""(source word, target word), both counted from 0, in the order of the target."""

CrossWeights = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[NDArray]]
"""Sources, and what was written of each (without eos) -> weights (T, S) of each pair, the heads' mean."""


CrossAttention = Callable[[NDArray, NDArray, NDArray], NDArray]
"""Padded sources (B, S), where their tokens are (B, S), targets (B, T) -> the heads' mean of the weights (B, T, S)."""

TOGETHER = 16
"""Pairs computed together."""


@dataclass(frozen=True)
class Alignment:
    """Links of one translation, and how many words there are on both sides."""

    links: Links
    source_words: int
    target_words: int

    def __add__(self, other: Alignment) -> Alignment:
        """Join the alignments of two pieces of one line, one after the other."""
        later = [(source + self.source_words, target + self.target_words) for source, target in other.links]
        return Alignment(
            [*self.links, *later], self.source_words + other.source_words, self.target_words + other.target_words
        )


def align(tokenizer: Tokenizer, weights: NDArray, source: Sequence[int], target: Sequence[int]) -> Alignment:
    """weights (T, S): row i is that from which token i of the target was chosen."""
    words = words_of(tokenizer.source, source), words_of(tokenizer, target)
    counts = (1 + max((word for word in side if word is not None), default=-1) for side in words)
    return Alignment(word_links(weights, *words), *counts)


def cross_weights_by(attention: CrossAttention, config: TransformerConfig) -> CrossWeights:
    """Return what aligns, by a model that reads each translation once, all its tokens at once."""

    def padded(rows: Sequence[Sequence[int]], fill: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        lengths = np.array([len(row) for row in rows])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(real.shape, fill, np.int64)
        ids[real] = np.concatenate([np.asarray(row, np.int64) for row in rows])
        return ids, real

    def weights(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[NDArray]:
        weights_of: list[NDArray] = [np.zeros((0, len(source)), np.float32) for source in sources]
        # Neighbours in length are computed together; nothing is written of an empty one.
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
    """Choose the decoder's layer whose cross-attention tells most: the last but one (Garg et al. 2019), or the last of
    up to three. (The last of the quickstart's two is right about 92 % of copied digits, the first about 84 %.)"""
    return config.decoder_layers - (2 if config.decoder_layers > 3 else 1)


def words_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """Number the word that each token is part of, words being what white space separates; None for special tokens, for
    white space alone, and for rows of a published model that no token of its vocabulary reads."""
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
    """Return the source word that each target word attends to most. weights (T, S): row i is that from which token i
    was chosen. source, target: words of the tokens, as `words_of` has them."""
    table = word_weights(weights, source, target)
    return [(int(row.argmax()), j) for j, row in enumerate(table)] if table.shape[1] else []


def word_weights(weights: NDArray, source: Sequence[int | None], target: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the same weights between words: (target words, source words)."""
    columns = _members(source)  # (S words, S)
    rows = _members(target)
    total = rows @ np.asarray(weights, np.float64) @ columns.T
    return total / np.maximum(rows.sum(axis=1, keepdims=True), 1)


def pharaoh(links: Links) -> str:
    """Return 0-0 1-2: source word, target word, as word aligners write them."""
    return " ".join(f"{source}-{target}" for source, target in links)


def _members(words: Sequence[int | None]) -> NDArray[np.float64]:
    """Return (words, tokens): 1 where the token is part of the word."""
    count = 1 + max((word for word in words if word is not None), default=-1)
    return np.array([[float(word == i) for word in words] for i in range(count)]).reshape(count, len(words))
