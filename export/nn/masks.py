"""Masks, built once at the graph's boundary: one merged mask an attention, added to the scores.

Shapes: B batch, T queries, S keys. A mask is float32 that broadcasts to (B, H, T, S): 0 where a query may look and -1e9
where not. That value is the one on which runtimes agree for a row that is masked everywhere (the row becomes uniform);
minus infinity would make it NaN.
"""

from __future__ import annotations

import onnx_ir as ir

from .primitives import Op, size

Mask = ir.Value | None

HIDDEN = -1e9


def padding_mask(op: Op, tokens: ir.Value) -> ir.Value:
    """Hide padded keys: tokens (B, S) int64, 1 on tokens -> (B, 1, 1, S)."""
    return additive(op, op.Unsqueeze(as_boolean(op, tokens), [1, 2]))


def causal_mask(op: Op, queries: ir.Value, keys: ir.Value) -> ir.Value:
    """No query sees a later key: (T, S), aligned at the bottom right, so the last query sees all keys."""
    return additive(op, causal(op, queries, keys))


def causal_padding_mask(op: Op, tokens: ir.Value, queries: ir.Value) -> ir.Value:
    """Causal and padding in one: tokens (B, S) -> (B, 1, T, S) for the last T of the S positions."""
    seen = causal(op, queries, size(op, tokens, 1))
    return additive(op, op.And(seen, op.Unsqueeze(as_boolean(op, tokens), [1, 2])))


def causal(op: Op, queries: ir.Value, keys: ir.Value) -> ir.Value:
    """Boolean (T, S): key <= query."""
    query = op.Unsqueeze(op.Range(op.Sub(keys, queries), keys, 1), [1])
    return op.LessOrEqual(op.Range(0, keys, 1), query)


def additive(op: Op, allowed: ir.Value) -> ir.Value:
    return op.Where(allowed, 0.0, HIDDEN)


def as_boolean(op: Op, tokens: ir.Value) -> ir.Value:
    return op.Cast(tokens, to=ir.DataType.BOOL)
