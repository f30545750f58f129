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

from mlx_transformer.core.config import RELATIVE, SINUSOIDS, TransformerConfig
from mlx_transformer.core.parameters import TOKEN_TYPES, check_parameters, output_weight_name
from mlx_transformer.system.errors import UserError

from .layers import (
    Bits,
    KeysValues,
    Observe,
    activation,
    attention,
    bucket,
    merge_heads,
    norm,
    rotation,
    sigmoid,
    sinusoid,
    softmax,
    split_heads,
    ssru,
    unobserved,
)

Array = NDArray
Tap = Callable[[str, Array], Array | None]
"""Called with the name and value of a point; what it returns, if anything, replaces the value."""


class Sublayers:
    """The parts of the stacks, for a config and its parameter table, computed in `dtype`."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Array],
        dtype: DTypeLike = np.float64,
        inner_points: bool = False,
    ) -> None:
        check_parameters(config, {name: np.shape(array) for name, array in weights.items()}, "reference")
        self.config, self.inner_points = config, inner_points
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.weights: dict[str, Array] = {
            name: np.asarray(array).astype(self.dtype, copy=False) for name, array in weights.items()
        }

    # Section 3.4, 3.5: embedding * sqrt(d_model) + PE(pos), and in BART a norm of it

    def embed(
        self, name: str, stack: str, ids: Array, positions: Array, tap: Tap | None, kinds: Array | None = None
    ) -> Array:
        """Return (B,L,D) of ids (B,L), or of vectors (B,L,D) in place of their scaled rows.

        `kinds` (B,L): those of the tokens, if the model tells them apart.
        """
        c = self.config
        x = ids.astype(self.dtype) if ids.ndim == 3 else self._rows(name, ids, self.observer(tap, f"{stack}.embedding"))
        if kinds is not None:
            x = x + self.weights[TOKEN_TYPES][kinds]
        if c.positions == "learned":
            table = self.weights[f"{stack}.positions.weight"]
            if positions.size and positions.max() >= len(table):
                raise UserError(f"{stack}: position {positions.max()} is past the learned table of {len(table)} rows")
            x = x + table[positions]
        elif c.positions in SINUSOIDS:
            x = x + sinusoid(positions + c.first_position, c.d_model, c.positions).astype(self.dtype)
        x = observe_tap(tap, f"{stack}.embedding", x)
        if not c.embedding_norm:
            return x
        return observe_tap(tap, f"{stack}.embedding_norm", self._norm(f"{stack}.embedding_norm", x))

    def _rows(self, name: str, ids: Array, observe: Observe) -> Array:
        x = observe("rows", self.weights[name][ids])  # (B,L,D)
        scale = float(np.float32(math.sqrt(self.config.d_model)))
        return observe("scaled", x * scale) if self.config.scale_embeddings else x

    # Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O

    def keys_values(self, name: str, x: Array, positions: Array | None, observe: Observe = unobserved) -> KeysValues:
        """Return the keys (B,K,S,d_k), turned to their positions where positions are rotary, and values (B,K,S,d_v)."""
        c = self.config.at(name)
        keys = split_heads(observe("key_proj", self._linear(f"{name}.key_proj", x)), c.key_value_heads)
        keys = self._turn(self._head_norm(f"{name}.key_norm", keys, observe), positions, c)
        values = split_heads(observe("value_proj", self._linear(f"{name}.value_proj", x)), c.key_value_heads)
        return keys, values

    def attend(
        self, name: str, x: Array, kv: KeysValues, allowed: Bits | None, positions: Array | None, observe: Observe
    ) -> Array:
        """Compute one multi-head attention of x (B,L,D) over keys and values; `allowed` broadcasts to (B,H,L,S)."""
        c = self.config.at(name)
        group = c.heads // c.key_value_heads
        Q = split_heads(observe("query_proj", self._linear(f"{name}.query_proj", x)), c.heads)
        Q = self._turn(self._head_norm(f"{name}.query_norm", Q, observe), positions, c)
        Q = observe("queries", Q)  # (B,H,L,d_k)
        K, V = (np.repeat(part, group, axis=1) for part in kv)  # query head h reads key/value head h // group
        bias = self.score_bias(name, Q.shape[2], K.shape[2])
        heads = attention(Q, K, V, allowed, observe, bias, self._weights, c.attention_scale)  # (B,H,L,d_v)
        return self._linear(f"{name}.output_proj", observe("context", merge_heads(heads)))

    def _weights(self, scores: Array) -> Array:
        return softmax(scores)

    def score_bias(self, name: str, queries: int, keys: int) -> Array | None:
        """Return the numbers (H,L,S) of relative positions (Raffel et al. 2020), by one table for all layers of a
        stack, or one for each (umT5)."""
        (stack, _, layer, *_), c = name.split("."), self.config
        if c.positions not in RELATIVE or not name.endswith("self_attention"):
            return None
        distance = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
        own = f".layers.{layer}" if c.positions == "relative_layers" else ""
        table = self.weights[f"{stack}.positions{own}.weight"]
        row = bucket(distance, c.relative_buckets, c.relative_distance, causal=stack == "decoder")
        return table[row].transpose(2, 0, 1)

    def _head_norm(self, name: str, x: Array, observe: Observe) -> Array:
        """Apply RMSNorm over each head (B,H,L,d_k), where the config has one (Henry et al. 2020)."""
        if not self.config.at(name).query_key_norm:
            return x
        return observe(name.rpartition(".")[2], norm(x, self.weights[f"{name}.weight"], None, self.config.norm_epsilon))

    def _turn(self, x: Array, positions: Array | None, c: TransformerConfig) -> Array:
        """Apply rotary positions (Su et al. 2021) to (B,H,L,d_k): (x_i, x_{i+d_k/2}) turned by pos * base^(-2i/d_k).

        `positions` (B,L); None in cross-attention, which has no common axis to turn along.
        """
        if c.positions != "rotary" or positions is None:
            return x
        cos, sin = rotation(positions, x.shape[-1], c.rotary_base)
        cos, sin = cos.astype(self.dtype)[:, None], sin.astype(self.dtype)[:, None]  # (B,1,L,d_k/2)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    # Kim et al. 2019, in place of a decoder's self-attention: relu(c), c = f c + (1 - f) x W, f = sigmoid(x W_f + b_f)

    def ssru(self, name: str, x: Array, c: Array | None, observe: Observe) -> tuple[Array, Array]:
        """Compute the sub-layer of x (B,L,D) from the state c (B,D) on, None at the start; and the state after it."""
        u = observe("input_proj", self._linear(f"{name}.input_proj", x))
        f = sigmoid(observe("forget_proj", self._linear(f"{name}.forget_proj", x)))
        states = observe("states", ssru(u, f, c))
        return activation("relu", states), observe("state", states[:, -1])

    # Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2

    def feed_forward(self, layer: str, tap: Tap | None) -> Callable[[Array], Array]:
        c, name = self.config.at(layer), f"{layer}.feed_forward"
        observe = self.observer(tap, name)

        def FFN(x: Array) -> Array:
            up = observe("up_proj", self._linear(f"{name}.up_proj", x))
            if c.gated:
                gate = observe("gate_proj", self._linear(f"{name}.gate_proj", x))
                inner = activation(c.activation, gate) * up
            else:
                inner = activation(c.activation, up)
            return self._linear(f"{name}.down_proj", observe("inner", inner))

        return FFN

    # Section 3.1: LayerNorm(x + Sublayer(x)), or, with the norm in front, x + Sublayer(LayerNorm(x))

    def sublayer(self, name: str, x: Array, sublayer: Callable[[Array], Array], tap: Tap | None) -> Array:
        observe = self.observer(tap, "")
        if self.config.norm_placement == "pre":
            y = observe_tap(tap, name, sublayer(self._before(name, x, observe)))
            return observe(f"{name}.residual", x + y)
        y = observe_tap(tap, name, sublayer(x))
        return observe(f"{name}_norm", self._norm(f"{name}_norm", observe(f"{name}.residual", x + y)))

    def _before(self, name: str, x: Array, observe: Observe) -> Array:
        """Apply the norm in front of a sub-layer, if there is one."""
        if not self.config.first_norm and name == "encoder.layers.0.self_attention":
            return x
        return observe(f"{name}_norm", self._norm(f"{name}_norm", x))

    def _norm(self, name: str, x: Array) -> Array:
        gamma = self.weights[f"{name}.weight"]
        beta = None if self.config.norm == "rmsnorm" else self.weights.get(f"{name}.bias", np.zeros_like(gamma))
        return norm(x, gamma, beta, self.config.norm_epsilon)

    def final_norm(self, stack: str, x: Array, tap: Tap | None) -> Array:
        if self.config.norm_placement == "post":
            return x
        return observe_tap(tap, f"{stack}.norm", self._norm(f"{stack}.norm", x))

    def head(self, memory: Array, real: Bits, tap: Tap | None) -> Array:
        """Return what an encoder's classifier reads of its last layer (B,S,D): a vector of each row (B,D), that of its
        first token or the mean of its tokens, or of each position; through norm(activation(W x + b))."""
        h, x = self.config.head, memory
        if h.per_row and h.pooling == "first":
            x = memory[np.arange(len(memory)), real.argmax(axis=1)]
        elif h.per_row:
            x = (memory * real[..., None]).sum(axis=1) / real.sum(axis=1, keepdims=True)
        if h.activation is None:
            return x
        observe = self.observer(tap, "head")
        x = activation(h.activation, observe("head_proj", self._linear("head_proj", x)))
        return observe_tap(tap, "head", self._norm("head_norm", x) if h.norm else x)

    def classify(self, x: Array, tap: Tap | None) -> Array:
        """Return the logits (B,L,V): the last linear map of figure 1, its matrix shared with the embedding where
        tied. A head without a classifier gives what that would read."""
        scale = 1.0 if self.config.logit_scale is None else float(np.float32(self.config.logit_scale))
        if not self.config.head.classifies:
            return observe_tap(tap, "logits", x)
        logits = self._product(x * scale, output_weight_name(self.config))
        if self.config.output_bias:
            logits = logits + self.weights["output_proj.bias"]
        if self.config.logit_cap is not None:  # Gemma 2 (Gemma Team 2024, section 2.3)
            cap = float(np.float32(self.config.logit_cap))
            logits = cap * np.tanh(logits / cap)
        return observe_tap(tap, "logits", logits)

    def _linear(self, name: str, x: Array) -> Array:
        y = self._product(x, f"{name}.weight")
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _product(self, x: Array, weight: str) -> Array:
        """Compute x W^T."""
        return x @ self.weights[weight].T

    def observer(self, tap: Tap | None, scope: str) -> Observe:
        """Return the observer of the points inside `scope`; one that does nothing where only taps are observed."""
        if tap is None or not self.inner_points:
            return unobserved
        return lambda point, value: observe_tap(tap, f"{scope}.{point}" if scope else point, value)


def observe_tap(tap: Tap | None, name: str, value: Array) -> Array:
    """Hand a named point to the tap; returns the value that the network goes on with."""
    replaced = None if tap is None else tap(name, value)
    return value if replaced is None else replaced
