"""The building blocks of the NumPy reference, in the paper's notation.

Equation and section numbers refer to "Attention Is All You Need" (Vaswani et al., 2017). The last part makes a text's
vector from an encoder's output; `core/text_embedding.py` describes each kind of pooling.

B batch, L new tokens, S keys, D model, H heads, K key/value heads, d_k and d_v a head's widths, W width of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Kind
from mlx_transformer.core.text_embedding import SMALLEST_NORM, TextEmbedding
from mlx_transformer.system.errors import UserError

Array = NDArray
Bits = NDArray[np.bool_]
Observe = Callable[[str, Array], Array]
"""Called with the name and value of a point; returns the value to continue with."""
KeysValues = tuple[Array, Array]
Past = tuple[Array, ...]
"""A layer's cache of past positions: keys and values, or the state (B,D) of an SSRU."""


def unobserved(name: str, value: Array) -> Array:
    """The default observer: return the value unchanged."""
    return value


def attention(
    Q: Array,
    K: Array,
    V: Array,
    allowed: Bits | None = None,
    observe: Observe = unobserved,
    bias: Array | None = None,
    weigh: Callable[[Array], Array] | None = None,
    score: Callable[[Array], Array] | None = None,
) -> Array:
    """Compute Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k) + bias) V: equation 1, for the last two axes.

    `allowed` (broadcast to (..., L, S)): True where a query may attend. A query without any allowed key is padding; it
    attends everywhere, so that its unused output is finite. `weigh`: another softmax. `score`: other scores of the
    products Q K^T.
    """
    QK = Q @ K.swapaxes(-1, -2)  # (...,L,S)
    scores = observe("scores", QK / math.sqrt(Q.shape[-1]) if score is None else score(QK))
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = np.where(allowed | ~allowed.any(axis=-1, keepdims=True), scores, -np.inf)
    return observe("weights", (weigh or softmax)(scores)) @ V


def scores(QK: Array, d_k: int, scale: float | None = None, cap: float | None = None) -> Array:
    """Compute QK / sqrt(d_k), or QK times `scale`, e.g. 1 in T5; bounded by `cap` (Gemma Team 2024, section 2.3)."""
    x = QK / math.sqrt(d_k) if scale is None else QK * scale
    return x if cap is None else cap * np.tanh(x / cap)


