"""Ids, vectors and masks as they come from outside: checked on the host, for MLX reads out of bounds without a word.

Shapes: B batch, L positions. Lists and NumPy arrays are checked; an `mx.array` is believed, so that nothing waits for
the device (a value check would stop the pipeline at every step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.inputs import VECTORS
from mlx_transformer.system.errors import UserError

Ids = mx.array | np.ndarray | Sequence[Sequence[int]]
Vectors = mx.array | np.ndarray | Sequence[Sequence[Sequence[float]]]
Tokens = mx.array | np.ndarray | Sequence[Sequence[bool]]


def as_ids(ids: Ids | None, vocab_size: int, name: str) -> mx.array:
    """Return (B, L) integers below `vocab_size`, as an `mx.array`. `UserError` names the row and position of a bad
    one."""
    array = ids if isinstance(ids, mx.array) else _array(ids, name)
    if array.ndim != 2 or 0 in array.shape:
        raise UserError(f"{name}: expected a batch (rows, length) of at least one id, found shape {tuple(array.shape)}")
    on_host = not isinstance(array, mx.array)
    if not (np.issubdtype(array.dtype, np.integer) if on_host else mx.issubdtype(array.dtype, mx.integer)):
        raise UserError(f"{name}: ids must be integers, not {array.dtype}")
    if not on_host:
        return array
    bad = np.argwhere((array < 0) | (array >= vocab_size))
    if len(bad):
        row, position = bad[0]
        raise UserError(
            f"{name}: id {array[row, position]} at row {row}, position {position}"
            f" is outside the vocabulary of {vocab_size}"
        )
    return mx.array(array.astype(np.int32))


def as_vectors(vectors: Vectors, width: int, dtype: mx.Dtype) -> mx.array:
    """Return (B, L, `width`) numbers, as an `mx.array` of that type. `UserError` for another shape, and for no
    numbers."""
    array = vectors if isinstance(vectors, mx.array) else _array(vectors, VECTORS.name)
    if array.ndim != 3 or 0 in array.shape or array.shape[2] != width:
        raise UserError(
            f"{VECTORS.name}: expected (rows, length, {width}), a vector of d_model={width} numbers for each position,"
            f" found shape {tuple(array.shape)}"
        )
    if not isinstance(array, mx.array) and array.dtype.kind not in "fiu":
        raise UserError(f"{VECTORS.name}: expected numbers, not {array.dtype}")
    return mx.array(array).astype(dtype)


def check_one_input(ids: Ids | None, vectors: Vectors | None, name: str) -> None:
    """Raise `UserError` unless exactly one of them is there."""
    if ids is None and vectors is None:
        raise UserError(f"{name}: missing; give them, or vectors in their place as inputs_embeds")
    if ids is not None and vectors is not None:
        raise UserError(f"{name} and inputs_embeds: give one of them; the vectors stand in place of the ids")


def as_tokens(mask: Tokens | None, shape: tuple[int, ...], name: str, causal: bool = False) -> mx.array | None:
    """Boolean (B, L), True on tokens, or None if it hides nothing; `causal`: padding to the right of it hides nothing.

    (A causal model's real positions never attend to the right, so right padding needs no mask there.) Only a mask
    of lists or NumPy can be found to hide nothing. `UserError` if its shape isn't that of the input's positions.
    """
    if mask is None:
        return None
    array = mask if isinstance(mask, mx.array) else _array(mask, name)
    if tuple(array.shape) != tuple(shape):
        raise UserError(f"{name}: its shape {tuple(array.shape)} differs from that of the input, {tuple(shape)}")
    if isinstance(array, mx.array):
        return array.astype(mx.bool_)
    host = array.astype(bool)
    hidden = ~host if not causal else ~host & (np.cumsum(host[:, ::-1], axis=1)[:, ::-1] > 0)
    return mx.array(host) if hidden.any() else None


def padding_before(mask: Tokens, name: str) -> mx.array | None:
    """Return how many positions each row (B, L) of left-padded prompts starts with before its first token: (B,), or
    None."""
    if isinstance(mask, mx.array):
        return mask.shape[1] - mx.sum(mask.astype(mx.int32), axis=1)
    host = _array(mask, name).astype(bool)
    if host.ndim != 2 or np.any(np.diff(host.astype(np.int8), axis=1) < 0) or not np.all(host[:, -1:]):
        raise UserError(f"{name}: prompts are padded on the left, each row False... then True to its end")
    return None if host.all() else mx.array((~host).sum(axis=1).astype(np.int32))


def _array(values: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UserError(f"{name}: rows have different lengths; pad them and pass a mask") from error
