"""The search's settings as inputs of the graph. `generation/options.py` is the same on the host.

All but the source have a default in the file, so a caller feeds what differs alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.nn.primitives import Op
from export.search_inputs import SETTINGS, TEXT_SETTINGS
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.options import EXTRA_TOKENS


class OptionInputs:
    """The settings by name, each a scalar where no shape is named.

    beam, n_best, min_new_tokens, length_penalty, early_stopping, sample, temperature, top_k, top_p, repetition_penalty,
        no_repeat_ngram, heuristic_stop, forced_end: as in `Options`; with `sample` the beam is 1 whatever was asked.
    forced_first, suppressed, suppressed_first, end_ids: as in `Options`, (N,) ids each; (0,), none.
    banned_sequences: as in `Options`, (S, N), -1 before those of fewer ids; (0, 1), none.
    start_id: as in `Options`; -1: the model's own.
    max_new_tokens: (1,) for all sentences or (B,), one each; 0: `max_length_factor` times the source's length, or where
        that is 0 too its length + 50, at most `max_positions`.
    seed: of 64 bits; from 2^63 on as the negative number with the same bits.
    rows: (B,), each sentence's place in the caller's list, on which its draws depend; (1,), -1: that in the batch.
    prefix: (B, P), the forced first tokens of each sentence, -1 after the last; (1, P), the same for all; (1, 0), none.
    candidates: (B, N), the ids that each output may be made of, beside ends and forced ones, -1 after the last; (1, N),
        the same for all; (1, 0), all ids.
    penalty_offset: k of lp(n) = ((k + n) / (k + 1))^length_penalty; 5 is Wu et al.'s form, 0 that of transformers.
    """

    def __init__(self, inputs: Mapping[str, ir.Value]):
        self._inputs = {name: inputs[name] for name in SETTINGS}

    def __getitem__(self, name: str) -> ir.Value:
        return self._inputs[name]

    def penalty(self, op: Op, length: ir.Value) -> ir.Value:
        """lp(length) = ((k + length) / (k + 1))^alpha, float32, for integers of any shape."""
        base = op.Add(op.Cast(length, to=ir.DataType.FLOAT), self["penalty_offset"])
        return op.Pow(op.Div(base, op.Add(self["penalty_offset"], 1.0)), self["length_penalty"])

    def start(self, op: Op, config: TransformerConfig) -> ir.Value:
        """Return the token, a scalar, that the decoder begins with."""
        start_id = self["start_id"]
        return op.Where(op.Less(start_id, 0), config.bos_id, start_id)

    def length_limits(self, op: Op, lengths: ir.Value, config: TransformerConfig) -> ir.Value:
        """Return the most new tokens of each sentence (B,), eos counted, for source lengths (B,)."""
        factor = self["max_length_factor"]
        product = op.Ceil(op.Mul(op.Cast(lengths, to=ir.DataType.FLOAT), factor))
        usual = op.Where(op.Equal(factor, 0.0), op.Add(lengths, EXTRA_TOKENS), op.Cast(product, to=ir.DataType.INT64))
        usual = op.Min(usual, config.max_positions)
        usual = op.Max(usual, self["min_new_tokens"])
        return op.Where(op.Greater(self["max_new_tokens"], 0), self["max_new_tokens"], usual)


def set_defaults(graph: ir.Graph, own: Mapping[str, NDArray]) -> None:
    """Give the option inputs their defaults, once it is built: the builder takes what has a value for constant. own:
    those of the model, by name."""
    for value in graph.inputs:
        if (default := default_of(str(value.name), own)) is not None:
            value.const_value = ir.tensor(default, name=value.name)
            graph.register_initializer(value)


def default_of(name: str, own: Mapping[str, NDArray]) -> NDArray | None:
    """Return the default of an input; None of one that has to be given."""
    setting = (SETTINGS | TEXT_SETTINGS).get(name)
    return setting and own.get(name, np.full(setting.shape, setting.default, setting.dtype))