def softmax(x: Array) -> Array:
    """Compute exp(x) / sum exp(x) over the last axis, shifted by the maximum to avoid overflow."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def mean(x: Array) -> Array:
    """The mean over the last axis, which stays with length 1."""
    return np.mean(x, axis=-1, keepdims=True)


def norm(x: Array, gamma: Array, beta: Array | None, epsilon: float, mean: Callable[[Array], Array] = mean) -> Array:
    """Compute LayerNorm (Ba et al. 2016; biased variance); without beta RMSNorm (Zhang and Sennrich 2019)."""
    if beta is None:
        return x / np.sqrt(mean(x * x) + epsilon) * gamma
    centred = x - mean(x)
    variance = mean(centred * centred)
    return centred / np.sqrt(variance + epsilon) * gamma + beta


def activation(name: str, x: Array) -> Array:
    """Compute relu; gelu (Hendrycks and Gimpel 2016) exact or in its tanh form; silu x * sigmoid(x) (Elfwing et al.
    2017); tanh."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        erf = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)), x.dtype)
        return x * (1 + erf) / 2
    if name == "tanh":
        return np.tanh(x)
    if name == "gelu_tanh":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x))."""
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1, e) / (1 + e)


def ssru(u: Array, f: Array, c: Array | None) -> Array:
    """Compute the states c_t = f_t c_{t-1} + (1 - f_t) u_t (B,L,D) for u, f (B,L,D) (Kim et al. 2019).

    c (B,D): the state before; None: 0.
    """
    states = []
    c = np.zeros_like(u[:, 0]) if c is None else c
    for t in range(u.shape[1]):
        c = f[:, t] * c + (1 - f[:, t]) * u[:, t]
        states.append(c)
    return np.stack(states, axis=1)


# Angles use the same float64 operations as the stored tables. Another order would differ by 1e-13, which now and then
# changes a float32's last bit.


def sinusoid(positions: Array, d_model: int, layout: str = "sinusoidal") -> NDArray[np.float32]:
    """Compute section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)); (...,
    d_model).

    Other layouts: "sinusoidal_halves" has all sines first, then the cosines. "sinusoidal_concat" (tensor2tensor) has
    sines, then cosines, of pos / 10000^(j / (d/2 - 1)).
    """
    j = np.arange(d_model // 2, dtype=np.float64)
    exponent = -j / (d_model // 2 - 1) if layout == "sinusoidal_concat" else -2 * j / d_model
    angle = positions[..., None].astype(np.float64) * 10000.0**exponent
    PE = np.empty((*positions.shape, d_model))
    if layout in ("sinusoidal_halves", "sinusoidal_concat"):
        PE[..., : d_model // 2], PE[..., d_model // 2 :] = np.sin(angle), np.cos(angle)
    else:
        PE[..., 0::2], PE[..., 1::2] = np.sin(angle), np.cos(angle)
    return PE.astype(np.float32)


def rotation(positions: Array, c: TransformerConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A cos and A sin (B,L,D/2) of the rotary angles pos * f_i, in float32, for positions (B,L)."""
    pairs, scaling = range((c.rotary_width or c.d_k) // 2), c.rotary_scaling
    f = np.array([frequency(i, c) for i in pairs])
    if scaling.get("kind") == "longrope":  # by the length of each row
        far = positions.max(axis=-1) >= scaling["length"]
        f = np.where(far[:, None, None], [frequency(i, c, long=True) for i in pairs], f)  # (B,1,D/2)
    angle = (positions[..., None].astype(np.float32) * f.astype(np.float32)).astype(np.float64)
    A = np.float32(scaling.get("attention_factor", 1))
    return np.cos(angle).astype(np.float32) * A, np.sin(angle).astype(np.float32) * A


def frequency(i: int, c: TransformerConfig, long: bool = False) -> np.float32:
    """Compute f_i = base^(-2i/D) of pair i, with the config's scaling; each operation is rounded to float32.

    PI (Chen et al. 2023), Llama 3.1, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), GGUF's rope_freqs.
    """
    f32, s, D = np.float32, c.rotary_scaling, c.rotary_width or c.d_k
    inverse = f32(c.rotary_base ** float(f32(2 * i) / f32(D)))
    f = 1 / inverse
    match s.get("kind"):
        case "linear":
            return f / f32(s["factor"])
        case "divisors":
            return 1 / (f32(s["divisors"][i]) * inverse)
        case "longrope":
            return 1 / (f32(s["long" if long else "short"][i]) * inverse)
        case "llama3":
            wavelength, L, slow = f32(2 * math.pi) / f, s["length"], f / f32(s["factor"])
            if wavelength > L / s["low"]:
                return slow
            if wavelength < L / s["high"]:
                return f
            smooth = (f32(L) / wavelength - f32(s["low"])) / f32(s["high"] - s["low"])
            return (1 - smooth) * f / f32(s["factor"]) + smooth * f
        case "yarn":

            def pair_of(turns: float) -> float:
                """Solve length * base^(-2i/D) = 2 pi turns for i."""
                return D * math.log(s["length"] / (2 * math.pi * turns)) / (2 * math.log(c.rotary_base))

            first, last = pair_of(s["beta_fast"]), pair_of(s["beta_slow"])
            if s["truncate"]:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, D - 1)
            ramp = (f32(i) - f32(first)) / f32(last - first if last != first else 0.001)
            keep = 1 - min(max(ramp, f32(0)), f32(1))
            return 1 / (f32(s["factor"]) * inverse) * (1 - keep) + f * keep
    return f


