"""A text's vector, and what its tokens have, of an encoder's output in the reference's own precision:
`core/text_embedding.py` says what each way of pooling is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.pooling import Kind
from mlx_transformer.core.text_embedding import SMALLEST_NORM, TextEmbedding

from .layers import Bits, activation

Array = NDArray


def sentence_vectors(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Return the vectors (B,W) of the memory (B,S,D), `real` (B,S) being True on tokens."""
    return np.stack([_vector(embedding, rows[tokens]) for rows, tokens in zip(memory, real, strict=True)])


def token_weights(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Return the weights (B,S) of the memory's tokens, 0 on padding."""
    scores = memory @ _head(embedding, "sparse.weight", memory)[0] + _head(embedding, "sparse.bias", memory)
    return np.where(real & (scores > 0), scores, 0)


def token_vectors(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Return the vectors (B,S,W) of all its tokens but the first of a row, 0 there and on padding."""
    vectors = memory @ _head(embedding, "multi.weight", memory).T + _head(embedding, "multi.bias", memory)
    lengths = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    later = real & (np.cumsum(real, axis=1) > 1)
    return np.where(later[..., None], vectors / np.maximum(lengths, memory.dtype.type(SMALLEST_NORM)), 0)


def _head(embedding: TextEmbedding, name: str, like: Array) -> Array:
    return embedding.weights[name].astype(like.dtype)


def _vector(embedding: TextEmbedding, tokens: Array) -> Array:
    """Return (L,D), of tokens alone -> (W,)."""
    x = np.concatenate([_pooled(way, tokens) for way in embedding.pooling])
    for i, layer in enumerate(embedding.dense):
        x = embedding.weights[f"dense.{i}.weight"].astype(x.dtype) @ x
        if layer.bias:
            x = x + embedding.weights[f"dense.{i}.bias"].astype(x.dtype)
        if layer.activation != "identity":
            x = activation(layer.activation, x)
    if embedding.normalize:
        x = x / np.maximum(np.sqrt((x * x).sum()), x.dtype.type(SMALLEST_NORM))
    return x


def _pooled(way: str, tokens: Array) -> Array:
    n = len(tokens)
    if way == "cls":
        return tokens[0]
    if way == "last":
        return tokens[n - 1]
    if way == "max":
        return tokens.max(axis=0)
    if way == "weighted_mean":
        weights = np.arange(1, n + 1, dtype=tokens.dtype)
        return (weights[:, None] * tokens).sum(axis=0) / weights.sum()
    divisor = tokens.dtype.type(n if way == "mean" else np.sqrt(n))
    return tokens.sum(axis=0) / divisor


MADE: dict[Kind, Callable[[TextEmbedding, Array, Bits], Array]]
MADE = {"dense": sentence_vectors, "sparse": token_weights, "multi": token_vectors}
