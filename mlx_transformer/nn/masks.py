"""Attention masks. Padding, causality and windows are merged into a single mask before the layers run.

Shapes: B batch, T queries, S keys. A mask is one of:
- None: every query attends to every key.
- "causal": no query attends to a later key; the last query is aligned with the last key. Fused kernels know this word.
- An array that broadcasts to (B, H, T, S): booleans, True where a query may attend, or numbers to add to the scores,
  minus infinity where it may not.
No row of an array masks all keys: the softmax of such a row differs from kernel to kernel.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Mask = mx.array | Literal["causal"] | None


def padding_mask(tokens: mx.array) -> mx.array:
    """Mask padded keys: tokens (B, S), True on tokens -> (B, 1, 1, S). A row of padding only is left unmasked."""
    tokens = tokens | ~mx.any(tokens, axis=1, keepdims=True)
    return tokens[:, None, None, :]


def causal_mask(queries: int, keys: int) -> mx.array:
    """Mask later keys: (T, S). The last query is aligned with the last key, so it attends to all keys."""
    query = mx.arange(keys - queries, keys)[:, None]
    return mx.arange(keys)[None, :] <= query


def causal_padding_mask(tokens: mx.array, queries: int | None = None) -> mx.array:
    """Mask later keys and padded keys: tokens (B, S) -> (B, 1, T, S) for the last T = `queries` positions (default: S).

    A query at a padded position attends to itself, so that no row masks all keys.
    """
    keys = tokens.shape[1]
    queries = keys if queries is None else queries
    itself = mx.arange(keys)[None, :] == mx.arange(keys - queries, keys)[:, None]  # (T, S)
    return (causal_mask(queries, keys) & tokens[:, None, None, :]) | itself


def document_mask(segments: mx.array) -> mx.array:
    """Mask later keys and keys of other documents, where a row holds several: segments (B, L) -> (B, 1, L, L).

    Positions of a document have the same number, e.g. [0, 0, 0, 1, 1]. Every query attends to itself.
    """
    length = segments.shape[1]
    return (causal_mask(length, length) & (segments[:, :, None] == segments[:, None, :]))[:, None]


def window_mask(mask: Mask, queries: int, keys: int, window: int, causal: bool = False) -> mx.array:
    """Mask keys more than `window` positions away, and those masked in `mask`: (T, S) or (B, 1 or H, T, S).

    causal: keys `window` or more positions before the query, which sees `window` keys with its own. Padding is counted.
    Every query attends to itself.
    """
    apart = mx.arange(keys) - mx.arange(keys - queries, keys)[:, None]  # (T, S)
    near = apart > -window if causal else mx.abs(apart) <= window
    array = as_array(mask, queries, keys)
    return near if array is None else (near & array) | (apart == 0)


def pooling_weights(tokens: mx.array, pooling: str) -> mx.array:
    """Weight of each position in the pooled vector of its row: tokens (B, S), True on tokens -> (B, 1, S).

    pooling "first": 1 on the first token; "mean": 1/n on each of the row's n tokens.
    """
    real = tokens.astype(mx.int32)
    if pooling == "first":
        chosen = (real * (mx.cumsum(real, axis=1) == 1)).astype(mx.float32)
    else:
        chosen = real / mx.maximum(mx.sum(real, axis=1, keepdims=True), 1)
    return chosen[:, None]


def as_array(mask: Mask, queries: int, keys: int) -> mx.array | None:
    """The mask "causal" as an array (T, S); any other mask unchanged."""
    return causal_mask(queries, keys) if isinstance(mask, str) else mask


def as_numbers(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """An array mask as numbers to add to the scores: 0 where a query may attend, else minus infinity."""
    if mask.dtype != mx.bool_:
        return mask.astype(dtype)
    return mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))
