"""Scaled dot-product attention and multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D model, H heads, K key-value heads, d_k and d_v: widths of one head's keys, values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .cache import Integers, KeyValues, LayerCache, product
from .dropout import Dropout
from .masks import Mask, as_array, as_numbers
from .norms import RMSNorm
from .positions import Rotation, rotate


class Attention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O, for self-attention and cross-attention alike.

    Call `keys_values`, then `attend`: keys and values of the encoder's output are computed once for all decoding steps.
    Options of the network act in these two methods; `split`, `merge` and `kernel` are how a device computes them.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        self.scale = 1 / math.sqrt(config.d_k) if config.attention_scale is None else config.attention_scale
        bias = config.attention_bias
        self.score_cap = config.score_cap
        self.query_proj = nn.Linear(config.d_model, config.heads * config.d_k, bias)
        self.key_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_k, bias)
        self.value_proj = nn.Linear(config.d_model, config.key_value_heads * config.d_v, bias)
        self.norm_place = config.query_key_norm_place if config.query_key_norm else None
        if self.norm_place is not None:
            whole = self.norm_place == "width"
            self.query_norm = RMSNorm(config.heads * config.d_k if whole else config.d_k, config.norm_epsilon)
            self.key_norm = RMSNorm(config.key_value_heads * config.d_k if whole else config.d_k, config.norm_epsilon)
        self.output_proj = nn.Linear(config.heads * config.d_v, config.d_model, config.output_proj_bias)
        self.dropout = Dropout(config.attention_dropout)
        self.drops = config.attention_dropout > 0

    def keys_values(self, x: mx.array, rotation: Rotation = None) -> KeyValues:
        """Project x (B, S, D) to keys (B, K, S, d_k) and values (B, K, S, d_v)."""
        k = self.split(self.normed("width", "key_norm", self.key_proj(x)), self.key_value_heads)  # (B, K, S, d_k)
        v = self.split(self.value_proj(x), self.key_value_heads)  # (B, K, S, d_v)
        return self.turned("key_norm", k, rotation), v

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
        """Attend from x (B, T, D) over the cached keys and values in `past`, then k and v; returns (B, T, D).

        rows: number of rows in k and v, where several rows of x share one. E.g. all hypotheses of a sentence are
        queries over the one row of its source, so the source's keys are neither repeated nor read twice.
        """
        q = self.queries(x, rotation, rows)  # (B, H, T, d_k), or (rows, H, B/rows*T, d_k)
        y = self.kernel(q, k, v, mask, past)  # (B, H, T, d_v)
        return self.output_proj(self.merge(y, None if rows is None else x))  # (B, T, D)

    def queries(self, x: mx.array, rotation: Rotation = None, rows: int | None = None) -> mx.array:
        """Project x (B, T, D) to queries (B, H, T, d_k)."""
        q = self.split(self.normed("width", "query_norm", self.query_proj(x)), self.heads, rows)
        return self.turned("query_norm", q, rotation)

    def turned(self, norm: str, x: mx.array, rotation: Rotation) -> mx.array:
        """Rotate heads (B, H, L, d_k), and normalise each before or after, if the config says so."""
        return self.normed("after", norm, rotate(self.normed("before", norm, x), rotation))

    def normed(self, place: str, norm: str, x: mx.array) -> mx.array:
        """Apply the norm `norm` to x if this is its place."""
        return getattr(self, norm)(x) if self.norm_place == place else x

    def split(self, x: mx.array, heads: int, rows: int | None = None) -> mx.array:
        return split_heads(x, heads, rows)

    def merge(self, y: mx.array, like: mx.array | None = None) -> mx.array:
        return merge_heads(y, like)

    def kernel(self, q: mx.array, k: mx.array, v: mx.array, mask: Mask, past: LayerCache | None) -> mx.array:
        """Equation 1 for q (B, H, T, d_k), k (B, K, S, d_k) and v (B, K, S, d_v); returns (B, H, T, d_v).

        With `past`, k and v are those of the new positions only; they are appended to it.
        """
        keys, values = (k, v) if past is None else past.extend(k, v)
        if isinstance(mask, mx.array) and mask.shape[-1] > keys.shape[2]:  # of all positions, not of those held
            mask = mask[..., -keys.shape[2] :]
        if self.drops and self.training:
            weights = self.dropout(attention_weights(q, keys, mask, self.scale, self.score_cap))  # (B, H, T, S)
            return matmul_shared_heads(weights, values)
        return attention(q, keys, values, mask, self.scale, self.score_cap)

    def weights(
        self, x: mx.array, k: mx.array, mask: Mask = None, rotation: Rotation = None, rows: int | None = None
    ) -> mx.array:
        """Attention weights (B, H, T, S) of each head, for display; each row sums to 1 over the keys."""
        return attention_weights(self.queries(x, rotation, rows), k, mask, self.scale, self.score_cap)


MakeAttention = Callable[[TransformerConfig], Attention]
"""Makes an attention module from a config: `Attention`, or a subclass of it."""


def attention(
    q: mx.array,
    k: mx.array | Integers,
    v: mx.array | Integers,
    mask: Mask = None,
    scale: float | None = None,
    cap: float | None = None,
) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)) V (equation 1), of floats and without `cap` as one fused kernel; returns
    (B, H, T, d_v).

    q (B, H, T, d_k), k (B, K, S, d_k), v (B, K, S, d_v). scale: default 1 / sqrt(d_k). cap: see `attention_weights`.
    """
    if cap is not None or isinstance(k, Integers) or isinstance(v, Integers):
        return matmul_shared_heads(attention_weights(q, k, mask, scale, cap), v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def attention_weights(
    q: mx.array, k: mx.array | Integers, mask: Mask = None, scale: float | None = None, cap: float | None = None
) -> mx.array:
    """softmax(Q K^T / sqrt(d_k)), (B, H, T, S): exactly 0 where masked. The fused kernel never stores these weights.

    cap: bound of the scores, applied before the mask, which therefore still hides its keys (Gemma Team 2024).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = matmul_shared_heads(q * scale, k.swapaxes(-1, -2))  # (B, H, T, S)
    if cap is not None:
        scores = cap * mx.tanh(scores / cap)
    array = as_array(mask, *scores.shape[-2:])
    if array is not None:
        scores = scores + as_numbers(array, scores.dtype)
    return mx.softmax(scores, axis=-1, precise=True)


def matmul_shared_heads(x: mx.array, y: mx.array | Integers) -> mx.array:
    """x (B, H, T, m) @ y (B, K, m, n) -> (B, H, T, n): head h reads head h // (H/K) of y (Ainslie et al. 2023).

    The H/K heads that read the same head of y are neighbours and become rows of one product, so y is not repeated.
    """
    b, heads, t, m = x.shape
    if heads == y.shape[1]:
        return product(x, y)
    return product(x.reshape(b, y.shape[1], -1, m), y).reshape(b, heads, t, -1)


def split_heads(x: mx.array, heads: int, rows: int | None = None) -> mx.array:
    """Split (B, T, H*d) into heads (B, H, T, d), as a view. With `rows`, join rows too: (rows, H, B/rows*T, d)."""
    b, _, width = x.shape
    return x.reshape(rows or b, -1, heads, width // heads).swapaxes(1, 2)


def merge_heads(y: mx.array, like: mx.array | None = None) -> mx.array:
    """Concatenate heads (B, H, T, d) -> (B, T, H*d). `like` (B, T, ...): undo the joining of rows, back to its B, T."""
    b, h, t, d = y.shape
    return y.swapaxes(1, 2).reshape(*((b, t) if like is None else like.shape[:2]), h * d)
