"""The few array operations a search needs, once for NumPy (ONNX Runtime) and once for MLX (`runtime/decoding.py`).

Names and meanings are NumPy's; both libraries round alike, so that a search takes the same decisions on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or mlx.core.array: both have shape, reshape, operators, indexing

BLOCK = 64
MOST_ROUNDS = 64
"""The most rounds of argmax over all that is left: their time grows with the square of the beam, 255 took a minute for
three lines."""


class Arrays(Protocol):
    """An array library. All indices are 32 or 64 bit integers, all scores float32."""

    check_every: int
    """Ask "all finished?" after so many steps: each question waits for the device."""
    lazy: bool
    """Work is queued: what the host reads should be one step old, so that the device never waits for it."""
    drop_below: float
    """Drop finished rows from the batch when at most this share is still running."""

    def asarray(self, values: np.ndarray) -> Array: ...
    def numpy(self, x: Array) -> np.ndarray: ...
    def queue(self, *arrays: Array) -> None:
        """Begin to compute these arrays, without waiting for them."""
        ...

    def float32(self, x: Array) -> Array: ...
    def argmax(self, x: Array, axis: int) -> Array:
        """Return the first index of the largest value."""
        ...

    def max(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...
    def sum(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...
    def cumsum(self, x: Array, axis: int) -> Array: ...
    def softmax(self, x: Array, axis: int) -> Array: ...
    def logsumexp(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...
    def sort(self, x: Array, axis: int) -> Array: ...
    def argsort(self, x: Array, axis: int) -> Array: ...
    def where(self, condition: Array, x: Any, y: Any) -> Array: ...
    def take(self, x: Array, indices: Array, axis: int) -> Array: ...
    def take_along_axis(self, x: Array, indices: Array, axis: int) -> Array: ...
    def concatenate(self, arrays: list[Array], axis: int) -> Array: ...
    def stack(self, arrays: list[Array], axis: int) -> Array: ...
    def marked(self, places: Array, width: int) -> Array:
        """Return booleans (R, width), true at places (R, N) of each row."""
        ...

    def arange(self, stop: int) -> Array: ...
    def full(self, shape: Sequence[int], value: float) -> Array:
        """Return a float32 array of one value."""
        ...


class NumpyArrays:
    """NumPy: nothing is queued, so finished rows are noticed, and dropped, at once."""

    check_every = 1
    lazy = False
    drop_below = 0.75

    asarray = staticmethod(np.asarray)
    numpy = staticmethod(np.asarray)
    argmax = staticmethod(np.argmax)
    max = staticmethod(np.max)
    sum = staticmethod(np.sum)
    cumsum = staticmethod(np.cumsum)
    sort = staticmethod(np.sort)
    argsort = staticmethod(np.argsort)
    where = staticmethod(np.where)
    take = staticmethod(np.take)
    take_along_axis = staticmethod(np.take_along_axis)
    concatenate = staticmethod(np.concatenate)
    stack = staticmethod(np.stack)
    arange = staticmethod(np.arange)

    def queue(self, *arrays: Array) -> None:
        return None

    def float32(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32, copy=False)

    def softmax(self, x: np.ndarray, axis: int) -> np.ndarray:
        return np.exp(x - self.logsumexp(x, axis, keepdims=True))

    def logsumexp(self, x: np.ndarray, axis: int, keepdims: bool = False) -> np.ndarray:
        largest = np.max(x, axis=axis, keepdims=True)
        shifted = x - largest
        result = np.log(np.sum(np.exp(shifted, out=shifted), axis=axis, keepdims=True)) + largest
        return result if keepdims else np.squeeze(result, axis)

    def marked(self, places: np.ndarray, width: int) -> np.ndarray:
        marks = np.zeros((len(places), width), bool)
        np.put_along_axis(marks, places, True, axis=1)
        return marks

    def full(self, shape: Sequence[int], value: float) -> np.ndarray:
        return np.full(shape, value, np.float32)


def top_k(xp: Arrays, x: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` largest values of each row of x (B, N), falling, and their indices; on ties the lowest index.

    On Metal a library's topk is a full sort of the row and leaves the order of ties open. Here one pass takes the
    maximum of each block of 64 values; the winners can only lie in the `count` blocks with the largest maxima (lowest
    block first on ties), and `count` rounds of argmax-and-mask over those find them. x must be finite, count <= N.
    """
    rows, width = x.shape
    if width < 4 * BLOCK * count:
        indices = _rounds(xp, x, count)
        return xp.take_along_axis(x, indices, axis=1), indices
    if width % BLOCK:
        x = xp.concatenate([x, xp.full((rows, BLOCK - width % BLOCK), -np.inf)], axis=1)
    blocks = x.reshape(rows, -1, BLOCK)
    best = xp.sort(_rounds(xp, xp.max(blocks, axis=-1), count), axis=1)  # (B, count), rising: ties stay in order
    finalists = xp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1)  # (B, count * 64)
    place = _rounds(xp, finalists, count)
    indices = xp.take_along_axis(best, place // BLOCK, axis=1) * BLOCK + place % BLOCK
    return xp.take_along_axis(finalists, place, axis=1), indices


def _rounds(xp: Arrays, x: Array, count: int) -> Array:
    if count > MOST_ROUNDS:  # a beam that few ask for: a sort on the host leaves ties in order too
        return xp.asarray(np.argsort(-xp.numpy(x), axis=1, kind="stable")[:, :count].astype(np.int32))
    position = xp.arange(x.shape[1])[None]
    indices = []
    for i in range(count):
        indices.append(xp.argmax(x, axis=1))
        if i + 1 < count:
            x = xp.where(position == indices[-1][:, None], -np.inf, x)
    return xp.stack(indices, axis=1)


def first_of(xp: Arrays, x: Array, count: int) -> tuple[Array, Array]:
    """Do as `top_k` does, for rows of a few values: ranks by comparing all pairs, in a fixed number of operations."""
    if not xp.lazy:  # the host's own sort leaves ties in order
        indices = np.argsort(-x, axis=1, kind="stable")[:, :count]
        return xp.take_along_axis(x, indices, axis=1), indices
    position = xp.arange(x.shape[1])
    earlier = position[:, None] > position[None, :]  # [i, j]: j comes before i
    ahead = (x[:, None, :] > x[:, :, None]) | ((x[:, None, :] == x[:, :, None]) & earlier[None])
    # Ranks are distinct, so the order of a sort that isn't stable can't show.
    indices = xp.argsort(xp.sum(ahead, axis=-1), axis=1)[:, :count]
    return xp.take_along_axis(x, indices, axis=1), indices
