"""Greedy search and sampling: one hypothesis per sentence.

Sampling applies temperature, top-k and top-p to the logits, then draws a token by the Gumbel trick: argmax(log p +
noise) is a draw from p. It first draws a block of the vocabulary, then a token of that block, so a row needs a few
hundred random numbers instead of one per token.

The noise comes from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3),
which turns a counter of four 32-bit words and a key of two into four random words. It is integer arithmetic, exact in
every runtime, and depends only on the seed, the row and the step. So all runtimes draw the same tokens, except where
two scores differ by less than rounding errors. `export/search/sampling.py` does the same in a graph.

Shapes: B sentences, V vocabulary, N blocks of it; for `gumbel`: R rows, N numbers per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig

from .arrays import Array, Arrays
from .options import Hypothesis, Options
from .steps import BANNED, Batch, History, Rules, Strategy, take_sentences

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's halves each round
WORD = 1 << 32
BITS, LOW = np.uint64(32), np.uint64(WORD - 1)

# Uniform numbers are the centres of 2^23 equal parts of (0, 1), which float32 represents exactly.
SPARE_BITS = 9
STEP = 2.0**-23

Words = NDArray[np.uint64]


def philox(x: Words, y: Words, key: Words) -> tuple[Words, Words]:
    """Philox4x32-10. x (2, ...): words 0 and 2 of each counter; y (2, ...): words 1 and 3; key (2,); all below 2^32.

    Returns the random words in the same layout.
    """
    place = (2, *[1] * (max(x.ndim, y.ndim) - 1))
    multipliers = np.array(MULTIPLIERS[::-1], np.uint64).reshape(place)
    weyl = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)
    for k in ((key + weyl) & LOW).reshape(ROUNDS, *place):
        product = x[::-1] * multipliers
        x = (product >> BITS) ^ y ^ k
        y = product & LOW
    return x, y


def gumbel(seed: int, t: int, rows: NDArray, count: int) -> NDArray[np.float32]:
    """Gumbel noise (R, N) for new token number t of these rows, N = `count`: argmax(log p + noise) is a draw from p
    (Gumbel 1954).

    Number i of a row comes from word w = i % 4 of counter (i // 4, t, row, 0) with key (seed % 2^32, seed // 2^32):
    u = (floor(w / 2^9) + 0.5) / 2^23, noise = -log(-log u), in float32.
    """
    x = np.empty((2, len(rows), -(-count // 4)), np.uint64)
    x[0], x[1] = np.arange(x.shape[2]), np.asarray(rows)[:, None]
    y = np.array([t, 0], np.uint64).reshape(2, 1, 1)
    x, y = philox(x, y, np.array([seed % WORD, seed // WORD], np.uint64))
    words = np.empty((*x.shape[1:], 2, 2), np.uint32)
    words[..., 0], words[..., 1] = np.moveaxis(x, 0, 2), np.moveaxis(y, 0, 2)
    uniform = (words.reshape(len(rows), -1)[:, :count] >> SPARE_BITS).astype(np.float32)
    uniform = (uniform + np.float32(0.5)) * np.float32(STEP)
    return -np.log(-np.log(uniform))


BLOCK = 128


def likeliest(xp: Arrays, logits: Array, options: Options) -> Array:
    """Scores (B, V) to sample from: logits divided by the temperature, and BANNED outside top_k, top_p or min_p.

    top_p: the nucleus (Holtzman et al. 2020) is the smallest set of likeliest tokens whose total probability reaches
    `top_p`, among those left by top-k. min_p: tokens at least `min_p` times as likely as the likeliest. Tokens that tie
    with the last token are kept, too.
    """
    scores = logits / options.temperature
    if options.min_p > 0:
        least = xp.max(scores, axis=1, keepdims=True) + float(np.log(options.min_p))
        return xp.where(scores < least, BANNED, _nucleus(xp, scores, options))
    return _nucleus(xp, scores, options)


def _nucleus(xp: Arrays, scores: Array, options: Options) -> Array:
    if not (0 < options.top_k < scores.shape[1] or options.top_p < 1):
        return scores
    falling = -xp.sort(-scores, axis=1)
    if options.top_k > 0:
        falling = falling[:, : options.top_k]
        scores = xp.where(scores < falling[:, -1:], BANNED, scores)
    if options.top_p < 1:
        p = xp.softmax(falling, axis=1)
        in_nucleus = (xp.cumsum(p, axis=1) - p) < options.top_p
        last = xp.sum(xp.where(in_nucleus, 1, 0), axis=1, keepdims=True) - 1
        scores = xp.where(scores < xp.take_along_axis(falling, last, axis=1), BANNED, scores)
    return scores


def noise(seed: int, t: int, rows: NDArray, vocab_size: int) -> NDArray[np.float32]:
    """Noise (B, BLOCK + N) for drawing new token number t: for the places within a block, then for the N blocks.

    rows: index of each row in the caller's list.
    """
    return gumbel(seed, t, rows, BLOCK - vocab_size // -BLOCK)


def draw(xp: Arrays, scores: Array, noise: Array) -> Array:
    """Draw a token (B,) from softmax(scores), with scores (B, V) and noise (B, BLOCK + N)."""
    size, width = scores.shape
    if width % BLOCK:
        scores = xp.concatenate([scores, xp.full((size, -width % BLOCK), BANNED)], axis=1)
    blocks = scores.reshape(size, -1, BLOCK)
    block = xp.argmax(xp.logsumexp(blocks, axis=-1) + noise[:, BLOCK:], axis=1)
    within = xp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + xp.argmax(within + noise[:, :BLOCK], axis=1)
    return xp.where(token < width, token, 0)  # padding of the last block wins only if the scores are NaN


class Greedy(Strategy):
    """Chooses the likeliest token at each step, or with `options.sample` a random token. Finished sentences get pad.

    scored: compute log p of the outputs. Otherwise the scores are sums of logits, which show only whether all were
    finite.
    """

    width = 1

    def __init__(self, xp: Arrays, batch: Batch, options: Options, config: TransformerConfig, scored: bool = True):
        size = len(batch.sources)
        self.xp, self.options, self.config, self.scored = xp, options, config, scored
        self.rules = Rules(xp, batch, options, config)
        self.index = np.arange(size)
        self.places = batch.places
        self.limits = xp.asarray(batch.limits.astype(np.int32))
        self.done = self.limits < 0
        self.total = xp.full((size,), 0.0)
        self.history = History(xp, size)
        self.scores = np.zeros(size, np.float64)

    def choose(self, logits: Array, t: int) -> tuple[Array, None]:
        xp = self.xp
        logits = xp.float32(logits)
        allowed = self.rules.apply(self.rules.penalised(logits[:, None]), t)[:, 0]
        if self.options.sample:
            drawn = noise(self.options.seed, t, self.places[self.index], self.config.vocab_size)
            token = draw(xp, likeliest(xp, allowed, self.options), xp.asarray(drawn))
        else:
            token = xp.argmax(allowed, axis=1)
        chosen = xp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        if self.scored:
            chosen = chosen - xp.logsumexp(logits, axis=-1)
        if (forced := self.rules.unscored(t, self.limits)) is not None:
            token, chosen = xp.where(forced >= 0, forced, token), xp.where(forced >= 0, 0.0, chosen)
        self.total = xp.where(self.done, self.total, self.total + chosen)
        token = xp.where(self.done, self.config.pad_id, token)
        self.history.append(token)
        self.rules.write(token[:, None])
        self.done = self.done | self.rules.is_end(token) | (self.limits <= t + 1)
        return token, None

    def arrays(self) -> list[Array]:
        return [self.done, self.total]

    def keep(self, live: np.ndarray) -> None:
        self._set_finished_aside()
        self.index = self.index[live]
        self.rules.keep(live)
        self.limits, self.done, self.total = take_sentences(self.xp, live, self.limits, self.done, self.total)

    def results(self) -> list[list[Hypothesis]]:
        self._set_finished_aside()
        tokens = self.history.numpy(self.config.pad_id).T  # (B, T)
        lengths = (tokens != self.config.pad_id).sum(axis=1)  # pad is never generated, it only follows the end
        results = []
        for row, length, total in zip(tokens, lengths, self.scores, strict=True):
            ids = row[:length].tolist()
            score = float(total / self.options.penalty(int(length)))
            results.append([Hypothesis(ids[:-1] if ids and ids[-1] in self.rules.ends else ids, score)])
        return results

    def _set_finished_aside(self) -> None:
        self.history.close(self.index)
        self.scores[self.index] = self.xp.numpy(self.total)
