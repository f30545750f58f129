"""Masks, built once at the model's boundary: one merged mask an attention, True where a query may attend.

Shapes: B batch, T queries, S keys. A mask is None (everything is allowed), the word "causal" (no key after the query,
last query aligned with last key; the fused kernels' own form), or an array that broadcasts to (B, H, T, S): boolean,
or numbers to add to the scores, minus infinity where no query may attend.
No row of an array mask hides everything: what softmax makes of such a row differs from kernel to kernel.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Mask = mx.array | Literal["causal"] | None


def padding_mask(tokens: mx.array) -> mx.array:
    """Hide padded keys: tokens (B, S), True on tokens -> (B, 1, 1, S). A row without any token sees everything."""
    tokens = tokens | ~mx.any(tokens, axis=1, keepdims=True)
    return tokens[:, None, None, :]


def causal_mask(queries: int, keys: int) -> mx.array:
    """No query sees a later key: (T, S), aligned at the bottom right, so the last query sees all keys."""
    query = mx.arange(keys - queries, keys)[:, None]
    return mx.arange(keys)[None, :] <= query


def causal_padding_mask(tokens: mx.array, queries: int | None = None) -> mx.array:
    """Return the causal mask and the padding's in one: tokens (B, S) -> (B, 1, T, S) for the last T of the S positions
    (default: all).

    A query at a padded position keeps itself as its key, so that no row is empty.
    """
    keys = tokens.shape[1]
    queries = keys if queries is None else queries
    itself = mx.arange(keys)[None, :] == mx.arange(keys - queries, keys)[:, None]  # (T, S)
    return (causal_mask(queries, keys) & tokens[:, None, None, :]) | itself


def document_mask(segments: mx.array) -> mx.array:
    """No query sees a later key or another document of its row: segments (B, L), equal numbers side by side being one
    document -> (B, 1, L, L). Every query sees itself."""
    length = segments.shape[1]
    return (causal_mask(length, length) & (segments[:, :, None] == segments[:, None, :]))[:, None]


def window_mask(mask: Mask, length: int, window: int) -> mx.array:
    """Hide keys that are more than `window` positions away, and those that a mask (B, 1, 1, L) hides: (L, L) or (B, 1,
    L, L). A query sees itself."""
    places = mx.arange(length)
    near = mx.abs(places[:, None] - places) <= window
    array = as_array(mask, length, length)
    return near if array is None else (near & array) | (places[:, None] == places)


def pooling_weights(tokens: mx.array, pooling: str) -> mx.array:
    """Return how much each of a row's positions counts in its vector: tokens (B, S), True on tokens -> (B, 1, S)."""
    real = tokens.astype(mx.int32)
    if pooling == "first":
        chosen = (real * (mx.cumsum(real, axis=1) == 1)).astype(mx.float32)
    else:
        chosen = real / mx.maximum(mx.sum(real, axis=1, keepdims=True), 1)
    return chosen[:, None]


def as_array(mask: Mask, queries: int, keys: int) -> mx.array | None:
    """Return the array that a mask stands for."""
    return causal_mask(queries, keys) if isinstance(mask, str) else mask


def as_numbers(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return an array mask as numbers to add to scores of that type."""
    if mask.dtype != mx.bool_:
        return mask.astype(dtype)
    return mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))
