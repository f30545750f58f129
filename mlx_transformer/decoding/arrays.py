"""The array operations of a search, for NumPy (with ONNX Runtime) and for MLX (`runtime/decoding.py`).

Names and meanings are NumPy's, so that one search runs on both. Its decisions differ only where two scores differ by
less than rounding errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or mlx.core.array: both have shape, reshape, operators, indexing

BLOCK = 64
MOST_ROUNDS = 64
"""For more values than this, `top_k` sorts on the host instead of taking an argmax per value. The time of the argmaxes
grows with the square of the beam: with a beam of 255, three lines took a minute."""


class Arrays(Protocol):
    """An array library. All indices are 32 or 64 bit integers, all scores float32."""

    check_every: int
    """Number of steps between two checks whether all sentences are finished; a check waits for the device."""
    lazy: bool
    """Whether operations are queued. The host then reads arrays of the previous step, so that the device never
    idles."""
    drop_below: float
    """Drop finished sentences from the batch when at most this share still runs, e.g. 0.5."""

    def asarray(self, values: np.ndarray) -> Array: ...
    def numpy(self, x: Array) -> np.ndarray: ...
    def queue(self, *arrays: Array) -> None:
        """Start computing these arrays without waiting for them."""
        ...

    def float32(self, x: Array) -> Array: ...
    def argmax(self, x: Array, axis: int) -> Array:
        """Index of the largest value; among equals the first."""
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
        """Booleans (R, width), True at the indices `places` (R, N) of each row."""
        ...

    def arange(self, stop: int) -> Array: ...
    def full(self, shape: Sequence[int], value: float) -> Array:
        """A float32 array filled with `value`."""
        ...


class NumpyArrays:
    """NumPy. It computes at once, so that finished sentences are found and dropped after every step."""

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
    """The `count` largest values of each row of x (B, N), largest first, and their indices; ties: lowest index first.

    MLX's topk on Metal sorts the whole row and leaves the order of ties open. Here one pass takes the maximum of each
    block of 64 values. The largest values lie in the `count` blocks with the largest maxima (on ties the lowest block),
    and `count` rounds of argmax-and-mask find them there. x must be finite, count <= N.
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
    if count > MOST_ROUNDS:  # rare; a stable sort on the host keeps ties in order too
        return xp.asarray(np.argsort(-xp.numpy(x), axis=1, kind="stable")[:, :count].astype(np.int32))
    position = xp.arange(x.shape[1])[None]
    indices = []
    for i in range(count):
        indices.append(xp.argmax(x, axis=1))
        if i + 1 < count:
            x = xp.where(position == indices[-1][:, None], -np.inf, x)
    return xp.stack(indices, axis=1)


def first_of(xp: Arrays, x: Array, count: int) -> tuple[Array, Array]:
    """`top_k` for short rows: ranks by comparing all pairs, so that the number of queued operations is fixed."""
    if not xp.lazy:
        indices = np.argsort(-x, axis=1, kind="stable")[:, :count]
        return xp.take_along_axis(x, indices, axis=1), indices
    position = xp.arange(x.shape[1])
    earlier = position[:, None] > position[None, :]  # [i, j]: j comes before i
    ahead = (x[:, None, :] > x[:, :, None]) | ((x[:, None, :] == x[:, :, None]) & earlier[None])
    # Ranks are distinct, so the sort needn't be stable.
    indices = xp.argsort(xp.sum(ahead, axis=-1), axis=1)[:, :count]
    return xp.take_along_axis(x, indices, axis=1), indices
