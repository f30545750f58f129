"""The whole Transformer in plain NumPy, float64, in the paper's notation: the third opinion in every comparison.

Written, here, in `sublayers.py` and in `layers.py`, for reading and for being right, not for speed, independently of
`nn/`, of the ONNX graphs and of `core/positions.py`. Equation and section numbers are those of "Attention Is All You
Need" (Vaswani et al., 2017). float64 gives the truth that errors are measured against; the same code in float32 gives
the size of error that single precision makes by nature. Weights and position tables are inputs: both are rounded to
float32 first.

B batch, S source, T target, P past, L new tokens, D model, K key/value heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mlx_transformer.core.parameters import source_embedding_name, target_embedding_name
from mlx_transformer.system.errors import UserError

from .layers import Bits, KeysValues, Past, append, checked_ids, checked_source, position_ids
from .sublayers import Array, Sublayers, Tap, observe_tap


@dataclass(frozen=True)
class Cache:
    """The memory of decoding: keys and values (B,K,P,.) a layer (or the state (B,D) of its SSRU), and which of the P
    past tokens are real (B,P)."""

    real: Bits
    self_attention: tuple[Past | None, ...]
    cross: tuple[KeysValues | None, ...]
    source_mask: Bits | None

    def select(self, rows: ArrayLike) -> Cache:
        """Take the given batch rows, in their order (beam search repeats and drops rows)."""
        index = np.asarray(rows)

        def pick(past: Past | None) -> Any:
            return past and tuple(part[index] for part in past)

        mask = None if self.source_mask is None else self.source_mask[index]
        own, cross = (tuple(map(pick, pair)) for pair in (self.self_attention, self.cross))
        return Cache(self.real[index], own, cross, mask)


class Reference(Sublayers):
    """A Transformer of any accepted config, from its parameter table, computed in `dtype` (float64 or float32).

    `tap(name, array)`, if there is one, is called at every named point of the network in the order of the data's way;
    with `inner_points` also at those within the sub-layers (`validate/locate/inside.py` lists them). `UserError` if the
    weights do not fit the config or an id or position is out of range.
    """

    def __call__(
        self,
        source_ids: ArrayLike,
        target_ids: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        tap: Tap | None = None,
        token_types: ArrayLike | None = None,
    ) -> Array:
        """Return Logits: (B,T,V) of an encoder-decoder, teacher-forced; (B,S,V) of an encoder or a decoder alone, or
        what else an encoder's head gives.

        `mask` (B,S): True on tokens of `source_ids`. `target_ids` (B,T) only where there are both stacks. An encoder
        takes vectors (B,S,D) in place of `source_ids`.
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
        """Return the memory (B,S,D) of source ids (B,S), or of vectors (B,S,D) where their scaled rows would be:
        section 3.1, encoder.

        `token_types` (B,S): the kinds of the tokens in a model that tells them apart, by default 0.
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
            apart = np.abs(np.arange(tokens.shape[1])[:, None] - np.arange(tokens.shape[1]))  # (S,S)
            near = apart >= 0 if window is None else apart <= window
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
        """Return the logits (B,T,V) of all target ids (B,T) at once, each seeing itself and its past: section 3.1,
        decoder."""
        return self.step(target_ids, self.start(memory, mask, tap=tap), tap=tap)[0]

    def start(
        self,
        memory: Array | None = None,
        mask: ArrayLike | None = None,
        batch: int | None = None,
        tap: Tap | None = None,
    ) -> Cache:
        """Return an empty cache over memory (B,S,D) with its mask (B,S); a decoder alone gives only the batch size."""
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
        self, ids: ArrayLike, cache: Cache, mask: ArrayLike | None = None, tap: Tap | None = None
    ) -> tuple[Array, Cache]:
        """Return the logits (B,L,V) of L further target ids (B,L), and the cache that remembers them.

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
        x = self.embed(target_embedding_name(c), "decoder", tokens, positions, tap)
        pasts: list[Past] = []
        for i in range(c.decoder_layers):
            layer = f"decoder.layers.{i}"

            def self_attention(y: Array, i: int = i, name: str = layer) -> Array:
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
        logits = self.classify(self.final_norm("decoder", x, tap), tap)
        return logits, Cache(real, tuple(pasts), cache.cross, cache.source_mask)
