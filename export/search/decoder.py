"""A cached decoder step within the search, with the hypotheses of a sentence as positions of one run.

    cache of a sentence:  <s> | a1 a2 a3 | b1 b2 b3 | ...      1 position, then K per step
    new queries:          c1 c2 c3, each with a mask row for attending to its own ancestors only

So a cache is never reordered: a hypothesis takes over the mask row of its parent. All K queries of a sentence
share one product with the keys, both of the decoder's past and of the source.

A decoder-only model has its prompt in the place of <s>. All of a prompt but the last token is read before the loop.

In a decoder of SSRUs each hypothesis has a state of its own, (B, K, D) per layer. It doesn't grow, and a hypothesis
takes over the state of its parent.

Shapes: B sentences, S source or prompt, K hypotheses (h before a step), P past positions, d one head's width, D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from export.interface import BATCH, STATE, Request, cache_shape, operator_shape
from export.nn.cache import Cache, KeyValues, LayerCache
from export.nn.layers import no_tap
from export.nn.marks import HIDDEN
from export.nn.masks import Mask, causal_padding_mask, padding_mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds, distances, positions_of
from export.nn.primitives import END, Op, size
from export.nn.ssru import OneStep
from export.targets.attention import AttentionTap
from export.targets.cpu.network import CpuTransformer, Sources

from .options import Vocabulary
from .steps import Carried, State


class TreeCache(Cache):
    """A cache whose new positions are hypotheses, all at the same distance from the start."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        cross: Sequence[KeyValues] | None,
        cross_mask: Mask,
        mask: ir.Value,
        index: ir.Value,
        beam: ir.Value,
    ):
        """mask (B, h, P+h): each hypothesis's mask row. index, (1, 1) or (1,): position of the new tokens."""
        self.layers, self.cross, self.cross_mask = layers, cross, cross_mask
        self.mask, self.index, self.beam = mask, index, beam

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """Distances (1, P+h): the first key is the start token's, followed by K keys per step."""
        slots = op.Range(0, size(op, self.mask, 2), 1)
        keys = op.Div(op.Add(slots, op.Sub(self.beam, 1)), self.beam)
        return PositionIds(self.index, distances(op, op.Reshape(self.index, [1]), keys))

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """The mask as (B, 1, h, P+h)."""
        return op.Unsqueeze(self.mask, [1])

    def state(self, before: State) -> State:
        """The loop's state after the step, with the same names as before it."""
        arrays = [x for layer in self.layers for x in layer.contents()]
        return dict(zip(before, [self.mask, *arrays], strict=True))


