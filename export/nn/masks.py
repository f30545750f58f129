"""Attention masks. Padding, causality and windows are merged into a single mask before the layers run.

Shapes: B batch, T queries, S keys. A mask is float32 and broadcasts to (B, H, T, S): 0 where a query may attend, -1e9
elsewhere. With -1e9 all runtimes agree on a row that is masked everywhere: its softmax is uniform. With minus infinity
it would be NaN.
"""

from __future__ import annotations

import onnx_ir as ir

from .marks import HIDDEN
from .primitives import Op, full_precision

Mask = ir.Value | None


def padding_mask(op: Op, tokens: ir.Value) -> ir.Value:
    """Mask padded keys: tokens (B, S) int64, 1 on tokens -> (B, 1, 1, S)."""
    return additive(op, op.Unsqueeze(as_boolean(op, tokens), [1, 2]))


def causal_mask(op: Op, distances: ir.Value) -> ir.Value:
    """Mask later keys: distances from queries to keys (T, S) -> (T, S)."""
    return additive(op, op.LessOrEqual(distances, 0))


def causal_padding_mask(op: Op, tokens: ir.Value, distances: ir.Value) -> ir.Value:
    """Mask later keys and padded keys: tokens (B, S), distances (T, S) -> (B, 1, T, S)."""
    visible = op.LessOrEqual(distances, 0)
    return additive(op, op.And(visible, op.Unsqueeze(as_boolean(op, tokens), [1, 2])))


def window_mask(op: Op, mask: Mask, distances: ir.Value, window: int, causal: bool = False) -> ir.Value:
    """Mask keys more than `window` positions away, and those masked in `mask`, e.g. (B, 1, 1, S).

    causal: keys `window` or more positions before the query, which sees `window` keys with its own. Padding is counted.
    Distances from queries to keys (L, S) -> (B, 1, L, S), without a mask (L, S). Sums are clipped at `HIDDEN`, so that
    a query that sees no key stays uniform.
    """
    close = op.Greater(distances, -window) if causal else op.LessOrEqual(op.Abs(distances), window)
    near = op.Where(close, 0.0, HIDDEN)
    return near if mask is None else op.Clip(op.Add(near, mask), HIDDEN)


def pooling_weights(op: Op, tokens: ir.Value, pooling: str) -> ir.Value:
    """Weight of each position in the pooled vector of its row: tokens (B, S) int64, 1 on tokens -> (B, 1, S).

    pooling "first": 1 on the first token; "mean": 1/n on each of the row's n tokens.
    """
    if pooling == "first":
        first = op.Cast(op.Equal(op.CumSum(tokens, 1), 1), to=ir.DataType.INT64)
        tokens = op.Mul(tokens, first)
    with full_precision(op):  # Cast gives float32 in 16-bit graphs too
        chosen = op.Cast(tokens, to=ir.DataType.FLOAT)
        if pooling == "mean":
            chosen = op.Div(chosen, op.Max(op.ReduceSum(chosen, [1], keepdims=1), 1.0))
        return op.Unsqueeze(chosen, [1])


def additive(op: Op, allowed: ir.Value) -> ir.Value:
    return op.Where(allowed, 0.0, HIDDEN)


def as_boolean(op: Op, tokens: ir.Value) -> ir.Value:
    return op.Cast(tokens, to=ir.DataType.BOOL)
