"""The whole Transformer in plain NumPy with float64, in the paper's notation: the truth in every comparison.

Written to be read and to be right, not fast, and independently of `nn/`, the ONNX graphs and `core/positions.py`.
Equation and section numbers refer to "Attention Is All You Need" (Vaswani et al., 2017). In float64 its values are the
truth. In float32 the same code shows float32's own rounding error. Weights and position tables are rounded to float32
first.

B batch, S source (or keys), T target, P past, L new tokens, D model, H heads, K key/value heads, d_k and d_v a head's
widths, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mlx_transformer.core.config import RELATIVE, SINUSOIDS, Stack, TransformerConfig
from mlx_transformer.core.parameters import (
    TOKEN_TYPES,
    check_parameters,
    output_weight_name,
    source_embedding_name,
    target_embedding_name,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import Stored, some_rows

from .layers import (
    Bits,
    KeysValues,
    Observe,
    Past,
    activation,
    append,
    attention,
    bucket,
    checked_ids,
    checked_source,
    mean,
    merge_heads,
    norm,
    position_ids,
    rotation,
    scores,
    sigmoid,
    sinusoid,
    softmax,
    split_heads,
    ssru,
    unobserved,
)

Array = NDArray
Parameters = Mapping[str, Array | Stored]
"""{parameter: array}; arrays may be read on demand (`Checkpoint.unread()`)."""
Tap = Callable[[str, Array], Array | None]
"""Called with the name and value of a point; a returned array replaces the value."""


KEPT = 4 << 20
"""Most bytes of converted weights to keep in memory."""


@dataclass(frozen=True)
class Cache:
    """A decoder's cache.

    `real` (B,P): which past positions are tokens. `self_attention`: for each layer the past keys and values (B,K,P,.),
    or an SSRU's state (B,D). `cross`: for each layer the source's keys and values (B,K,S,.). `source_mask` (B,S).
    """

    real: Bits
    self_attention: tuple[Past | None, ...]
    cross: tuple[KeysValues | None, ...]
    source_mask: Bits | None

    def select(self, rows: ArrayLike) -> Cache:
        """Return a cache with these batch rows, in this order (beam search repeats and drops rows)."""
        index = np.asarray(rows)

        def pick(past: Past | None) -> Any:
            return past and tuple(part[index] for part in past)

        mask = None if self.source_mask is None else self.source_mask[index]
        own, cross = (tuple(map(pick, pair)) for pair in (self.self_attention, self.cross))
        return Cache(self.real[index], own, cross, mask)


class Weights(MutableMapping[str, Array]):
    """The parameters in the reference's precision, read and converted when a layer needs them.

    The reference so needs the memory of a single matrix, not of a second model of twice the size. The smallest arrays,
    up to `KEPT` bytes together, stay in memory: small models are read once.
    """

    def __init__(self, stored: Parameters, dtype: np.dtype[Any]) -> None:
        self.stored, self.dtype = dict(stored), dtype
        sizes = sorted((math.prod(np.shape(array)) * dtype.itemsize, name) for name, array in stored.items())
        totals = accumulate(size for size, _ in sizes)
        self._small = {name for (_, name), total in zip(sizes, totals, strict=True) if total <= KEPT}
        self._kept: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if (array := self._kept.get(name)) is None:
            array = np.asarray(self.stored[name]).astype(self.dtype, copy=False)
            if name in self._small:
                self._kept[name] = array
        return array

    def __setitem__(self, name: str, array: Array) -> None:
        self._kept.pop(name, None)
        self.stored[name] = array

    def __delitem__(self, name: str) -> None:
        self._kept.pop(name, None)
        del self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def rows(self, name: str, ids: Array) -> Array:
        """Look up rows of a table, and convert only these."""
        table = self[name] if name in self._small else np.asarray(self.stored[name])
        return table[ids].astype(self.dtype, copy=False)

    def parts(self, name: str) -> Iterator[Array]:
        """Yield a matrix in blocks of rows, so that a large matrix is never in memory in both precisions."""
        if name in self._small:
            yield self[name]
            return
        array = np.asarray(self.stored[name])
        if array.dtype == self.dtype:
            yield array
            return
        for rows in some_rows(array.shape):
            yield array[rows].astype(self.dtype)


class Reference:
    """A Transformer of any valid config, computed in `dtype` (float64 or float32) from its parameters.

    Methods call `tap(name, array)`, if given, at every tap from embedding to logits; with `inner_points` also at the
    points inside sub-layers (`validate/points.py`).

    Raises UserError if the weights don't fit the config, or if an id or a position is out of range.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Parameters,
        dtype: DTypeLike = np.float64,
        inner_points: bool = False,
    ) -> None:
        check_parameters(config, {name: np.shape(array) for name, array in weights.items()}, "reference")
        self.config, self.inner_points = config, inner_points
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.weights = Weights(weights, self.dtype)

    def __call__(
        self,
        source_ids: ArrayLike,
        target_ids: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        tap: Tap | None = None,
        token_types: ArrayLike | None = None,
    ) -> Array:
        """Compute the logits in a full pass.

        Returns (B,T,V) for an encoder-decoder (teacher-forced), (B,S,V) for an encoder or a decoder, or the output of
        an encoder's other head. `mask` (B,S): True on tokens of `source_ids`. `target_ids` (B,T): for models with both
        stacks. An encoder also takes vectors (B,S,D) as `source_ids`.
        """
        if self.config.architecture == "encoder-decoder":
            if target_ids is None:
                raise UserError("reference: an encoder-decoder needs target_ids")
            return self.decode(target_ids, self.encode(source_ids, mask, tap), mask, tap)
        if self.config.architecture == "encoder":
            memory = self.encode(source_ids, mask, tap, token_types)
            real = np.ones(memory.shape[:2], bool) if mask is None else np.asarray(mask, bool)
            return self.classify(self.head(memory, real, tap), tap)
        return self.step(source_ids, self.start(batch=len(np.asarray(source_ids))), mask, tap)[0]

    def encode(
        self,
        ids: ArrayLike,
        mask: ArrayLike | None = None,
        tap: Tap | None = None,
        token_types: ArrayLike | None = None,
    ) -> Array:
        """Encode source ids (B,S) to the memory (B,S,D): section 3.1, encoder.

        Vectors (B,S,D) as `ids` replace the scaled embedding rows. `token_types` (B,S): by default 0; only for models
        with token types.
        """
        c, tokens = self.config, checked_source(ids, self.config)
        kinds = None
        if c.token_types:
            types = np.zeros(tokens.shape[:2], int) if token_types is None else token_types
            kinds = checked_ids(types, c.token_types, "token_types")
        real = np.ones(tokens.shape[:2], bool) if mask is None else np.asarray(mask, bool)
        positions = position_ids(real)
        x = self.embed(source_embedding_name(c), "encoder", tokens, positions, tap, kinds)
        for i in range(c.encoder_layers):
            layer = f"encoder.layers.{i}"
            window = c.of("encoder", i).window
            back = np.arange(tokens.shape[1])[:, None] - np.arange(tokens.shape[1])  # (S,S): query index - key index
            window = back.size if window is None else window
            near = (back >= 0) & (back < window) if c.causal else np.abs(back) <= window
            allowed = real[:, None, None, :] & near  # (B,1,S,S)

            def self_attention(y: Array, name: str = layer, allowed: Bits = allowed) -> Array:
                observe = self.observer(tap, f"{name}.self_attention")
                keys, values = self.keys_values(f"{name}.self_attention", y, positions, observe)
                kv = observe("keys", keys), observe("values", values)
                return self.attend(f"{name}.self_attention", y, kv, allowed, positions, observe)

            x = self.sublayer(f"{layer}.self_attention", x, self_attention, tap)
            x = self.sublayer(f"{layer}.feed_forward", x, self.feed_forward(layer, tap), tap)
            x = observe_tap(tap, layer, x)
        return self.final_norm("encoder", x, tap)

    def decode(
        self, target_ids: ArrayLike, memory: Array, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> Array:
        """Decode all target ids (B,T) in a causal pass to logits (B,T,V): section 3.1, decoder."""
        return self.step(target_ids, self.start(memory, mask, tap=tap), tap=tap)[0]

    def start(
        self,
        memory: Array | None = None,
        mask: ArrayLike | None = None,
        batch: int | None = None,
        tap: Tap | None = None,
    ) -> Cache:
        """Return an empty cache for memory (B,S,D) with its mask (B,S), or for `batch` rows without an encoder."""
        names = [f"decoder.layers.{i}.cross_attention" for i in range(self.config.decoder_layers)]
        rows = len(memory) if memory is not None else 1 if batch is None else batch
        cross: list[KeysValues | None] = [None] * len(names)
        if memory is not None:
            for i, name in enumerate(names):
                observe = self.observer(tap, name)
                keys, values = self.keys_values(name, memory, None, observe)
                cross[i] = observe("keys", keys), observe("values", values)
        source_mask = None if mask is None else np.asarray(mask, bool)
        return Cache(np.zeros((rows, 0), bool), (None,) * len(names), tuple(cross), source_mask)

    def step(
        self, ids: ArrayLike, cache: Cache, mask: ArrayLike | None = None, tap: Tap | None = None, first: int = 0
    ) -> tuple[Array, Cache]:
        """Decode L more target ids (B,L). Returns (logits (B,L-first,V), cache with these positions).

        `mask` (B,L): True on tokens, for a decoder's padded prompts. `first`: of the L positions, the first with
        logits; a negative one counts from the end.
        """
        c, tokens = self.config, checked_ids(ids, self.config.vocab_size, "target_ids")
        new = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        real = np.concatenate([cache.real, new], axis=1)  # (B,P+L)
        past = cache.real.shape[1]
        positions = position_ids(real)[:, past:]
        back = np.arange(past, real.shape[1])[:, None] - np.arange(real.shape[1])  # (L,P+L): query index - key index
        source = None if cache.source_mask is None else cache.source_mask[:, None, None, :]  # (B,1,1,S)
        x = self.embed(target_embedding_name(c), "decoder", tokens, positions, tap)
        pasts: list[Past] = []
        for i in range(c.decoder_layers):
            layer, window = f"decoder.layers.{i}", c.of("decoder", i).window
            near = (back >= 0) & (back < (back.size if window is None else window))
            allowed = near & real[:, None, None, :]  # (B,1,L,P+L)

            def self_attention(y: Array, i: int = i, name: str = layer, allowed: Bits = allowed) -> Array:
                observe = self.observer(tap, f"{name}.self_attention")
                past = cache.self_attention[i]
                if c.recurrent:
                    y, state = self.ssru(f"{name}.self_attention", y, past[0] if past else None, observe)
                    pasts.append((state,))
                    return y
                keys, values = append(past, self.keys_values(f"{name}.self_attention", y, positions, observe))
                kv = observe("keys", keys), observe("values", values)
                pasts.append(kv)
                return self.attend(f"{name}.self_attention", y, kv, allowed, positions, observe)

            def cross_attention(y: Array, i: int = i, name: str = layer) -> Array:
                memory = cache.cross[i]
                if memory is None:
                    raise UserError("reference: cross-attention needs start(memory, mask)")
                observe = self.observer(tap, f"{name}.cross_attention")
                return self.attend(f"{name}.cross_attention", y, memory, source, None, observe)

            x = self.sublayer(f"{layer}.self_attention", x, self_attention, tap)
            if c.has_encoder:
                x = self.sublayer(f"{layer}.cross_attention", x, cross_attention, tap)
            x = self.sublayer(f"{layer}.feed_forward", x, self.feed_forward(layer, tap), tap)
            x = observe_tap(tap, layer, x)
        logits = self.classify(self.final_norm("decoder", x, tap)[:, first:], tap)
        return logits, Cache(real, tuple(pasts), cache.cross, cache.source_mask)

    # Sections 3.4, 3.5: embedding * sqrt(d_model) + PE(pos); BART normalises the sum

    def embed(
        self, name: str, stack: str, ids: Array, positions: Array, tap: Tap | None, kinds: Array | None = None
    ) -> Array:
        """Embed ids (B,L) to (B,L,D); vectors (B,L,D) as `ids` replace the scaled rows. `kinds` (B,L): token types."""
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
        x = observe("rows", self.weights.rows(name, ids))  # (B,L,D)
        own = self.config.embedding_scale  # Gemma rounds sqrt(d_model), Granite has another number
        scale = float(np.float32(math.sqrt(self.config.d_model) if own is None else own))
        return observe("scaled", x * scale) if self.config.scale_embeddings else x

    # Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O

    def keys_values(self, name: str, x: Array, positions: Array | None, observe: Observe = unobserved) -> KeysValues:
        """Return keys (B,K,S,d_k), rotated if positions are rotary, and values (B,K,S,d_v)."""
        c = self.config.at(name)
        keys = self._heads(f"{name}.key", x, c.key_value_heads, positions, observe)
        values = split_heads(observe("value_proj", self._linear(f"{name}.value_proj", x)), c.key_value_heads)
        return keys, values

    def attend(
        self, name: str, x: Array, kv: KeysValues, allowed: Bits | None, positions: Array | None, observe: Observe
    ) -> Array:
        """Attend from x (B,L,D) to keys and values; `allowed` broadcasts to (B,H,L,S). Returns (B,L,D)."""
        c = self.config.at(name)
        group = c.heads // c.key_value_heads
        Q = observe("queries", self._heads(f"{name}.query", x, c.heads, positions, observe))  # (B,H,L,d_k)
        K, V = (np.repeat(part, group, axis=1) for part in kv)  # query head h reads key/value head h // group
        bias = self.score_bias(name, Q.shape[2], K.shape[2])
        cap = None if c.score_cap is None else float(np.float32(c.score_cap))
        score = partial(scores, d_k=c.d_k, scale=c.attention_scale, cap=cap)
        heads = attention(Q, K, V, allowed, observe, bias, self._weights, score)  # (B,H,L,d_v)
        return self._linear(f"{name}.output_proj", observe("context", merge_heads(heads)))

    def _weights(self, scores: Array) -> Array:
        return softmax(scores)

    def score_bias(self, name: str, queries: int, keys: int) -> Array | None:
        """Return the bias (H,L,S) of relative positions (Raffel et al. 2020); None for other positions.

        Its table belongs to a stack, or to each layer in umT5.
        """
        (stack, _, layer, *_), c = name.split("."), self.config
        if c.positions not in RELATIVE or not name.endswith("self_attention"):
            return None
        distance = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
        own = f".layers.{layer}" if c.positions == "relative_layers" else ""
        table = self.weights[f"{stack}.positions{own}.weight"]
        row = bucket(distance, c.relative_buckets, c.relative_distance, causal=c.is_causal(cast(Stack, stack)))
        return table[row].transpose(2, 0, 1)

    def _heads(self, name: str, x: Array, heads: int, positions: Array | None, observe: Observe) -> Array:
        """Return queries or keys (B,H,L,d_k), with query_key_norm normalised by RMSNorm (Henry et al. 2020).

        Each head before the rotation; each head after it (HunYuan); or all heads as one vector before it (OLMo 2).
        """
        c, kind = self.config.at(name), name.rpartition(".")[2]
        place = c.query_key_norm_place if c.query_key_norm else None

        def normed(y: Array) -> Array:
            return observe(f"{kind}_norm", self._normalised(f"{name}_norm", y, rms=True))

        y = observe(f"{kind}_proj", self._linear(f"{name}_proj", x))
        y = split_heads(normed(y) if place == "width" else y, heads)
        y = self._turn(normed(y) if place == "before" else y, positions, c)
        return normed(y) if place == "after" else y

    def _turn(self, x: Array, positions: Array | None, c: TransformerConfig) -> Array:
        """Apply rotary positions (Su et al. 2021) to (B,H,L,d_k): rotate (x_i, x_{i+D/2}) by pos * f_i.

        `positions` (B,L); None in cross-attention, where queries and keys have no common positions.
        """
        if c.positions != "rotary" or positions is None:
            return x
        cos, sin = rotation(positions, c)
        cos, sin = cos.astype(self.dtype)[:, None], sin.astype(self.dtype)[:, None]  # (B,1,L,d_k/2)
        D = 2 * cos.shape[-1]
        first, second, rest = np.split(x, [D // 2, D], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    # Kim et al. 2019, in place of a decoder's self-attention: relu(c), c = f c + (1 - f) x W, f = sigmoid(x W_f + b_f)

    def ssru(self, name: str, x: Array, c: Array | None, observe: Observe) -> tuple[Array, Array]:
        """Return (output (B,L,D) for x (B,L,D), state (B,D) after it). c (B,D): the state before; None at the start."""
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

    # Section 3.1: LayerNorm(x + Sublayer(x)); with norm_placement "pre", x + Sublayer(LayerNorm(x)); "sandwich"
    # (Gemma Team 2024) and "after" (OLMo Team 2025): another norm, or the only one, of the sub-layer's output

    def sublayer(self, name: str, x: Array, sublayer: Callable[[Array], Array], tap: Tap | None) -> Array:
        observe, placement = self.observer(tap, ""), self.config.norm_placement
        before = self._before(name, x, observe) if placement in ("pre", "sandwich") else x
        y = observe_tap(tap, name, sublayer(before))
        if placement in ("sandwich", "after"):
            y = observe(f"{name}_post_norm", self._norm(f"{name}_post_norm", y))
        scale = 1.0 if self.config.residual_scale is None else float(np.float32(self.config.residual_scale))
        z = observe(f"{name}.residual", x + scale * y)  # Granite's residual_multiplier
        return observe(f"{name}_norm", self._norm(f"{name}_norm", z)) if placement == "post" else z

    def _before(self, name: str, x: Array, observe: Observe) -> Array:
        """Apply the norm before a sub-layer; without `first_norm` the encoder's first has none."""
        if not self.config.first_norm and name == "encoder.layers.0.self_attention":
            return x
        return observe(f"{name}_norm", self._norm(f"{name}_norm", x))

    def _norm(self, name: str, x: Array) -> Array:
        return self._normalised(name, x, rms=self.config.norm == "rmsnorm")

    def _normalised(self, name: str, x: Array, rms: bool) -> Array:
        gamma = self.weights[f"{name}.weight"]
        beta = None if rms else self.weights.get(f"{name}.bias", np.zeros_like(gamma))
        return norm(x, gamma, beta, self.config.norm_epsilon, self._mean_of(name))

    def _mean_of(self, name: str) -> Callable[[Array], Array]:
        """The mean that this norm computes; `Reordered` sums in another order."""
        return mean

    def final_norm(self, stack: str, x: Array, tap: Tap | None) -> Array:
        if self.config.norm_placement == "post":
            return x
        return observe_tap(tap, f"{stack}.norm", self._norm(f"{stack}.norm", x))

    def head(self, memory: Array, real: Bits, tap: Tap | None) -> Array:
        """Compute an encoder's head before the classifier, norm(activation(W x + b)), from the memory (B,S,D).

        x is the memory (B,S,D), or a vector for each row (B,D): the first token's, or the mean over tokens. The steps
        depend on `config.head`.
        """
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
        """Compute the logits (B,L,V): the last linear map in figure 1, with the embedding's matrix if tied.

        A head without a classifier returns x.
        """
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
        done, y = 0, np.empty((*x.shape[:-1], np.shape(self.weights.stored[weight])[0]), self.dtype)
        for part in self.weights.parts(weight):
            y[..., done : done + len(part)] = x @ part.T
            done += len(part)
        return y

    def observer(self, tap: Tap | None, scope: str) -> Observe:
        """Return an observer for points inside `scope`; it does nothing without a tap or `inner_points`."""
        if tap is None or not self.inner_points:
            return unobserved
        return lambda point, value: observe_tap(tap, f"{scope}.{point}" if scope else point, value)


def observe_tap(tap: Tap | None, name: str, value: Array) -> Array:
    """Call the tap with a named point; returns the value to continue with."""
    replaced = None if tap is None else tap(name, value)
    return value if replaced is None else replaced