class TreeDecoder:
    """`steps.Decoder` in standard operators."""

    def __init__(
        self,
        op: Op,
        request: Request,
        source: Mapping[str, ir.Value | None],
        source_mask: ir.Value,
        beam: ir.Value,
        vocabulary: Vocabulary,
    ):
        """Encode the source. source: the encoder's inputs by name, e.g. source_ids (B, S); source_mask (B, S); beam: K
        (scalar)."""
        self.vocabulary = vocabulary
        self.config, self.model, self.beam = request.config, Transformer(request.config), beam
        self.shapes = [cache_shape(layer) for layer in request.config.layers("decoder")]
        self.cross, self.tokens = self._encode(op, source, source_mask)
        vocabulary.take_rows(op, self.model)
        self.attention = AttentionTap(self.model, request.attention_layer, no_tap)
        ids = source["source_ids"]
        assert ids is not None
        self.read_width = None if request.attention_layer is None else op.Shape(ids, start=1)
        self.size = op.Shape(ids, start=0, end=1)  # (1,): B
        # A new position attends to itself, and to no other hypothesis of its step.
        slot = op.Range(0, beam, 1)
        itself_only = op.Where(op.Equal(op.Unsqueeze(slot, [1]), slot), 0.0, HIDDEN)
        self.itself_only = op.Expand(itself_only, op.Concat(self.size, [1, 1], axis=0))  # (B, K, K)

    def at(self, op: Op, index: ir.Value) -> TreeDecoder:
        chosen = copy(self)
        chosen.cross = [(op.Gather(k, index), op.Gather(v, index)) for k, v in self.cross]
        chosen.vocabulary = self.vocabulary.at(op, index)
        chosen.tokens, chosen.itself_only = op.Gather(self.tokens, index), op.Gather(self.itself_only, index)
        # The builder doesn't infer types from Loop's inputs.
        for pair, batch_pair in zip(chosen.cross, self.cross, strict=True):
            for value, source in zip(pair, batch_pair, strict=True):
                value.type, value.shape = source.type, source.shape
        return chosen

    def _encode(
        self, op: Op, source: Mapping[str, ir.Value | None], source_mask: ir.Value
    ) -> tuple[Sequence[KeyValues], ir.Value]:
        """Each layer's keys and values of the source, and the source mask (B, S)."""
        memory = self.model.encode(op, **{"source_mask": source_mask, **source})
        return self.model.decoder.cross_keys_values(op, memory), source_mask

    def initial(self, op: Op) -> dict[str, Carried]:
        caches = {"mask": Carried(self._zeros(op, [1, 1]), ir.DataType.FLOAT, (BATCH, "hypotheses", "visible"))}
        for i, shape in enumerate(self.shapes):
            for name, width in shape.widths.items():
                axes = (BATCH, shape.heads, "past", width)
                caches[f"cache.{i}.{name}"] = Carried(self._zeros(op, [shape.heads, 0, width]), ir.DataType.FLOAT, axes)
        return caches

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        layers = [LayerCache(k, v) for k, v in self.pairs(state)]
        cross_mask, index = padding_mask(op, self.tokens), op.Reshape(t, [1, 1])
        cache = TreeCache(layers, self.cross, cross_mask, state["mask"], index, self.beam)
        logits = self.logits(op, ids, cache)
        return self.vocabulary.masked(op, logits), cache.state(state), self.attention.mean(op, ids)

    def logits(self, op: Op, places: ir.Value, cache: Cache) -> ir.Value:
        """Logits of the vocabulary's tokens. places: the last tokens, by their places in the vocabulary."""
        ids = op.Gather(self.vocabulary.ids, places)
        return self.model.step(op, ids, cache, among=self.vocabulary.product(self.model), tap=self.attention.tap)

    def pairs(self, state: State) -> Iterator[KeyValues]:
        """Each layer's keys and values of past positions."""
        _, *flat = state.values()
        return zip(flat[::2], flat[1::2], strict=True)

    def reorder(self, op: Op, state: State, parents: ir.Value) -> State:
        ancestors = op.GatherND(state["mask"], op.Unsqueeze(parents, [2]), batch_dims=1)  # (B, K, P+h)
        return {**state, "mask": op.Concat(ancestors, self.itself_only, axis=2)}

    def _zeros(self, op: Op, others: list[int]) -> ir.Value:
        """Zeros (B, *others)"""
        return op.ConstantOfShape(op.Concat(self.size, others, axis=0))


class PromptCache(TreeCache):
    """A tree that grows from the last token of each prompt. Prompts end at the same place, S - 1."""

    def __init__(self, layers: Sequence[LayerCache], mask: ir.Value, index: ir.Value, beam: ir.Value, prompt: ir.Value):
        """index (b, 1): position of the new tokens. prompt: S (scalar)."""
        super().__init__(layers, None, None, mask, index, beam)
        self.prompt = prompt

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """Distances (1, P+h): S keys of the prompt, followed by K keys per step."""
        slots = op.Range(0, size(op, self.mask, 2), 1)
        after = op.Div(op.Sub(slots, self.prompt), self.beam)
        keys = op.Where(op.Less(slots, self.prompt), slots, op.Add(after, self.prompt))
        own = op.Slice(keys, [-1], [END], [0])
        return PositionIds(self.index, distances(op, own, keys))


class PromptDecoder(TreeDecoder):
    """`steps.Decoder` of a decoder-only model, in standard operators. Prompts are padded on the left."""

    def _encode(
        self, op: Op, source: Mapping[str, ir.Value | None], source_mask: ir.Value
    ) -> tuple[Sequence[KeyValues], ir.Value]:
        """Read all tokens of the prompts but the last ones. A prompt has no cross-attention."""
        every = source["source_ids"]
        assert every is not None
        self.prompt, self.last = size(op, every, 1), op.Sub(op.ReduceSum(source_mask, [1], keepdims=1), 1)  # (B, 1)
        ids, tokens = (op.Slice(x, [0], [-1], [1]) for x in (every, source_mask))  # (B, S-1)
        places = positions_of(op, size(op, ids, 1), tokens)
        mask, self.read = causal_padding_mask(op, tokens, places.distances), [LayerCache() for _ in self.shapes]
        self.model.decoder(op, self.model.embed_target(op, ids), places, mask, None, None, self.read)
        return (), source_mask

    def at(self, op: Op, index: ir.Value) -> TreeDecoder:
        chosen = copy(self)
        chosen.vocabulary, chosen.last = self.vocabulary.at(op, index), op.Gather(self.last, index)
        chosen.itself_only = op.Gather(self.itself_only, index)
        return chosen

    def initial(self, op: Op) -> dict[str, Carried]:
        caches = super().initial(op)
        visible = op.Where(op.Equal(self.tokens, 1), 0.0, HIDDEN)  # (B, S)
        starts = [op.Unsqueeze(visible, [1]), *(x for layer in self.read for x in layer.contents())]
        return {name: replace(each, start=x) for (name, each), x in zip(caches.items(), starts, strict=True)}

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        layers = [LayerCache(k, v) for k, v in self.pairs(state)]
        cache = PromptCache(layers, state["mask"], op.Add(self.last, t), self.beam, self.prompt)
        return self.vocabulary.masked(op, self.logits(op, ids, cache)), cache.state(state), None


