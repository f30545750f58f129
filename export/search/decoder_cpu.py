"""The decoder's step in ONNX Runtime's fused operators: `decoder.py` over rows, as the target `cpu` has it.

A Loop hands its values on without a copy but gives an operator no buffer to write into, so keys and values are appended
by the attention operator; no cache is reordered, see `decoder.py`.

Shapes: B sentences, S source, K hypotheses (h before a step), R = B*h rows, P past positions, d one head's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir

from export.nn.cache import KeyValues
from export.nn.layers import DecoderLayer
from export.nn.positions import Rotation
from export.nn.primitives import Op, name_parameters, scoped
from export.targets.cpu.network import RowsAttention, RowsTransformer, Sources, head_width
from mlx_transformer.spec.config import TransformerConfig

from .decoder import TreeDecoder
from .steps import State


@dataclass(frozen=True)
class Past:
    """One layer's keys and values (B, H, P, d), and what all layers share."""

    keys: ir.Value
    values: ir.Value
    mask: ir.Value
    """(B, 1, h, P+h), added to the scores."""
    past: ir.Value
    """(1,) position of the new tokens."""
    by_sentence: ir.Value
    """(3,): B, h, -1."""


class TreeAttention(RowsAttention):
    @scoped
    def attend_in_place(self, op: Op, x: ir.Value, past: Any, rotation: Rotation) -> tuple[ir.Value, KeyValues]:
        """Rows (R, D) over their ancestors and themselves; also all keys and values, (B, H, P+h, d)."""
        rows = self.queries(op, x, rotation), *self.keys_values(op, x, rotation)
        y, keys, values = op.MultiHeadAttention(
            *(op.Reshape(x, past.by_sentence) for x in rows),
            *(None, None, past.mask, past.keys, past.values),
            _outputs=3,
            **self.said,
        )
        return self.output(op, op.Reshape(y, [-1, self.heads * self.d])), (keys, values)


class TreeTransformer(RowsTransformer):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        for layer in self.decoder.layers:
            cast(DecoderLayer, layer).self_attention = TreeAttention(config)
        name_parameters(self)


class RowsTreeDecoder(TreeDecoder):
    """`loop.Decoder` in ONNX Runtime's operators."""

    def _encode(self, op: Op, input_ids: ir.Value, tokens: ir.Value) -> tuple[Sequence[KeyValues], ir.Value]:
        self.model, d = TreeTransformer(self.config), head_width(self.config)
        self.cached = self.config.heads, d, d
        sources = Sources.of(op, tokens, self.config.heads)
        memory = self.model.encode_rows(op, input_ids, sources)
        return self.model.cross_keys_values(op, memory, sources), sources.mask

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State]:
        mask, *flat = state.values()
        by_sentence, position = op.Concat(op.Shape(ids), [-1], axis=0), op.Reshape(t, [1])
        shared = op.Unsqueeze(mask, [1]), position, by_sentence
        past = [Past(k, v, *shared) for k, v in zip(flat[::2], flat[1::2], strict=True)]
        hidden, pairs = self.model.step_rows(op, op.Reshape(ids, [-1]), cast(Any, past), self.cross, self.tokens)
        logits = op.Reshape(self.model.logits(op, hidden), by_sentence)
        return logits, dict(zip(state, [mask, *(x for pair in pairs for x in pair)], strict=True))
