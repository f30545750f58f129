"""The decoder's step in ONNX Runtime's fused operators: `decoder.py` over rows, as the target `cpu` has it.

A Loop hands its values on without a copy but gives an operator no buffer to write into, so keys and values are appended
by the attention operator; no cache is reordered, see `decoder.py`.

Shapes: B sentences, S source, K hypotheses (h before a step), R = B*h rows, P past positions, d one head's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from export.interface import operator_shape
from export.nn.cache import KeyValues, LayerCache
from export.nn.masks import Mask
from export.nn.primitives import Op
from export.targets.cpu.network import CpuTransformer, Sources

from .decoder import TreeCache, TreeDecoder
from .steps import State


class Appended(LayerCache):
    """One layer's keys and values (B, H, P, d), to which the attention operator appends."""

    def __init__(self, keys: ir.Value, values: ir.Value, by_sentence: ir.Value):
        """by_sentence (3,): B, h, -1."""
        super().__init__(keys, values)
        self.by_sentence = by_sentence

    def attend(self, op: Op, q: ir.Value, k: ir.Value, v: ir.Value, added: Mask, **settings: Any) -> ir.Value:
        """Rows (R, H, d) over the positions, their own too, that `added` (B, 1 or H, h, P+h) allows -> (B, h, H*d)."""
        rows = (op.Reshape(x, self.by_sentence) for x in (q, k, v))
        y, self.keys, self.values = op.MultiHeadAttention(
            *(*rows, None, None, added, self.keys, self.values), _outputs=3, **settings
        )
        return y


class CpuTreeDecoder(TreeDecoder):
    """`steps.Decoder` in ONNX Runtime's operators."""

    def _encode(
        self, op: Op, source: Mapping[str, ir.Value | None], source_mask: ir.Value
    ) -> tuple[Sequence[KeyValues], ir.Value]:
        sources = Sources.of(op, source_mask, self.config.of("encoder").heads)
        self.model, self.shape = CpuTransformer(self.config, sources), operator_shape(self.config)
        memory = self.model.encode_rows(op, source)
        return self.model.cross_keys_values(op, memory), sources.mask

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        by_sentence = op.Concat(op.Shape(ids), [-1], axis=0)
        layers = [Appended(k, v, by_sentence) for k, v in self.pairs(state)]
        cache = TreeCache(layers, self.cross, self.tokens, state["mask"], op.Reshape(t, [1]), self.beam)
        logits = op.Reshape(self.model.step(op, op.Reshape(ids, [-1]), cache, tap=self.attention.tap), by_sentence)
        return logits, cache.state(state), self.attention.mean(op, ids)
