"""Checks the caller's ids, vectors and masks and makes them `mx.array`s. MLX itself reads out of bounds silently.

Shapes: B batch, L positions. Values of lists and NumPy arrays are checked on the host. Of an `mx.array`, only shape
and type are checked: reading its values would wait for the device at every step.
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
    """Ids (B, L), from 0 to vocab_size - 1, as an `mx.array`.

    name: the argument's name in errors, e.g. "source_ids". `UserError` names the row and position of a bad id.
    """
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
    """Vectors (B, L, width) as an `mx.array` of this dtype. `UserError` for another shape or a non-numeric type."""
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
    """Raise `UserError` unless exactly one of ids and vectors is given."""
    if ids is None and vectors is None:
        raise UserError(f"{name}: missing; give them, or vectors in their place as inputs_embeds")
    if ids is not None and vectors is not None:
        raise UserError(f"{name} and inputs_embeds: give one of them; the vectors stand in place of the ids")


def as_tokens(mask: Tokens | None, shape: tuple[int, ...], name: str, causal: bool = False) -> mx.array | None:
    """Padding mask (B, L) as booleans, True on tokens; None if it masks nothing, so that faster kernels can be used.

    causal: padding on the right needs no mask, since no token attends to its right. An `mx.array` is never reduced to
    None: that would read its values. `UserError` if its shape differs from `shape`.
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
    """Number of padding positions at the left of each prompt (B,), from its mask (B, L); None if there are none.

    `UserError` if padding isn't on the left, or a row has no token.
    """
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
