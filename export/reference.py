"""The whole Transformer in plain NumPy, float64, in the paper's notation: the third opinion in every comparison.

Written for reading and for being right, not for speed, and independently of `nn/`, of the ONNX graphs and of
`spec/positions.py`. Equation and section numbers are those of "Attention Is All You Need" (Vaswani et al., 2017).
float64 gives the truth that errors are measured against; the same code in float32 gives the size of error that
single precision makes by nature. Weights and position tables are inputs: both are rounded to float32 first.

B batch, S source, T target, P past, L new tokens, D model, H heads, K key/value heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.parameters import (
    check_parameters,
    output_weight_name,
    source_embedding_name,
    target_embedding_name,
)

Array = NDArray
Bits = NDArray[np.bool_]
Tap = Callable[[str, Array], None]
KeysValues = tuple[Array, Array]


@dataclass(frozen=True)
class Cache:
    """What decoding remembers: keys and values (B,K,P,.) a layer, and which of the P past tokens are real (B,P)."""

    real: Bits
    own: tuple[KeysValues | None, ...]
    cross: tuple[KeysValues | None, ...]
    source_mask: Bits | None

    def select(self, rows: ArrayLike) -> Cache:
        """The cache of the given batch rows, in their order (beam search repeats and drops rows)."""
        index = np.asarray(rows)

        def pick(pairs: tuple[KeysValues | None, ...]) -> tuple[KeysValues | None, ...]:
            return tuple(pair and (pair[0][index], pair[1][index]) for pair in pairs)

        mask = None if self.source_mask is None else self.source_mask[index]
        return Cache(self.real[index], pick(self.own), pick(self.cross), mask)


class Reference:
    """A Transformer of any accepted config, from its parameter table, computed in `dtype` (float64 or float32).

    `tap(name, array)`, where given, sees every named point of the network in the order of the data's way.
    Raises `UserError` if the weights do not fit the config or an id or position is out of range.
    """

    def __init__(self, config: TransformerConfig, weights: Mapping[str, Array], dtype: DTypeLike = np.float64) -> None:
        check_parameters(config, {name: np.shape(array) for name, array in weights.items()}, "reference")
        self.config = config
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.weights: dict[str, Array] = {name: np.asarray(array).astype(self.dtype) for name, array in weights.items()}

    def __call__(
        self,
        source_ids: ArrayLike,
        target_ids: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        tap: Tap | None = None,
    ) -> Array:
        """Logits: (B,T,V) of an encoder-decoder, teacher-forced; (B,S,V) of an encoder or a decoder alone.

        `mask` (B,S): True on tokens of `source_ids`. `target_ids` (B,T) only where there are both stacks.
        """
        if self.config.architecture == "encoder-decoder":
            if target_ids is None:
                raise UserError("reference: an encoder-decoder needs target_ids")
            return self.decode(target_ids, self.encode(source_ids, mask, tap), mask, tap)
        if self.config.architecture == "encoder":
            return self._classify(self.encode(source_ids, mask, tap), tap)
        return self.step(source_ids, self.start(batch=len(np.asarray(source_ids))), mask, tap)[0]

    def encode(self, ids: ArrayLike, mask: ArrayLike | None = None, tap: Tap | None = None) -> Array:
        """Memory (B,S,D) of source ids (B,S): section 3.1, encoder."""
        c, tokens = self.config, _ids(ids, self.config.source_vocab_size, "source_ids")
        real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        positions = _position_ids(real)
        x = self._embed(source_embedding_name(c), "encoder", tokens, positions, tap)
        for i in range(c.encoder_layers):
            layer = f"encoder.layers.{i}"
            allowed = real[:, None, None, :]  # (B,1,1,S)

            def self_attention(y: Array, name: str = layer, allowed: Bits = allowed) -> Array:
                name += ".self_attention"
                return self._attend(name, y, self._keys_values(name, y, positions), allowed, positions)

            x = self._sublayer(f"{layer}.self_attention", x, self_attention, tap)
            x = self._sublayer(f"{layer}.feed_forward", x, self._feed_forward(layer), tap)
            _show(tap, layer, x)
        return self._final_norm("encoder", x, tap)

    def decode(
        self, target_ids: ArrayLike, memory: Array, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> Array:
        """Logits (B,T,V) of all target ids (B,T) at once, each seeing itself and its past: section 3.1, decoder."""
        return self.step(target_ids, self.start(memory, mask), tap=tap)[0]

    def start(self, memory: Array | None = None, mask: ArrayLike | None = None, batch: int | None = None) -> Cache:
        """An empty cache over memory (B,S,D) with its mask (B,S); a decoder alone gives only the batch size."""
        names = [f"decoder.layers.{i}.cross_attention" for i in range(self.config.decoder_layers)]
        rows = len(memory) if memory is not None else int(batch or 1)
        cross = tuple(None if memory is None else self._keys_values(name, memory, None) for name in names)
        source_mask = None if mask is None else np.asarray(mask, bool)
        return Cache(np.zeros((rows, 0), bool), (None,) * len(names), cross, source_mask)

    def step(
        self, ids: ArrayLike, cache: Cache, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> tuple[Array, Cache]:
        """Logits (B,L,V) of L further target ids (B,L), and the cache that remembers them.

        `mask` (B,L): True on tokens (a decoder alone whose prompts are padded).
        """
        c, tokens = self.config, _ids(ids, self.config.vocab_size, "target_ids")
        new = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        real = np.concatenate([cache.real, new], axis=1)  # (B,P+L)
        past = cache.real.shape[1]
        positions = _position_ids(real)[:, past:]
        earlier = np.tri(real.shape[1], dtype=bool)[past:]  # (L,P+L): key index <= query index
        allowed = earlier & real[:, None, None, :]  # (B,1,L,P+L)
        source = None if cache.source_mask is None else cache.source_mask[:, None, None, :]  # (B,1,1,S)
        x = self._embed(target_embedding_name(c), "decoder", tokens, positions, tap)
        own: list[KeysValues] = []
        for i in range(c.decoder_layers):
            layer = f"decoder.layers.{i}"

            def self_attention(y: Array, i: int = i, name: str = layer) -> Array:
                name += ".self_attention"
                own.append(_append(cache.own[i], self._keys_values(name, y, positions)))
                return self._attend(name, y, own[i], allowed, positions)

            def cross_attention(y: Array, i: int = i, name: str = layer) -> Array:
                memory = cache.cross[i]
                if memory is None:
                    raise UserError("reference: cross-attention needs start(memory, mask)")
                return self._attend(f"{name}.cross_attention", y, memory, source, None)

            x = self._sublayer(f"{layer}.self_attention", x, self_attention, tap)
            if c.has_encoder:
                x = self._sublayer(f"{layer}.cross_attention", x, cross_attention, tap)
            x = self._sublayer(f"{layer}.feed_forward", x, self._feed_forward(layer), tap)
            _show(tap, layer, x)
        logits = self._classify(self._final_norm("decoder", x, tap), tap)
        return logits, Cache(real, tuple(own), cache.cross, cache.source_mask)

    # Section 3.4, 3.5: embedding * sqrt(d_model) + PE(pos)

    def _embed(self, name: str, stack: str, ids: Array, positions: Array, tap: Tap | None) -> Array:
        c = self.config
        x = self.weights[name][ids]  # (B,L,D)
        if c.scale_embeddings:
            x = x * float(np.float32(math.sqrt(c.d_model)))
        if c.positions == "learned":
            table = self.weights[f"{stack}.positions.weight"]
            if positions.size and positions.max() >= len(table):
                raise UserError(f"{stack}: position {positions.max()} is past the learned table of {len(table)} rows")
            x = x + table[positions]
        elif c.positions in ("sinusoidal", "sinusoidal_concat"):
            x = x + sinusoid(positions, c.d_model, c.positions).astype(self.dtype)
        _show(tap, f"{stack}.embedding", x)
        return x

    # Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O

    def _keys_values(self, name: str, x: Array, positions: Array | None) -> KeysValues:
        """Keys (B,K,S,d_k), turned to their positions where positions are rotary, and values (B,K,S,d_v)."""
        c = self.config
        keys = _split(self._linear(f"{name}.key_proj", x), c.key_value_heads)
        values = _split(self._linear(f"{name}.value_proj", x), c.key_value_heads)
        return self._turn(keys, positions), values

    def _attend(self, name: str, x: Array, kv: KeysValues, allowed: Bits | None, positions: Array | None) -> Array:
        """One multi-head attention of x (B,L,D) over keys and values; `allowed` broadcasts to (B,H,L,S)."""
        c, group = self.config, self.config.heads // self.config.key_value_heads
        Q = self._turn(_split(self._linear(f"{name}.query_proj", x), c.heads), positions)  # (B,H,L,d_k)
        K, V = (np.repeat(part, group, axis=1) for part in kv)  # query head h reads key/value head h // group
        heads = attention(Q, K, V, allowed)  # (B,H,L,d_v)
        return self._linear(f"{name}.output_proj", _merge(heads))

    def _turn(self, x: Array, positions: Array | None) -> Array:
        """Rotary positions (Su et al. 2021) on (B,H,L,d_k): (x_i, x_{i+d_k/2}) turned by pos * base^(-2i/d_k).

        `positions` (B,L); None in cross-attention, which has no common axis to turn along.
        """
        if self.config.positions != "rotary" or positions is None:
            return x
        cos, sin = rotation(positions, self.config.d_k, self.config.rotary_base)
        cos, sin = cos.astype(self.dtype)[:, None], sin.astype(self.dtype)[:, None]  # (B,1,L,d_k/2)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    # Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2

    def _feed_forward(self, layer: str) -> Callable[[Array], Array]:
        c, name = self.config, f"{layer}.feed_forward"

        def FFN(x: Array) -> Array:
            up = self._linear(f"{name}.up_proj", x)
            if c.gated:
                inner = activation(c.activation, self._linear(f"{name}.gate_proj", x)) * up
            else:
                inner = activation(c.activation, up)
            return self._linear(f"{name}.down_proj", inner)

        return FFN

    # Section 3.1: LayerNorm(x + Sublayer(x)), or, with the norm in front, x + Sublayer(LayerNorm(x))

    def _sublayer(self, name: str, x: Array, sublayer: Callable[[Array], Array], tap: Tap | None) -> Array:
        before = self.config.norm_placement == "pre"
        y = sublayer(self._norm(f"{name}_norm", x) if before else x)
        _show(tap, name, y)
        return x + y if before else self._norm(f"{name}_norm", x + y)

    def _norm(self, name: str, x: Array) -> Array:
        """LayerNorm (Ba et al. 2016; biased variance) or RMSNorm (Zhang and Sennrich 2019)."""
        gamma = self.weights[f"{name}.weight"]
        if self.config.norm == "rmsnorm":
            return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon) * gamma
        centred = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        return centred / np.sqrt(variance + self.config.norm_epsilon) * gamma + self.weights[f"{name}.bias"]

    def _final_norm(self, stack: str, x: Array, tap: Tap | None) -> Array:
        if self.config.norm_placement == "post":
            return x
        x = self._norm(f"{stack}.norm", x)
        _show(tap, f"{stack}.norm", x)
        return x

    def _classify(self, x: Array, tap: Tap | None) -> Array:
        """Logits (B,L,V): the last linear map of figure 1, its matrix shared with the embedding where tied."""
        logits = x @ self.weights[output_weight_name(self.config)].T
        if self.config.output_bias:
            logits = logits + self.weights["output_proj.bias"]
        _show(tap, "logits", logits)
        return logits

    def _linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias


def attention(Q: Array, K: Array, V: Array, allowed: Bits | None = None) -> Array:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V: equation 1, for the last two axes.

    `allowed` (broadcast to (..., L, S)) is True where a query may look. A query that may look nowhere is padding and
    looks everywhere: its output is finite and nobody reads it.
    """
    scores = Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1])  # (...,L,S)
    if allowed is not None:
        scores = np.where(allowed | ~allowed.any(axis=-1, keepdims=True), scores, -np.inf)
    return softmax(scores) @ V


