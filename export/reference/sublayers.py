"""The sub-layers of the reference by their place in the network: which weights, which norm, which points are seen.

Equation and section numbers are those of "Attention Is All You Need" (Vaswani et al., 2017).

B batch, L new tokens, S keys, D model, H heads, K key/value heads, d_k and d_v one head's widths, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.parameters import check_parameters, output_weight_name

from .layers import (
    Bits,
    KeysValues,
    Look,
    activation,
    attention,
    bucket,
    merge_heads,
    norm,
    rotation,
    sinusoid,
    split_heads,
    unseen,
)

Array = NDArray
Tap = Callable[[str, Array], Array | None]
"""Sees a named point; what it returns, if anything, takes the value's place."""


class Sublayers:
    """What the stacks are made of, for a config and its parameter table, computed in `dtype`."""

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
        self.weights: dict[str, Array] = {
            name: np.asarray(array).astype(self.dtype, copy=False) for name, array in weights.items()
        }

    # Section 3.4, 3.5: embedding * sqrt(d_model) + PE(pos)

    def embed(self, name: str, stack: str, ids: Array, positions: Array, tap: Tap | None) -> Array:
        c = self.config
        look = self.look(tap, f"{stack}.embedding")
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
        return show(tap, f"{stack}.embedding", x)

    # Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O

    def keys_values(self, name: str, x: Array, positions: Array | None, look: Look = unseen) -> KeysValues:
        """Keys (B,K,S,d_k), turned to their positions where positions are rotary, and values (B,K,S,d_v)."""
        c = self.config
        keys = split_heads(look("key_proj", self._linear(f"{name}.key_proj", x)), c.key_value_heads)
        keys = self._turn(self._head_norm(f"{name}.key_norm", keys, look), positions)
        values = split_heads(look("value_proj", self._linear(f"{name}.value_proj", x)), c.key_value_heads)
        return keys, values

    def attend(
        self, name: str, x: Array, kv: KeysValues, allowed: Bits | None, positions: Array | None, look: Look
    ) -> Array:
        """One multi-head attention of x (B,L,D) over keys and values; `allowed` broadcasts to (B,H,L,S)."""
        c, group = self.config, self.config.heads // self.config.key_value_heads
        Q = split_heads(look("query_proj", self._linear(f"{name}.query_proj", x)), c.heads)
        Q = look("queries", self._turn(self._head_norm(f"{name}.query_norm", Q, look), positions))  # (B,H,L,d_k)
        K, V = (np.repeat(part, group, axis=1) for part in kv)  # query head h reads key/value head h // group
        heads = attention(Q, K, V, allowed, look, self._bias(name, Q.shape[2], K.shape[2]))  # (B,H,L,d_v)
        return self._linear(f"{name}.output_proj", look("context", merge_heads(heads)))

    def _bias(self, name: str, queries: int, keys: int) -> Array | None:
        """Relative positions (Raffel et al. 2020): numbers (H,L,S), one table for all layers of a stack."""
        stack, c = name.partition(".")[0], self.config
        if c.positions != "relative" or not name.endswith("self_attention"):
            return None
        distance = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
        table = self.weights[f"{stack}.positions.weight"]
        row = bucket(distance, c.relative_buckets, c.relative_distance, causal=stack == "decoder")
        return table[row].transpose(2, 0, 1)

    def _head_norm(self, name: str, x: Array, look: Look) -> Array:
        """RMSNorm over each head (B,H,L,d_k), where the config has one (Henry et al. 2020)."""
        if not self.config.query_key_norm:
            return x
        return look(name.rpartition(".")[2], norm(x, self.weights[f"{name}.weight"], None, self.config.norm_epsilon))

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

    def feed_forward(self, layer: str, tap: Tap | None) -> Callable[[Array], Array]:
        c, name = self.config, f"{layer}.feed_forward"
        look = self.look(tap, name)

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

    def sublayer(self, name: str, x: Array, sublayer: Callable[[Array], Array], tap: Tap | None) -> Array:
        look = self.look(tap, "")
        if self.config.norm_placement == "pre":
            y = show(tap, name, sublayer(look(f"{name}_norm", self._norm(f"{name}_norm", x))))
            return look(f"{name}.residual", x + y)
        y = show(tap, name, sublayer(x))
        return look(f"{name}_norm", self._norm(f"{name}_norm", look(f"{name}.residual", x + y)))

    def _norm(self, name: str, x: Array) -> Array:
        return norm(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), self.config.norm_epsilon)

    def final_norm(self, stack: str, x: Array, tap: Tap | None) -> Array:
        if self.config.norm_placement == "post":
            return x
        return show(tap, f"{stack}.norm", self._norm(f"{stack}.norm", x))

    def classify(self, x: Array, tap: Tap | None) -> Array:
        """Logits (B,L,V): the last linear map of figure 1, its matrix shared with the embedding where tied."""
        logits = self._product(x, output_weight_name(self.config))
        if self.config.output_bias:
            logits = logits + self.weights["output_proj.bias"]
        return show(tap, "logits", logits)

    def _linear(self, name: str, x: Array) -> Array:
        y = self._product(x, f"{name}.weight")
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _product(self, x: Array, weight: str) -> Array:
        """x W^T"""
        return x @ self.weights[weight].T

    def look(self, tap: Tap | None, scope: str) -> Look:
        """Of the points inside `scope`, where anybody wants to see them."""
        if tap is None or not self.inside:
            return unseen
        return lambda point, value: show(tap, f"{scope}.{point}" if scope else point, value)


def show(tap: Tap | None, name: str, value: Array) -> Array:
    """What the network goes on with after a named point."""
    seen = None if tap is None else tap(name, value)
    return value if seen is None else seen
