"""Sampling: temperature, top-k, nucleus, and a draw. `export/search/sampling.py` is the same within a graph.

A token is drawn in two steps, each by Gumbel's trick: a block of the vocabulary by its probability, then a token of the
block by its own within it. So a row needs a few hundred numbers, not one for each token. All runtimes take the same
decisions on the same noise; two that differ by rounding part only where two scores are that close.

Shapes: B sentences, V vocabulary, N blocks of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, Arrays
from .options import Options
from .philox import gumbel
from .steps import BANNED

BLOCK = 128


def likeliest(xp: Arrays, logits: Array, options: Options) -> Array:
    """Return scores (B, V) at the temperature, BANNED outside the `top_k` likeliest and the nucleus `top_p`.

    Nucleus (Holtzman et al. 2020): the fewest likeliest tokens that reach probability top_p together. Equal scores at a
    border stay in together.
    """
    scores = logits / options.temperature
    if not (0 < options.top_k < logits.shape[1] or options.top_p < 1):
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
    """Return what a draw of new token number t needs (B, BLOCK + N), for rows by their index in the caller's list:
    noise of the places within a block, then of the blocks."""
    return gumbel(seed, t, rows, BLOCK - vocab_size // -BLOCK)


def draw(xp: Arrays, scores: Array, noise: Array) -> Array:
    """Return a token (B,) from softmax(scores), for scores (B, V) and noise (B, BLOCK + N)."""
    size, width = scores.shape
    if width % BLOCK:
        scores = xp.concatenate([scores, xp.full((size, -width % BLOCK), BANNED)], axis=1)
    blocks = scores.reshape(size, -1, BLOCK)
    block = xp.argmax(xp.logsumexp(blocks, axis=-1) + noise[:, BLOCK:], axis=1)
    within = xp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + xp.argmax(within + noise[:, :BLOCK], axis=1)
    return xp.where(token < width, token, 0)  # what is filled up wins only where no score is a number
