"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D model, H heads, K key-value heads, d_k and d_v one head's keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .cache import KeyValues, LayerCache
from .dropout import Dropout
from .masks import Mask, as_array, as_numbers
from .norms import RMSNorm
from .positions import Rotation, rotate


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O. Encoder self-, decoder self- and cross-attention alike.

    Two steps, so that those of the encoder's output are computed once: `keys_values`, then `attend`. The changes that
    an option of the network makes stand in these two; `split`, `merge` and `kernel` are how a device computes them.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        self.scale = 1 / math.sqrt(config.d_k) if config.attention_scale is None else config.attention_scale
        bias = config.attention_bias
        self.query_proj = nn.Linear(config.d_model, config.heads * config.d_k, bias)
        self.key_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_k, bias)
        self.value_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_v, bias)
        if config.query_key_norm:
            self.query_norm = RMSNorm(config.d_k, config.norm_epsilon)
            self.key_norm = RMSNorm(config.d_k, config.norm_epsilon)
        self.has_query_key_norm = config.query_key_norm
        self.output_proj = nn.Linear(config.heads * config.d_v, config.d_model, bias)
        self.dropout = Dropout(config.attention_dropout)
        self.drops = config.attention_dropout > 0

    def keys_values(self, x: mx.array, rotation: Rotation = None) -> KeyValues:
        """Return (B, S, D) -> keys (B, K, S, d_k), values (B, K, S, d_v)."""
        k = self.split(self.key_proj(x), self.key_value_heads)
        v = self.split(self.value_proj(x), self.key_value_heads)
        k = self.key_norm(k) if self.has_query_key_norm else k
        return rotate(k, rotation), v

    def attend(
        self,
        x: mx.array,
        k: mx.array,
        v: mx.array,
        mask: Mask = None,
        rotation: Rotation = None,
        past: LayerCache | None = None,
        rows: int | None = None,
    ) -> mx.array:
        """Return queries from x (B, T, D) over these keys and values, and those of the `past` -> (B, T, D).

        `rows`: of the keys, where several of x share one: the hypotheses of a sentence are its queries, so that its
        keys and values are neither repeated nor read twice.
        """
        q = self.queries(x, rotation, rows)
        y = self.kernel(q, k, v, mask, past)
        return self.output_proj(self.merge(y, None if rows is None else x))

    def queries(self, x: mx.array, rotation: Rotation = None, rows: int | None = None) -> mx.array:
        """Return (B, T, D) -> (B, H, T, d_k)."""
        q = self.split(self.query_proj(x), self.heads, rows)
        q = self.query_norm(q) if self.has_query_key_norm else q
        return rotate(q, rotation)

    def split(self, x: mx.array, heads: int, rows: int | None = None) -> mx.array:
        return split_heads(x, heads, rows)

    def merge(self, y: mx.array, like: mx.array | None = None) -> mx.array:
        return merge_heads(y, like)

    def kernel(self, q: mx.array, k: mx.array, v: mx.array, mask: Mask, past: LayerCache | None) -> mx.array:
        """Equation 1: q (B, H, T, d_k), k and v (B, K, S, ...) of the new positions -> (B, H, T, d_v)."""
        if past is not None:
            k, v = past.extend(k, v)
        if self.drops and self.training:
            return self.dropout(attention_weights(q, k, mask, self.scale)) @ share_heads(v, self.heads)
        return attention(q, k, v, mask, self.scale)

    def weights(
        self, x: mx.array, k: mx.array, mask: Mask = None, rotation: Rotation = None, rows: int | None = None
    ) -> mx.array:
        """Attention weights of each head, for display: (B, H, T, S), each row a distribution over the keys."""
        return attention_weights(self.queries(x, rotation, rows), k, mask, self.scale)


MakeAttention = Callable[[TransformerConfig], Attention]
"""The class itself, or what a target has in its place."""


def attention(q: mx.array, k: mx.array, v: mx.array, mask: Mask = None, scale: float | None = None) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1, fused: q (B, H, T, d_k), k and v (B, K, S, ...) -> (B, H, T, d_v).

    scale: instead of 1 / sqrt(d_k)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def attention_weights(q: mx.array, k: mx.array, mask: Mask = None, scale: float | None = None) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)): (B, H, T, S), exactly 0 where masked. The weights, which the fused form never
    stores."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q * scale) @ share_heads(k, q.shape[1]).swapaxes(-1, -2)
    array = as_array(mask, *scores.shape[-2:])
    if array is not None:
        scores = scores + as_numbers(array, scores.dtype)
    return mx.softmax(scores, axis=-1, precise=True)


def split_heads(x: mx.array, heads: int, rows: int | None = None) -> mx.array:
    """Return (B, T, H*d) -> (B, H, T, d), or fewer and longer `rows` (rows, H, B/rows*T, d); a view."""
    b, _, width = x.shape
    return x.reshape(rows or b, -1, heads, width // heads).swapaxes(1, 2)


def merge_heads(y: mx.array, like: mx.array | None = None) -> mx.array:
    """Return (B, H, T, d) -> (B, T, H*d), or to rows as x `like` has them."""
    b, h, t, d = y.shape
    return y.swapaxes(1, 2).reshape(*((b, t) if like is None else like.shape[:2]), h * d)


def share_heads(x: mx.array, heads: int) -> mx.array:
    """Return (B, K, S, d) -> (B, H, S, d): query head h reads key-value head h // (H/K) (Ainslie et al. 2023)."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)