def softmax(x: Array) -> Array:
    """exp(x) / sum exp(x) over the last axis, shifted by the maximum so that nothing overflows."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def activation(name: str, x: Array) -> Array:
    """relu; gelu (Hendrycks and Gimpel 2016) exact or in its tanh form; silu x * sigmoid(x) (Elfwing et al. 2017)."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        erf = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)), x.dtype)
        return x * (1 + erf) / 2
    if name == "gelu_tanh":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    e = np.exp(-np.abs(x))  # never overflows
    return x * np.where(x >= 0, 1, e) / (1 + e)


# The angles are written with the same float64 operations as the stored tables: another order of rounding would differ
# by 1e-13, enough to fall on the other side of a float32 rounding boundary now and then.


def sinusoid(positions: Array, d_model: int, layout: str = "sinusoidal") -> NDArray[np.float32]:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)); (..., d_model).

    `sinusoidal_concat` (tensor2tensor): sines, then cosines, of pos / 10000^(j / (d/2 - 1)).
    """
    j = np.arange(d_model // 2, dtype=np.float64)
    exponent = -j / (d_model // 2 - 1) if layout == "sinusoidal_concat" else -2 * j / d_model
    angle = positions[..., None].astype(np.float64) * 10000.0**exponent
    PE = np.empty((*positions.shape, d_model))
    if layout == "sinusoidal_concat":
        PE[..., : d_model // 2], PE[..., d_model // 2 :] = np.sin(angle), np.cos(angle)
    else:
        PE[..., 0::2], PE[..., 1::2] = np.sin(angle), np.cos(angle)
    return PE.astype(np.float32)


def rotation(positions: Array, d_k: int, base: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin (..., d_k/2) of the rotary angles pos * base^(-2i/d_k)."""
    i = np.arange(d_k // 2, dtype=np.float64)
    angle = positions[..., None].astype(np.float64) * base ** (-2 * i / d_k)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _position_ids(real: Bits) -> Array:
    """Number of real tokens before each token (B,L): padding on the left moves no position."""
    return np.maximum(np.cumsum(real, axis=1) - 1, 0)


def _ids(ids: ArrayLike, vocabulary: int, name: str) -> Array:
    tokens = np.asarray(ids, dtype=np.int64)
    if tokens.ndim != 2:
        raise UserError(f"reference: {name} has shape {tokens.shape}, expected (batch, length)")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise UserError(f"reference: {name} holds an id outside 0..{vocabulary - 1}")
    return tokens


def _append(past: KeysValues | None, new: KeysValues) -> KeysValues:
    if past is None:
        return new
    return np.concatenate([past[0], new[0]], axis=2), np.concatenate([past[1], new[1]], axis=2)


def _split(x: Array, heads: int) -> Array:
    """(B,L,H*d) -> (B,H,L,d)"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _merge(x: Array) -> Array:
    """(B,H,L,d) -> (B,L,H*d)"""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _show(tap: Tap | None, name: str, value: Array) -> None:
    if tap is not None:
        tap(name, value)
