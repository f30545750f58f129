"""Masks, built once at the graph's boundary: one merged mask an attention, added to the scores.

Shapes: B batch, T queries, S keys. A mask is float32 that broadcasts to (B, H, T, S): 0 where a query may attend, -1e9
elsewhere. That value is the one on which runtimes agree for a row that is masked everywhere (the row becomes uniform);
minus infinity would make it NaN.
"""

from __future__ import annotations

import onnx_ir as ir

from .marks import HIDDEN
from .primitives import Op, full_precision

Mask = ir.Value | None


def padding_mask(op: Op, tokens: ir.Value) -> ir.Value:
    """Hide padded keys: tokens (B, S) int64, 1 on tokens -> (B, 1, 1, S)."""
    return additive(op, op.Unsqueeze(as_boolean(op, tokens), [1, 2]))


def causal_mask(op: Op, distances: ir.Value) -> ir.Value:
    """No query sees a later key: distances from queries to keys (T, S) -> (T, S)."""
    return additive(op, op.LessOrEqual(distances, 0))


def causal_padding_mask(op: Op, tokens: ir.Value, distances: ir.Value) -> ir.Value:
    """Return the causal mask and the padding's in one: tokens (B, S), distances (T, S) -> (B, 1, T, S)."""
    visible = op.LessOrEqual(distances, 0)
    return additive(op, op.And(visible, op.Unsqueeze(as_boolean(op, tokens), [1, 2])))


def window_mask(op: Op, mask: Mask, distances: ir.Value, window: int) -> ir.Value:
    """Hide keys that are more than `window` positions away, and those that a mask (B, 1, 1, S) hides: distances from
    queries to keys (L, S) -> (B, 1, L, S). No sum is less than `HIDDEN`, which a query that sees nothing has of all."""
    near = op.Where(op.LessOrEqual(op.Abs(distances), window), 0.0, HIDDEN)
    return near if mask is None else op.Clip(op.Add(near, mask), HIDDEN)


def pooling_weights(op: Op, tokens: ir.Value, pooling: str) -> ir.Value:
    """Return how much each of a row's positions counts in its vector: tokens (B, S) int64, 1 on tokens -> (B, 1, S)."""
    if pooling == "first":
        first = op.Cast(op.Equal(op.CumSum(tokens, 1), 1), to=ir.DataType.INT64)
        tokens = op.Mul(tokens, first)
    with full_precision(op):  # Cast gives float32 in graphs of sixteen bits too
        chosen = op.Cast(tokens, to=ir.DataType.FLOAT)
        if pooling == "mean":
            chosen = op.Div(chosen, op.Max(op.ReduceSum(chosen, [1], keepdims=1), 1.0))
        return op.Unsqueeze(chosen, [1])


def additive(op: Op, allowed: ir.Value) -> ir.Value:
    return op.Where(allowed, 0.0, HIDDEN)


def as_boolean(op: Op, tokens: ir.Value) -> ir.Value:
    return op.Cast(tokens, to=ir.DataType.BOOL)
