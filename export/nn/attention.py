"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D model, H heads, K key-value heads, d_k and d_v: widths of one head's keys, values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.core.config import TransformerConfig

from .cache import KeyValues, LayerCache
from .marks import extent
from .masks import Mask
from .norms import RMSNorm
from .positions import Rotation, rotate
from .primitives import Linear, Op, scope, scoped


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O, for self-attention and cross-attention alike.

    Call `keys_values`, then `attend`: keys and values of the encoder's output are computed once for all decoding steps.
    Options of the network act in these two methods; `split`, `merge` and `kernel` are how a target computes them.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        self.scale = 1 / math.sqrt(config.d_k) if config.attention_scale is None else config.attention_scale
        bias = config.attention_bias
        self.score_cap = config.score_cap
        self.query_proj = Linear(config.d_model, config.heads * config.d_k, bias)
        self.key_proj = Linear(config.d_model, config.key_value_heads * config.d_k, bias)
        self.value_proj = Linear(config.d_model, config.key_value_heads * config.d_v, bias)
        self.norm_place = config.query_key_norm_place if config.query_key_norm else None
        if self.norm_place is not None:
            whole = self.norm_place == "width"
            self.query_norm = RMSNorm(config.heads * config.d_k if whole else config.d_k, config.norm_epsilon)
            self.key_norm = RMSNorm(config.key_value_heads * config.d_k if whole else config.d_k, config.norm_epsilon)
        self.output_proj = Linear(config.heads * config.d_v, config.d_model, config.output_proj_bias)

    @scoped
    def keys_values(self, op: Op, x: ir.Value, rotation: Rotation = None) -> KeyValues:
        """Project x (B, S, D) to keys (B, K, S, d_k) and values (B, K, S, d_v)."""
        k = self.split(
            op, self.normed(op, "width", "key_norm", self.key_proj(op, x)), self.key_value_heads
        )  # (B, K, S, d_k)
        v = self.split(op, self.value_proj(op, x), self.key_value_heads)  # (B, K, S, d_v)
        return self.turned(op, "key_norm", k, rotation), v

    @scoped
    def attend(
        self,
        op: Op,
        x: ir.Value,
        k: ir.Value,
        v: ir.Value,
        mask: Mask = None,
        rotation: Rotation = None,
        past: LayerCache | None = None,
        rows: ir.Value | None = None,
    ) -> ir.Value:
        """Attend from x (B, T, D) over the cached keys and values in `past`, then k and v; returns (B, T, D).

        rows (1,): number of rows in k and v, where several rows of x share one. E.g. all hypotheses of a sentence are
        queries over the one row of its source, so the source's keys are neither repeated nor read twice.
        """
        q = self.queries(op, x, rotation, rows)  # (B, H, T, d_k), or (rows, H, B/rows*T, d_k)
        y = self.kernel(op, q, k, v, mask, past)  # (B, H, T, d_v)
        return self.output_proj(op, self.merge(op, y, None if rows is None else x))  # (B, T, D)

    def queries(self, op: Op, x: ir.Value, rotation: Rotation = None, rows: ir.Value | None = None) -> ir.Value:
        """Project x (B, T, D) to queries (B, H, T, d_k)."""
        q = self.split(op, self.normed(op, "width", "query_norm", self.query_proj(op, x)), self.heads, rows)
        return self.turned(op, "query_norm", q, rotation)

    def turned(self, op: Op, norm: str, x: ir.Value, rotation: Rotation) -> ir.Value:
        """Rotate heads (B, H, L, d_k), and normalise each before or after, if the config says so."""
        return self.normed(op, "after", norm, rotate(op, self.normed(op, "before", norm, x), rotation))

    def normed(self, op: Op, place: str, norm: str, x: ir.Value) -> ir.Value:
        """Apply the norm `norm` to x if this is its place."""
        return getattr(self, norm)(op, x) if self.norm_place == place else x

    def split(self, op: Op, x: ir.Value, heads: int, rows: ir.Value | None = None) -> ir.Value:
        return split_heads(op, x, heads, rows)

    def merge(self, op: Op, y: ir.Value, like: ir.Value | None = None) -> ir.Value:
        return merge_heads(op, y, like)

    def kernel(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, mask: Mask, past: LayerCache | None) -> ir.Value:
        """Equation 1 for q (B, H, T, d_k), k (B, K, S, d_k) and v (B, K, S, d_v); returns (B, H, T, d_v).

        With `past`, k and v are those of the new positions only; they are appended to it.
        """
        if past is not None:
            k, v = past.extend(op, k, v)
        return attention(op, q, k, v, mask, self.scale, self.score_cap)

    @scoped
    def weights(
        self,
        op: Op,
        x: ir.Value,
        k: ir.Value,
        mask: Mask = None,
        rotation: Rotation = None,
        rows: ir.Value | None = None,
    ) -> ir.Value:
        """Attention weights (B, H, T, S) of each head, for display; each row sums to 1 over the keys.

        `attend` adds the same nodes; equal nodes of a graph are merged, so nothing is computed twice.
        """
        return attention_weights(op, self.queries(op, x, rotation, rows), k, mask, self.scale, self.score_cap)


