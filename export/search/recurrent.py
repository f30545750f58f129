"""The cached step of a decoder of SSRUs within the search: each hypothesis has a state of its own, (B, K, D) a layer.

Nothing grows, and a hypothesis that goes on from another takes that one's row.

Shapes: B sentences, K hypotheses (h before a step), D model.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from export.interface import BATCH, STATE
from export.nn.cache import Cache, KeyValues
from export.nn.masks import Mask, padding_mask
from export.nn.positions import PositionIds
from export.nn.primitives import Op
from export.nn.ssru import OneStep

from .decoder import CpuTreeDecoder, TreeDecoder
from .steps import Carried, State


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
