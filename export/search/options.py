"""The search's settings as inputs of the graph. `generation/options.py` is the same on the host.

All but `input_ids` and `attention_mask` have a default in the file, so a caller feeds what differs alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from export.nn.primitives import Op
from export.targets.graph import GraphBuilder
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.options import EXTRA_TOKENS

from .interface import DEFAULTS


@dataclass(frozen=True)
class OptionInputs:
    """The settings, each a scalar where no shape is named.

    beam, n_best, min_new_tokens, length_penalty, early_stopping, sample, temperature, top_k, top_p: as in
        `Options`; with `sample` the beam is 1 whatever was asked.
    max_new_tokens: (1,) for all sentences or (B,), one each; 0: source length + 50, at most `max_positions`.
    seed: of 64 bits; from 2^63 on as the negative number with the same bits.
    rows: (B,), each sentence's place in the caller's list, on which its draws depend; (1,), -1: that in the batch.
    penalty_offset: k of lp(n) = ((k + n) / (k + 1))^length_penalty; 5 is Wu et al.'s form, 0 that of transformers.
    """

    beam: ir.Value
    n_best: ir.Value
    min_new_tokens: ir.Value
    max_new_tokens: ir.Value
    length_penalty: ir.Value
    penalty_offset: ir.Value
    early_stopping: ir.Value
    sample: ir.Value
    temperature: ir.Value
    top_k: ir.Value
    top_p: ir.Value
    seed: ir.Value
    rows: ir.Value

    @classmethod
    def inputs(cls, g: GraphBuilder) -> OptionInputs:
        """Declare them as inputs of the graph; `set_defaults` completes them."""
        inputs = {}
        for name, value in DEFAULTS.items():
            dtype = ir.DataType.from_numpy(value.dtype)
            inputs[name] = g.builder.input(name, dtype, [name] if value.ndim else [])
        return cls(**inputs)

    def penalty(self, op: Op, length: ir.Value) -> ir.Value:
        """lp(length) = ((k + length) / (k + 1))^alpha, float32, for integers of any shape."""
        base = op.Add(op.Cast(length, to=ir.DataType.FLOAT), self.penalty_offset)
        return op.Pow(op.Div(base, op.Add(self.penalty_offset, 1.0)), self.length_penalty)

    def length_limits(self, op: Op, lengths: ir.Value, config: TransformerConfig) -> ir.Value:
        """Most new tokens of each sentence (B,), eos counted, for source lengths (B,)."""
        usual = op.Min(op.Add(lengths, EXTRA_TOKENS), config.max_positions)
        usual = op.Max(usual, self.min_new_tokens)
        return op.Where(op.Greater(self.max_new_tokens, 0), self.max_new_tokens, usual)


def set_defaults(graph: ir.Graph) -> None:
    """Give the option inputs their defaults, once it is built: the builder takes what has a value for constant."""
    for value in graph.inputs:
        if value.name in DEFAULTS:
            value.const_value = ir.tensor(DEFAULTS[value.name], name=value.name)
            graph.register_initializer(value)
