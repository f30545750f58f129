"""The vectors of texts as training computes them: `core/text_embedding.py` in MLX, float32, with a gradient.

Shapes: B texts, L positions, D model, W numbers of a vector.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_transformer.core.text_embedding import SMALLEST_NORM, TextEmbedding
from mlx_transformer.nn.feedforward import ACTIVATIONS


def text_vectors(embedding: TextEmbedding, memory: mx.array, counted: mx.array) -> mx.array:
    """Return (B, W) of an encoder's output (B, L, D), pooled where `counted` (B, L) is True. Dense layers are as the
    settings have them, and have no gradient of their own."""
    memory = memory.astype(mx.float32)
    x = mx.concatenate([_pooled(memory, counted, way) for way in embedding.pooling], axis=-1)
    for i, layer in enumerate(embedding.dense):
        x = x @ mx.array(embedding.weights[f"dense.{i}.weight"]).T
        x = x + mx.array(embedding.weights[f"dense.{i}.bias"]) if layer.bias else x
        x = x if layer.activation == "identity" else ACTIVATIONS[layer.activation](x)
    return unit(x) if embedding.normalize else x


def unit(x: mx.array) -> mx.array:
    """Return (..., W) of length 1."""
    squares = mx.sum(mx.square(x), axis=-1, keepdims=True)
    return x * mx.rsqrt(mx.maximum(squares, SMALLEST_NORM**2))


def _pooled(memory: mx.array, counted: mx.array, way: str) -> mx.array:
    """Return (B, L, D) -> (B, D) by one way of pooling, whose names `core/pooling.py` explains."""
    real = counted.astype(mx.float32)
    if way == "max":
        largest = mx.max(mx.where(counted[..., None], memory, -mx.inf), axis=1)
        return mx.where(mx.any(counted, axis=1, keepdims=True), largest, 0)
    places = mx.cumsum(real, axis=1)
    count = mx.sum(real, axis=1, keepdims=True)
    if way == "cls":
        weights = real * (places == 1)
    elif way == "last":
        weights = real * (places == count)
    elif way == "weighted_mean":
        weights = real * (mx.arange(real.shape[1]) + 1)
        weights = weights / mx.maximum(mx.sum(weights, axis=1, keepdims=True), 1)
    else:
        weights = real / mx.maximum(count if way == "mean" else mx.sqrt(count), 1)
    return (weights[:, None] @ memory)[:, 0]
