"""The Transformer's cached step, with the hypotheses of a sentence as positions of one run.

    cache of a sentence:  <s> | a1 a2 a3 | b1 b2 b3 | ...      1 position, then K a step
    new queries:          c1 c2 c3, each with a row of a mask that lets it attend to its own ancestors alone

So nothing of a cache is ever reordered: a hypothesis that goes on from another takes that one's mask row. All K queries
of a sentence read its keys in one product, of the decoder's past as of the source.

Shapes: B sentences, S source, K hypotheses (h before a step), P past positions, d one head's width, D model.

The cached step of a decoder of SSRUs within the search: each hypothesis has a state of its own, (B, K, D) a layer.

Nothing grows, and a hypothesis that goes on from another takes that one's row.

Shapes: B sentences, K hypotheses (h before a step), D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import onnx_ir as ir

from export.interface import BATCH, STATE, Request, cache_shape, operator_shape
from export.nn.cache import Cache, KeyValues, LayerCache
from export.nn.layers import no_tap
from export.nn.marks import HIDDEN
from export.nn.masks import Mask, padding_mask
from export.nn.model import Transformer
from export.nn.positions import PositionIds, distances
from export.nn.primitives import Op, size
from export.nn.ssru import OneStep
from export.targets.attention import AttentionTap
from export.targets.cpu.network import CpuTransformer, Sources

from .options import Vocabulary
from .steps import Carried, State


class TreeCache(Cache):
    """A cache whose new positions are hypotheses, all of them the same number of tokens from the start."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        cross: Sequence[KeyValues],
        cross_mask: Mask,
        mask: ir.Value,
        index: ir.Value,
        beam: ir.Value,
    ):
        """mask (B, h, P+h): which positions each hypothesis may attend to. index, (1, 1) or (1,): how many tokens they
        are from the start."""
        self.layers, self.cross, self.cross_mask = layers, cross, cross_mask
        self.mask, self.index, self.beam = mask, index, beam

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """Return distances (1, P+h): the key of the start token is followed by K of each step."""
        slots = op.Range(0, size(op, self.mask, 2), 1)
        keys = op.Div(op.Add(slots, op.Sub(self.beam, 1)), self.beam)
        return PositionIds(self.index, distances(op, op.Reshape(self.index, [1]), keys))

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        """Return (B, 1, h, P+h)."""
        return op.Unsqueeze(self.mask, [1])

    def state(self, before: State) -> State:
        """Return the loop's state after the step, under the names of the one before."""
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
        """Encode the source. source: what `embedded` takes; source_mask (B, S); beam: K (scalar)."""
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
        # A new position sees itself and no other hypothesis of its step.
        slot = op.Range(0, beam, 1)
        itself_only = op.Where(op.Equal(op.Unsqueeze(slot, [1]), slot), 0.0, HIDDEN)
        self.itself_only = op.Expand(itself_only, op.Concat(self.size, [1, 1], axis=0))  # (B, K, K)

    def at(self, op: Op, index: ir.Value) -> TreeDecoder:
        chosen = copy(self)
        chosen.cross = [(op.Gather(k, index), op.Gather(v, index)) for k, v in self.cross]
        chosen.vocabulary = self.vocabulary.at(op, index)
        chosen.tokens, chosen.itself_only = op.Gather(self.tokens, index), op.Gather(self.itself_only, index)
        # The builder infers nothing from Loop's inputs.
        for pair, batch_pair in zip(chosen.cross, self.cross, strict=True):
            for value, source in zip(pair, batch_pair, strict=True):
                value.type, value.shape = source.type, source.shape
        return chosen

    def _encode(
        self, op: Op, source: Mapping[str, ir.Value | None], source_mask: ir.Value
    ) -> tuple[Sequence[KeyValues], ir.Value]:
        """Return each layer's keys and values of the source, and where its tokens are (B, S)."""
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
        """Return those of the vocabulary's tokens, after tokens by their places among them."""
        ids = op.Gather(self.vocabulary.ids, places)
        return self.model.step(op, ids, cache, among=self.vocabulary.product(self.model), tap=self.attention.tap)

    def pairs(self, state: State) -> Iterator[KeyValues]:
        """Return each layer's keys and values of the past."""
        _, *flat = state.values()
        return zip(flat[::2], flat[1::2], strict=True)

    def reorder(self, op: Op, state: State, parents: ir.Value) -> State:
        ancestors = op.GatherND(state["mask"], op.Unsqueeze(parents, [2]), batch_dims=1)  # (B, K, P+h)
        return {**state, "mask": op.Concat(ancestors, self.itself_only, axis=2)}

    def _zeros(self, op: Op, others: list[int]) -> ir.Value:
        """Return zeros (B, *others)."""
        return op.ConstantOfShape(op.Concat(self.size, others, axis=0))


class Appended(LayerCache):
    """One layer's keys and values (B, H, P, d), to which the attention operator appends. A Loop hands its values on
    without a copy but gives an operator no buffer to write into."""

    def __init__(self, keys: ir.Value, values: ir.Value, by_sentence: ir.Value):
        """by_sentence (3,): B, h, -1."""
        super().__init__(keys, values)
        self.by_sentence = by_sentence

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, added: Mask, **settings: Any) -> ir.Value:
        """Return rows (R, H, d) over the positions, their own too, that `added` (B, 1 or H, h, P+h) allows -> (B, h,
        H*d)."""
        rows = (op.Reshape(x, self.by_sentence) for x in (q, k, v))
        y, self.keys, self.values = op.MultiHeadAttention(
            *(*rows, None, None, added, self.keys, self.values), _outputs=3, **settings
        )
        return y


class CpuTreeDecoder(TreeDecoder):
    """The same in ONNX Runtime's fused operators, over rows R = B*h, as the target `cpu` has it."""

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
    """A cache whose new positions are hypotheses, all of them the same number of tokens from the start."""

    def __init__(
        self, layers: Sequence[OneStep], cross: Sequence[KeyValues], cross_mask: Mask, index: ir.Value
    ) -> None:
        """index, (1, 1) or (1,): how many tokens the new positions are from the start."""
        self.layers, self.cross, self.cross_mask, self.index = layers, cross, cross_mask, index

    def position_ids(self, op: Op, ids: ir.Value) -> PositionIds:
        """No distances: nothing attends to an earlier token."""
        return PositionIds(self.index, self.index)

    def self_mask(self, op: Op, position_ids: PositionIds) -> Mask:
        return None


class RecurrentDecoder(TreeDecoder):
    """`steps.Decoder` in standard operators."""

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
    """The same over rows R = B*h, as the target `cpu` has it."""

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        by_sentence = op.Concat(op.Shape(ids), [-1], axis=0)
        layers = [OneStep(op.Reshape(x, [-1, self.config.d_model])) for x in state.values()]
        cache = StateCache(layers, self.cross, self.tokens, op.Reshape(t, [1]))
        logits = self.logits(op, op.Reshape(ids, [-1]), cache)
        after = [op.Reshape(x, by_sentence) for layer in layers for x in layer.contents()]
        logits = self.vocabulary.masked(op, op.Reshape(logits, by_sentence))
        return logits, dict(zip(state, after, strict=True)), self.attention.mean(op, ids)