MakeAttention = Callable[[TransformerConfig], Attention]
"""Makes an attention module from a config: `Attention`, or a subclass of it, e.g. `CpuAttention`."""


def attention(
    op: Op,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: Mask = None,
    scale: float | None = None,
    cap: float | None = None,
) -> ir.Value:
    """softmax(Q K^T / sqrt(d_k)) V (equation 1); returns (B, H, T, d_v).

    q (B, H, T, d_k), k (B, K, S, d_k), v (B, K, S, d_v). scale: default 1 / sqrt(d_k). cap: see `attention_weights`.
    """
    weights = attention_weights(op, q, k, mask, scale, cap)  # (B, H, T, S)
    return matmul_shared_heads(op, weights, v)  # (B, H, T, d_v)


def attention_weights(
    op: Op, q: ir.Value, k: ir.Value, mask: Mask = None, scale: float | None = None, cap: float | None = None
) -> ir.Value:
    """softmax(Q K^T / sqrt(d_k)): (B, H, T, S), exactly 0 where masked.

    cap: bound of the scores, applied before the mask, which therefore still hides its keys (Gemma Team 2024).
    """
    q = op.Mul(q, 1 / math.sqrt(extent(q, 3)) if scale is None else scale)
    scores = matmul_shared_heads(op, q, op.Transpose(k, perm=[0, 1, 3, 2]))  # (B, H, T, S)
    if cap is not None:
        with scope(op, "score_cap", "Cap"):
            scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    if mask is not None:
        scores = op.Add(scores, mask)
    return op.Softmax(scores, axis=-1)


def matmul_shared_heads(op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
    """x (B, H, T, m) @ y (B, K, m, n) -> (B, H, T, n): head h reads head h // (H/K) of y (Ainslie et al. 2023).

    The H/K heads that read the same head of y are neighbours and become rows of one product, so y is not repeated.
    """
    heads, shared = extent(x, 1), extent(y, 1)
    if heads == shared:
        return op.MatMul(x, y)
    rows = op.Reshape(x, [0, shared, -1, 0])  # (B, K, H/K*T, m)
    return op.Reshape(op.MatMul(rows, y), [0, heads, -1, 0])  # (B, H, T, n)


def split_heads(op: Op, x: ir.Value, heads: int, rows: ir.Value | None = None) -> ir.Value:
    """Split (B, T, H*d) into heads (B, H, T, d). With `rows` (1,), join rows too: (rows, H, B/rows*T, d)."""
    each = [heads, extent(x, 2) // heads]
    if rows is None:
        return op.Transpose(op.Reshape(x, [0, 0, *each]), perm=[0, 2, 1, 3])
    longer = op.Reshape(x, op.Concat(rows, [-1, *each], axis=0))  # (rows, B/rows*T, H, d)
    longer.shape = ir.Shape([None, None, *each])
    return op.Transpose(longer, perm=[0, 2, 1, 3])


def merge_heads(op: Op, y: ir.Value, like: ir.Value | None = None) -> ir.Value:
    """Concatenate heads (B, H, T, d) -> (B, T, H*d). `like` (B, T, ...): undo the joining of rows, back to its B, T."""
    width = extent(y, 1) * extent(y, 3)
    shape = [0, 0, width] if like is None else op.Concat(op.Shape(like, end=2), [width], axis=0)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), shape)
