"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D model, H heads, K key-value heads, d_k and d_v one head's keys and values.
"""

from __future__ import annotations

import math

import mlx.core as mx
from mlx import nn

from mlx_transformer.spec.config import TransformerConfig

from .masks import Mask, as_array
from .positions import Rotation, rotate


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O. Encoder self-, decoder self- and cross-attention alike.

    Two steps, so that a decoder can keep the keys and values of earlier steps: `keys_values`, then `attend`.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        bias = config.attention_bias
        self.query_proj = nn.Linear(config.d_model, config.heads * config.d_k, bias)
        self.key_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_k, bias)
        self.value_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_v, bias)
        self.output_proj = nn.Linear(config.heads * config.d_v, config.d_model, bias)
        self.dropout = nn.Dropout(config.attention_dropout)
        self.drops = config.attention_dropout > 0

    def keys_values(self, x: mx.array, rotation: Rotation = None) -> tuple[mx.array, mx.array]:
        """(B, S, D) -> keys (B, K, S, d_k), values (B, K, S, d_v)."""
        k = split_heads(self.key_proj(x), self.key_value_heads)
        v = split_heads(self.value_proj(x), self.key_value_heads)
        return rotate(k, rotation), v

    def attend(self, x: mx.array, k: mx.array, v: mx.array, mask: Mask, rotation: Rotation = None) -> mx.array:
        """Queries from x (B, T, D) over these keys and values -> (B, T, D)."""
        q = split_heads(self.query_proj(x), self.heads)
        q = rotate(q, rotation)
        if self.drops and self.training:
            y = self.dropout(attention_weights(q, k, mask)) @ share_heads(v, self.heads)
        else:
            y = attention(q, k, v, mask)
        return self.output_proj(merge_heads(y))

    def weights(self, x: mx.array, k: mx.array, mask: Mask = None, rotation: Rotation = None) -> mx.array:
        """What each head looks at, for display: (B, H, T, S), each row a distribution over the keys."""
        return attention_weights(rotate(split_heads(self.query_proj(x), self.heads), rotation), k, mask)


def attention(q: mx.array, k: mx.array, v: mx.array, mask: Mask = None) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1, fused: q (B, H, T, d_k), k and v (B, K, S, ...) -> (B, H, T, d_v)."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(q.shape[-1]), mask=mask)


def attention_weights(q: mx.array, k: mx.array, mask: Mask = None) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)): (B, H, T, S), exactly 0 where masked. What the fused form never stores."""
    scores = (q / math.sqrt(q.shape[-1])) @ share_heads(k, q.shape[1]).swapaxes(-1, -2)
    allowed = as_array(mask, *scores.shape[-2:])
    if allowed is not None:
        scores = mx.where(allowed, scores, mx.array(-mx.inf, scores.dtype))
    return mx.softmax(scores, axis=-1, precise=True)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(B, T, H*d) -> (B, H, T, d); a view."""
    b, t, width = x.shape
    return x.reshape(b, t, heads, width // heads).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """(B, H, T, d) -> (B, T, H*d)."""
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)


def share_heads(x: mx.array, heads: int) -> mx.array:
    """(B, K, S, d) -> (B, H, S, d): query head h reads key-value head h // (H/K) (Ainslie et al. 2023)."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)