def bucket(distance: Array, buckets: int, furthest: int, causal: bool) -> Array:
    """Return the bucket of each distance key - query: Raffel et al. 2020 (T5).

    causal: all b = `buckets` are for keys 0, 1, ... places back. Otherwise b/2 (rounded down) are for keys back, b/2
    for keys ahead. In either direction the first half (rounded down), e buckets, are for single distances. Bucket e + k
    of the r others begins at e * (furthest/e)^(k/r) places; the last has no end.
    """
    if not causal:
        ahead = bucket(-np.abs(distance), buckets // 2, furthest, causal=True)
        return np.where(distance > 0, buckets // 2 + ahead, ahead)
    exact = buckets // 2
    others = buckets - exact
    begins = [exact * (furthest / exact) ** (k / others) - 1e-6 for k in range(others)]
    back = np.maximum(-distance, 0)
    return np.where(back < exact, back, exact - 1 + np.searchsorted(begins, back, side="right"))


def position_ids(real: Bits) -> Array:
    """Count the tokens before each token (B,L), so that padding on the left doesn't change positions."""
    return np.maximum(np.cumsum(real, axis=1) - 1, 0)


def checked_ids(ids: ArrayLike, vocabulary: int, name: str) -> Array:
    tokens = np.asarray(ids, dtype=np.int64)
    if tokens.ndim != 2:
        raise UserError(f"reference: {name} has shape {tokens.shape}, expected (batch, length)")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise UserError(f"reference: {name} holds an id outside 0..{vocabulary - 1}")
    return tokens


def checked_source(ids: ArrayLike, c: TransformerConfig) -> Array:
    """Check an encoder's input: ids (B,S), or vectors (B,S,D). Raises UserError."""
    vectors = np.asarray(ids)
    if vectors.ndim != 3:
        return checked_ids(ids, c.source_vocab_size, "source_ids")
    if vectors.shape[2] != c.d_model:
        raise UserError(f"reference: vectors have shape {vectors.shape}, expected (batch, length, {c.d_model})")
    return vectors


def append(past: Past | None, new: KeysValues) -> KeysValues:
    if past is None:
        return new
    return np.concatenate([past[0], new[0]], axis=2), np.concatenate([past[1], new[1]], axis=2)


def split_heads(x: Array, heads: int) -> Array:
    """(B,L,H*d) -> (B,H,L,d)"""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """(B,H,L,d) -> (B,L,H*d)"""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def sentence_vectors(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Make texts' vectors (B,W) from the encoder's output (B,S,D). `real` (B,S): True on tokens."""
    return np.stack([_vector(embedding, rows[tokens]) for rows, tokens in zip(memory, real, strict=True)])


def token_weights(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Compute a weight for each token (B,S), 0 on padding (sparse vectors, e.g. BGE-M3)."""
    scores = memory @ _head(embedding, "sparse.weight", memory)[0] + _head(embedding, "sparse.bias", memory)
    return np.where(real & (scores > 0), scores, 0)


def token_vectors(embedding: TextEmbedding, memory: Array, real: Bits) -> Array:
    """Compute a vector for each token (B,S,W); 0 for a row's first token and on padding."""
    vectors = memory @ _head(embedding, "multi.weight", memory).T + _head(embedding, "multi.bias", memory)
    lengths = np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    later = real & (np.cumsum(real, axis=1) > 1)
    return np.where(later[..., None], vectors / np.maximum(lengths, memory.dtype.type(SMALLEST_NORM)), 0)


def _head(embedding: TextEmbedding, name: str, like: Array) -> Array:
    return embedding.weights[name].astype(like.dtype)


def _vector(embedding: TextEmbedding, tokens: Array) -> Array:
    """Pool a text's tokens (L,D) without padding to a vector (W,)."""
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
