"""The search's settings as inputs of the graph. `generation/options.py` is the same on the host.

All but the source have a default in the file, so a caller feeds what differs alone.

Values of which one of two branches computes those that are wanted.

The tokens that a search chooses among: all, or a batch's candidates. `generation/candidates.py` on the host.

The search knows a token by its place among them; decoders read ids, and ids come out.

Shapes: B sentences, V vocabulary, C tokens among which is chosen (V without candidates), N candidates of a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.interface import SETTINGS, TEXT_SETTINGS
from export.nn.classifier import Product
from export.nn.model import Transformer
from export.nn.primitives import Op, branch, size
from export.nn.rows import Rows
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import EXTRA_TOKENS
from mlx_transformer.decoding.steps import BANNED


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


Values = Callable[[Op], list[ir.Value]]


def either(
    op: Op, condition: ir.Value, name: str, yes: Values, no: Values, types: tuple[ir.DataType, ...]
) -> tuple[ir.Value, ...]:
    """Return several values from `yes(op)` or `no(op)`, which return them in a list; only one of the branches runs."""

    def values(which: str) -> list[ir.Value]:
        return [ir.Value(name=f"{name}.{which}.{i}", type=ir.TensorType(dtype)) for i, dtype in enumerate(types)]

    then, otherwise = branch(op, f"{name}.yes", values("yes"), yes), branch(op, f"{name}.no", values("no"), no)
    outputs = op.If(condition, then_branch=then, else_branch=otherwise, _outputs=len(types))
    return tuple(outputs) if len(types) > 1 else (outputs,)


def as_they_are(*values: ir.Value) -> Values:
    """Return the branch that gives these values."""
    return lambda op: [op.Identity(x) for x in values]


ALL_LOGITS = "logits.no"
"""Name of the graph within the loop that computes the logits of all ids."""
INTEGER, REAL = ir.DataType.INT64, ir.DataType.FLOAT


class Vocabulary:
    """Computed outside the loop; `rows` are taken there too, once."""

    ids: ir.Value
    """(C,) ascending."""
    size: ir.Value
    """C, a scalar."""
    listed: ir.Value
    """Whether the logits of these alone are computed. Drawn tokens are drawn among all, on whose places noise hangs."""
    apart: ir.Value
    """Whether sentences have tokens of their own, so that `unlisted` counts."""
    unlisted: ir.Value
    """(B, 1, C) added to the logits: BANNED on what isn't the sentence's own; (B, 1, 1) where none is."""

    def __init__(self, op: Op, options: OptionInputs, config: TransformerConfig, count: ir.Value, by_rows: bool):
        """count (1,): B. by_rows: the classifier's rows can be taken alone; else of all logits columns are."""
        self.by_rows = by_rows
        self.config, ids_of_all, v = config, options["candidates"], config.vocab_size
        there = op.Greater(op.Size(ids_of_all), 0)
        self.listed = op.And(there, op.Not(options["sample"]))
        several = op.Greater(op.Squeeze(count, [0]), 1)
        self.apart = op.And(there, op.Or(several, options["sample"]))
        fixed = sorted({config.pad_id, config.bos_id, config.eos_id})
        start = op.Reshape(options.start(op, config), [1])
        always = op.Concat(fixed, start, options["end_ids"], options["forced_first"], axis=0)

        def marked(op: Op) -> list[ir.Value]:
            every = op.Concat(op.Reshape(ids_of_all, [-1]), op.Reshape(options["prefix"], [-1]), always, axis=0)
            every = op.Where(op.Less(every, 0), v, every)  # nothing, behind the vocabulary
            marks = op.ScatterElements(op.Expand(0, [v + 1]), every, op.Expand(1, op.Shape(every)), axis=0)
            ids = op.Squeeze(op.NonZero(op.Slice(marks, [0], [v], [0])), [0])
            places = op.Range(0, size(op, ids, 0), 1)
            return [ids, op.ScatterElements(op.Expand(-1, [v]), ids, places, axis=0)]

        def whole(op: Op) -> list[ir.Value]:
            return [op.Range(0, v, 1), op.Range(0, v, 1)]

        self.ids, self._places = either(op, self.listed, "vocabulary", marked, whole, (INTEGER, INTEGER))

        def own(op: Op) -> list[ir.Value]:
            rows = [op.Expand(x, op.Concat(count, [1], axis=0)) for x in (ids_of_all, options["prefix"])]
            rows.append(op.Expand(op.Unsqueeze(always, [0]), op.Concat(count, [1], axis=0)))
            mine = op.Concat(*rows, axis=1)
            mine = op.Where(op.Less(mine, 0), v, mine)
            banned = op.Expand(BANNED, op.Concat(count, [v + 1], axis=0))
            banned = op.ScatterElements(banned, mine, op.Expand(0.0, op.Shape(mine)), axis=1)
            return [op.Unsqueeze(op.Gather(banned, self.ids, axis=1), [1])]

        def none(op: Op) -> list[ir.Value]:
            return [op.Expand(0.0, op.Concat(count, [1, 1], axis=0))]

        self.unlisted = either(op, self.apart, "unlisted", own, none, (REAL,))[0]
        self.size = size(op, self.ids, 0)
        self.rows: Rows | None = None

    def at(self, op: Op, index: ir.Value) -> Vocabulary:
        """Return the same for the sentences `index` (b,) of the batch alone."""
        chosen = copy(self)
        chosen.unlisted = op.Gather(self.unlisted, index)
        return chosen

    def take_rows(self, op: Op, model: Transformer) -> None:
        """Take the classifier's rows of the candidates, where a precision lets that be: none where all are multiplied
        with."""
        if not self.by_rows:
            return
        ids = either(op, self.listed, "rows", as_they_are(self.ids), lambda op: [op.Expand(0, [0])], (INTEGER,))[0]
        ids.shape = ir.Shape([None])
        self.rows = model.output_rows(op, ids)

    def places(self, op: Op, ids: ir.Value) -> ir.Value:
        """Return where ids are; -1 of those that are not among them, and of -1."""
        return op.Where(op.Less(ids, 0), -1, op.Gather(self._places, op.Max(ids, 0)))

    def sequences(self, op: Op, ids: ir.Value) -> ir.Value:
        """Return those of sequences (S, N), -1 before their first, that are of these tokens alone, by their places."""
        places = self.places(op, ids)
        missing = op.Cast(op.And(op.GreaterOrEqual(ids, 0), op.Less(places, 0)), to=INTEGER)
        return op.Compress(places, op.Equal(op.ReduceSum(missing, [1], keepdims=0), 0), axis=0)

    def place(self, op: Op, id: int) -> ir.Value:
        """Return the place, a scalar, of one that always is."""
        return op.Gather(self._places, id)

    def of_ids(self, op: Op, name: str, per_id: ir.Value, axis: int = 0) -> ir.Value:
        """Return what is known of all ids (.., V, ..), of these."""

        def chosen(op: Op) -> list[ir.Value]:
            return [op.Gather(per_id, self.ids, axis=axis)]

        return either(op, self.listed, f"{name}.of_ids", chosen, as_they_are(per_id), (per_id.dtype or REAL,))[0]

    def product(self, model: Transformer) -> Product:
        """The classifier's product for these tokens: (..., D) -> (..., C)."""

        def product(op: Op, x: ir.Value) -> ir.Value:
            def of_rows(op: Op) -> list[ir.Value]:
                if self.rows is not None:
                    return [self.rows(op, x)]
                return [op.Gather(model.product(op, x), self.ids, axis=-1)]

            def of_all(op: Op) -> list[ir.Value]:
                return [model.product(op, x)]

            return either(op, self.listed, "logits", of_rows, of_all, (REAL,))[0]

        return product

    def masked(self, op: Op, logits: ir.Value) -> ir.Value:
        """Return logits (b, h, C), without those of tokens that are another sentence's."""

        def without(op: Op) -> list[ir.Value]:
            return [op.Add(logits, self.unlisted)]

        return either(op, self.apart, "masked", without, as_they_are(logits), (REAL,))[0]
