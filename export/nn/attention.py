"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D model, H heads, K key-value heads, d_k and d_v: one head's keys and values.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.spec.config import TransformerConfig

from .masks import Mask
from .positions import Rotation, rotate
from .primitives import Linear, Op, extent, scoped


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O. Encoder self-, decoder self- and cross-attention alike.

    Two steps, so that a decoder can keep the keys and values of earlier steps: `keys_values`, then `attend`.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        bias = config.attention_bias
        self.query_proj = Linear(config.d_model, config.heads * config.d_k, bias)
        self.key_proj = Linear(config.d_model, config.key_value_heads * config.d_k, bias)
        self.value_proj = Linear(config.d_model, config.key_value_heads * config.d_v, bias)
        self.output_proj = Linear(config.heads * config.d_v, config.d_model, bias)

    @scoped
    def keys_values(self, op: Op, x: ir.Value, rotation: Rotation = None) -> tuple[ir.Value, ir.Value]:
        """(B, S, D) -> keys (B, K, S, d_k), values (B, K, S, d_v)."""
        k = split_heads(op, self.key_proj(op, x), self.key_value_heads)
        v = split_heads(op, self.value_proj(op, x), self.key_value_heads)
        return rotate(op, k, rotation), v

    @scoped
    def attend(self, op: Op, x: ir.Value, k: ir.Value, v: ir.Value, mask: Mask, rotation: Rotation = None) -> ir.Value:
        """Queries from x (B, T, D) over these keys and values -> (B, T, D)."""
        q = split_heads(op, self.query_proj(op, x), self.heads)
        q = rotate(op, q, rotation)
        y = attention(op, q, k, v, mask)
        return self.output_proj(op, merge_heads(op, y))


def attention(op: Op, q: ir.Value, k: ir.Value, v: ir.Value, mask: Mask = None) -> ir.Value:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1: q (B, H, T, d_k), k and v (B, K, S, ...) -> (B, H, T, d_v)."""
    weights = attention_weights(op, q, k, mask)
    return over_shared_heads(op, weights, v)


def attention_weights(op: Op, q: ir.Value, k: ir.Value, mask: Mask = None) -> ir.Value:
    """softmax(Q K^T / sqrt(d_k)): (B, H, T, S), exactly 0 where masked."""
    q = op.Mul(q, 1 / math.sqrt(extent(q, 3)))
    scores = over_shared_heads(op, q, op.Transpose(k, perm=[0, 1, 3, 2]))
    if mask is not None:
        scores = op.Add(scores, mask)
    return op.Softmax(scores, axis=-1)


def over_shared_heads(op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
    """x @ y for x (B, H, T, m), y (B, K, m, n) -> (B, H, T, n): head h reads y's head h // (H/K) (Ainslie et al. 2023).

    The H/K heads that share one lie side by side, so they become rows of one product: nothing of y is repeated.
    """
    heads, shared = extent(x, 1), extent(y, 1)
    if heads == shared:
        return op.MatMul(x, y)
    rows = op.Reshape(x, [0, shared, -1, 0])  # (B, K, H/K*T, m)
    return op.Reshape(op.MatMul(rows, y), [0, heads, -1, 0])


def split_heads(op: Op, x: ir.Value, heads: int) -> ir.Value:
    """(B, T, H*d) -> (B, H, T, d)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, extent(x, 2) // heads]), perm=[0, 2, 1, 3])


def merge_heads(op: Op, x: ir.Value) -> ir.Value:
    """(B, H, T, d) -> (B, T, H*d)."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, extent(x, 1) * extent(x, 3)])
