"""The whole Transformer in plain NumPy, float64, in the paper's notation: the third opinion in every comparison.

Written, here and in `layers.py`, for reading and for being right, not for speed, and independently of `nn/`,
of the ONNX graphs and of `spec/positions.py`. Equation and section numbers are those of "Attention Is All You Need"
(Vaswani et al., 2017). float64 gives the truth that errors are measured against; the same code in float32 gives the
size of error that single precision makes by nature. Weights and position tables are inputs: both are rounded to float32
first.

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

from .layers import (
    Bits,
    KeysValues,
    Look,
    activation,
    append,
    attention,
    checked_ids,
    merge_heads,
    position_ids,
    rotation,
    sinusoid,
    split_heads,
    unseen,
)

Array = NDArray
Tap = Callable[[str, Array], Array | None]
"""Sees a named point; what it returns, if anything, takes the value's place."""


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

    `tap(name, array)`, where given, sees every named point of the network in the order of the data's way; with `inside`
    also the points within the sub-layers (`validate/locate/inside.py` lists them). `UserError` if the weights do not
    fit the config or an id or position is out of range.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Array],
        dtype: DTypeLike = np.float64,
        inside: bool = False,
    ) -> None:
        check_parameters(config, {name: np.shape(array) for name, array in weights.items()}, "reference")
        self.config, self.inside = config, inside
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
        c, tokens = self.config, checked_ids(ids, self.config.source_vocab_size, "source_ids")
        real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        positions = position_ids(real)
        x = self._embed(source_embedding_name(c), "encoder", tokens, positions, tap)
        for i in range(c.encoder_layers):
            layer = f"encoder.layers.{i}"
            allowed = real[:, None, None, :]  # (B,1,1,S)

            def self_attention(y: Array, name: str = layer, allowed: Bits = allowed) -> Array:
                look = self._look(tap, f"{name}.self_attention")
                keys, values = self._keys_values(f"{name}.self_attention", y, positions, look)
                kv = look("keys", keys), look("values", values)
                return self._attend(f"{name}.self_attention", y, kv, allowed, positions, look)

            x = self._sublayer(f"{layer}.self_attention", x, self_attention, tap)
            x = self._sublayer(f"{layer}.feed_forward", x, self._feed_forward(layer, tap), tap)
            x = _show(tap, layer, x)
        return self._final_norm("encoder", x, tap)

    def decode(
        self, target_ids: ArrayLike, memory: Array, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> Array:
        """Logits (B,T,V) of all target ids (B,T) at once, each seeing itself and its past: section 3.1, decoder."""
        return self.step(target_ids, self.start(memory, mask, tap=tap), tap=tap)[0]

    def start(
        self,
        memory: Array | None = None,
        mask: ArrayLike | None = None,
        batch: int | None = None,
        tap: Tap | None = None,
    ) -> Cache:
        """An empty cache over memory (B,S,D) with its mask (B,S); a decoder alone gives only the batch size."""
        names = [f"decoder.layers.{i}.cross_attention" for i in range(self.config.decoder_layers)]
        rows = len(memory) if memory is not None else int(batch or 1)
        cross: list[KeysValues | None] = [None] * len(names)
        if memory is not None:
            for i, name in enumerate(names):
                look = self._look(tap, name)
                keys, values = self._keys_values(name, memory, None, look)
                cross[i] = look("keys", keys), look("values", values)
        source_mask = None if mask is None else np.asarray(mask, bool)
        return Cache(np.zeros((rows, 0), bool), (None,) * len(names), tuple(cross), source_mask)

    def step(
        self, ids: ArrayLike, cache: Cache, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> tuple[Array, Cache]:
        """Logits (B,L,V) of L further target ids (B,L), and the cache that remembers them.

        `mask` (B,L): True on tokens (a decoder alone whose prompts are padded).
        """
        c, tokens = self.config, checked_ids(ids, self.config.vocab_size, "target_ids")
        new = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        real = np.concatenate([cache.real, new], axis=1)  # (B,P+L)
        past = cache.real.shape[1]
        positions = position_ids(real)[:, past:]
        earlier = np.tri(real.shape[1], dtype=bool)[past:]  # (L,P+L): key index <= query index
        allowed = earlier & real[:, None, None, :]  # (B,1,L,P+L)
        source = None if cache.source_mask is None else cache.source_mask[:, None, None, :]  # (B,1,1,S)
        x = self._embed(target_embedding_name(c), "decoder", tokens, positions, tap)
        own: list[KeysValues] = []
        for i in range(c.decoder_layers):
            layer = f"decoder.layers.{i}"

            def self_attention(y: Array, i: int = i, name: str = layer) -> Array:
                look = self._look(tap, f"{name}.self_attention")
                new = self._keys_values(f"{name}.self_attention", y, positions, look)
                keys, values = append(cache.own[i], new)
                own.append((look("keys", keys), look("values", values)))
                return self._attend(f"{name}.self_attention", y, own[i], allowed, positions, look)

            def cross_attention(y: Array, i: int = i, name: str = layer) -> Array:
                memory = cache.cross[i]
                if memory is None:
                    raise UserError("reference: cross-attention needs start(memory, mask)")
                look = self._look(tap, f"{name}.cross_attention")
                return self._attend(f"{name}.cross_attention", y, memory, source, None, look)

            x = self._sublayer(f"{layer}.self_attention", x, self_attention, tap)
            if c.has_encoder:
                x = self._sublayer(f"{layer}.cross_attention", x, cross_attention, tap)
            x = self._sublayer(f"{layer}.feed_forward", x, self._feed_forward(layer, tap), tap)
            x = _show(tap, layer, x)
        logits = self._classify(self._final_norm("decoder", x, tap), tap)
        return logits, Cache(real, tuple(own), cache.cross, cache.source_mask)

    # Section 3.4, 3.5: embedding * sqrt(d_model) + PE(pos)

    def _embed(self, name: str, stack: str, ids: Array, positions: Array, tap: Tap | None) -> Array:
        c = self.config
        look = self._look(tap, f"{stack}.embedding")
        x = look("rows", self.weights[name][ids])  # (B,L,D)
        if c.scale_embeddings:
            x = look("scaled", x * float(np.float32(math.sqrt(c.d_model))))
        if c.positions == "learned":
            table = self.weights[f"{stack}.positions.weight"]
            if positions.size and positions.max() >= len(table):
                raise UserError(f"{stack}: position {positions.max()} is past the learned table of {len(table)} rows")
            x = x + table[positions]
        elif c.positions in ("sinusoidal", "sinusoidal_concat"):
            x = x + sinusoid(positions, c.d_model, c.positions).astype(self.dtype)
        return _show(tap, f"{stack}.embedding", x)

    # Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O

    def _keys_values(self, name: str, x: Array, positions: Array | None, look: Look = unseen) -> KeysValues:
        """Keys (B,K,S,d_k), turned to their positions where positions are rotary, and values (B,K,S,d_v)."""
        c = self.config
        keys = split_heads(look("key_proj", self._linear(f"{name}.key_proj", x)), c.key_value_heads)
        values = split_heads(look("value_proj", self._linear(f"{name}.value_proj", x)), c.key_value_heads)
        return self._turn(keys, positions), values

    def _attend(
        self, name: str, x: Array, kv: KeysValues, allowed: Bits | None, positions: Array | None, look: Look
    ) -> Array:
        """One multi-head attention of x (B,L,D) over keys and values; `allowed` broadcasts to (B,H,L,S)."""
        c, group = self.config, self.config.heads // self.config.key_value_heads
        Q = split_heads(look("query_proj", self._linear(f"{name}.query_proj", x)), c.heads)
        Q = look("queries", self._turn(Q, positions))  # (B,H,L,d_k)
        K, V = (np.repeat(part, group, axis=1) for part in kv)  # query head h reads key/value head h // group
        heads = attention(Q, K, V, allowed, look)  # (B,H,L,d_v)
        return self._linear(f"{name}.output_proj", look("context", merge_heads(heads)))

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

    def _feed_forward(self, layer: str, tap: Tap | None) -> Callable[[Array], Array]:
        c, name = self.config, f"{layer}.feed_forward"
        look = self._look(tap, name)

        def FFN(x: Array) -> Array:
            up = look("up_proj", self._linear(f"{name}.up_proj", x))
            if c.gated:
                gate = look("gate_proj", self._linear(f"{name}.gate_proj", x))
                inner = activation(c.activation, gate) * up
            else:
                inner = activation(c.activation, up)
            return self._linear(f"{name}.down_proj", look("inner", inner))

        return FFN

    # Section 3.1: LayerNorm(x + Sublayer(x)), or, with the norm in front, x + Sublayer(LayerNorm(x))

    def _sublayer(self, name: str, x: Array, sublayer: Callable[[Array], Array], tap: Tap | None) -> Array:
        look = self._look(tap, "")
        if self.config.norm_placement == "pre":
            y = _show(tap, name, sublayer(look(f"{name}_norm", self._norm(f"{name}_norm", x))))
            return look(f"{name}.residual", x + y)
        y = _show(tap, name, sublayer(x))
        return look(f"{name}_norm", self._norm(f"{name}_norm", look(f"{name}.residual", x + y)))

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
        return _show(tap, f"{stack}.norm", self._norm(f"{stack}.norm", x))

    def _classify(self, x: Array, tap: Tap | None) -> Array:
        """Logits (B,L,V): the last linear map of figure 1, its matrix shared with the embedding where tied."""
        logits = self._product(x, output_weight_name(self.config))
        if self.config.output_bias:
            logits = logits + self.weights["output_proj.bias"]
        return _show(tap, "logits", logits)

    def _linear(self, name: str, x: Array) -> Array:
        y = self._product(x, f"{name}.weight")
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _product(self, x: Array, weight: str) -> Array:
        """x W^T"""
        return x @ self.weights[weight].T

    def _look(self, tap: Tap | None, scope: str) -> Look:
        """Of the points inside `scope`, where anybody wants to see them."""
        if tap is None or not self.inside:
            return unseen
        return lambda point, value: _show(tap, f"{scope}.{point}" if scope else point, value)


def _show(tap: Tap | None, name: str, value: Array) -> Array:
    """What the network goes on with after a named point."""
    seen = None if tap is None else tap(name, value)
    return value if seen is None else seen