class Appended(LayerCache):
    """One layer's keys and values (B, H, P, d). The attention operator appends to them: a Loop passes values on without
    a copy, but gives an operator no buffer to write into."""

    def __init__(self, keys: ir.Value, values: ir.Value, by_sentence: ir.Value):
        """by_sentence (3,): B, h, -1."""
        super().__init__(keys, values)
        self.by_sentence = by_sentence

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, added: Mask, **settings: Any) -> ir.Value:
        """Attend from q (R, H, d) over past and own positions; added (B, 1 or H, h, P+h) is the mask. Returns (B, h,
        H*d)."""
        rows = (op.Reshape(x, self.by_sentence) for x in (q, k, v))
        y, self.keys, self.values = op.MultiHeadAttention(
            *(*rows, None, None, added, self.keys, self.values), _outputs=3, **settings
        )
        return y


class CpuTreeDecoder(TreeDecoder):
    """The same in ONNX Runtime's fused operators, over rows R = B*h, as in target `cpu`."""

    def _encode(
        self, op: Op, source: Mapping[str, ir.Value | None], source_mask: ir.Value
    ) -> tuple[Sequence[KeyValues], ir.Value]:
        sources = Sources.of(op, source_mask)
        self.model = CpuTransformer(self.config, sources)
        self.shapes = [operator_shape(layer) for layer in self.config.layers("decoder")]
        memory = self.model.encode_rows(op, source)
        return self.model.cross_keys_values(op, memory), sources.mask

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        by_sentence = op.Concat(op.Shape(ids), [-1], axis=0)
        layers = [Appended(k, v, by_sentence) for k, v in self.pairs(state)]
        cache = TreeCache(layers, self.cross, self.tokens, state["mask"], op.Reshape(t, [1]), self.beam)
        logits = op.Reshape(self.logits(op, op.Reshape(ids, [-1]), cache), by_sentence)
        return self.vocabulary.masked(op, logits), cache.state(state), self.attention.mean(op, ids)


class StateCache(Cache):
    """A cache of SSRU states whose new positions are hypotheses, all at the same distance from the start."""

    def __init__(
        self, layers: Sequence[OneStep], cross: Sequence[KeyValues], cross_mask: Mask, index: ir.Value
    ) -> None:
        """index, (1, 1) or (1,): position of the new tokens."""
        self.layers, self.cross, self.cross_mask, self.index = layers, cross, cross_mask, index

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """No distances, since nothing attends to earlier tokens."""
        return PositionIds(self.index, self.index)

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        return None


class RecurrentDecoder(TreeDecoder):
    """`steps.Decoder` for SSRUs, in standard operators."""

    def initial(self, op: Op) -> dict[str, Carried]:
        width = self.config.d_model
        zeros = Carried(self._zeros(op, [1, width]), ir.DataType.FLOAT, (BATCH, "hypotheses", width))
        return {f"cache.{i}.{STATE}": zeros for i in range(self.config.decoder_layers)}

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        layers = [OneStep(x) for x in state.values()]
        cache = StateCache(layers, self.cross, padding_mask(op, self.tokens), op.Reshape(t, [1, 1]))
        logits = self.vocabulary.masked(op, self.logits(op, ids, cache))
        after = [x for layer in layers for x in layer.contents()]
        return logits, dict(zip(state, after, strict=True)), self.attention.mean(op, ids)

    def reorder(self, op: Op, state: State, parents: ir.Value) -> State:
        index = op.Unsqueeze(parents, [2])
        return {name: op.GatherND(x, index, batch_dims=1) for name, x in state.items()}  # (B, K, D)


class CpuRecurrentDecoder(RecurrentDecoder, CpuTreeDecoder):
    """The same over rows R = B*h, as in target `cpu`."""

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        by_sentence = op.Concat(op.Shape(ids), [-1], axis=0)
        layers = [OneStep(op.Reshape(x, [-1, self.config.d_model])) for x in state.values()]
        cache = StateCache(layers, self.cross, self.tokens, op.Reshape(t, [1]))
        logits = self.logits(op, op.Reshape(ids, [-1]), cache)
        after = [op.Reshape(x, by_sentence) for layer in layers for x in layer.contents()]
        logits = self.vocabulary.masked(op, op.Reshape(logits, by_sentence))
        return logits, dict(zip(state, after, strict=True)), self.attention.mean(op, ids)
