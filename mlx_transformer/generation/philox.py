"""Gumbel noise that depends on a seed and a place alone, from integer arithmetic that every runtime does exactly.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) turns a counter of four
32-bit words and a key of two into four random words. `export/search/philox.py` is the same within a graph.

Shapes: R rows, N numbers of each, n = N / 4 counters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's halves each round
WORD = 1 << 32
BITS, LOW = np.uint64(32), np.uint64(WORD - 1)

# Numbers have 23 bits and a half, which float32 holds exactly: the middles of 2^23 equal parts of (0, 1).
SPARE_BITS = 9
STEP = 2.0**-23

Words = NDArray[np.uint64]


def philox(x: Words, y: Words, key: Words) -> tuple[Words, Words]:
    """x (2, ...): words 0 and 2 of each counter, y words 1 and 3, key (2,); all below 2^32. The same of the results."""
    place = (2, *[1] * (max(x.ndim, y.ndim) - 1))
    multipliers = np.array(MULTIPLIERS[::-1], np.uint64).reshape(place)
    weyl = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)
    for k in ((key + weyl) & LOW).reshape(ROUNDS, *place):
        product = x[::-1] * multipliers
        x = (product >> BITS) ^ y ^ k
        y = product & LOW
    return x, y


def gumbel(seed: int, t: int, rows: NDArray, count: int) -> NDArray[np.float32]:
    """Return the noise (R, N) for new token number t of the rows with these numbers, N = `count`: argmax(log p + noise)
    is a draw from p (Gumbel 1954).

    Number i of a row: with the word w = i % 4 of counter (i // 4, t, row, 0) and the key (seed % 2^32, seed // 2^32),
    u = (floor(w / 2^9) + 0.5) / 2^23 and -log(-log u) in float32.
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
