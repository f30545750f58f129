"""The search's options as inputs of the graph, and the tokens to choose among. Twins: `decoding/options.py` and
`decoding/candidates.py`.

Only the source is required; every option has a default in the file, so callers feed only what differs.

The search may choose among all tokens, or among a batch's candidates. It numbers a token by its place among them;
decoders read ids, and ids are returned.

Shapes: B sentences, V vocabulary, C tokens to choose among (V without candidates), N candidates of a sentence.
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
    """The options by name, scalars unless a shape is given.

    beam, n_best, min_new_tokens, length_penalty, early_stopping, sample, temperature, top_k, top_p, repetition_penalty,
        no_repeat_ngram, heuristic_stop, forced_end: as in `Options`; with `sample` the beam is always 1.
    forced_first, suppressed, suppressed_first, end_ids: as in `Options`, (N,) ids each; (0,): none.
    banned_sequences: as in `Options`, (S, N), shorter ones padded with -1 on the left; (0, 1): none.
    start_id: as in `Options`; -1: the model's own.
    max_new_tokens: (1,) for all sentences or (B,), one each; 0: `max_length_factor` times the source's length, or if
        that is 0 too, the source's length + 50, at most `max_positions`.
    seed: 64 bits; from 2^63 on as the negative number with the same bits.
    rows: (B,), each sentence's place in the caller's list, on which its random draws depend; (1,), -1: its place in the
        batch.
    prefix: (B, P), the forced first tokens of each sentence, padded with -1; (1, P), the same for all; (1, 0), none.
    candidates: (B, N), the ids allowed in each output, in addition to ends and forced ids, padded with -1;
        (1, N), the same for all; (1, 0), all ids.
    penalty_offset: k in lp(n) = ((k + n) / (k + 1))^length_penalty; 5 as in Wu et al., 0 as in transformers.
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
        """The decoder's start token, a scalar."""
        start_id = self["start_id"]
        return op.Where(op.Less(start_id, 0), config.bos_id, start_id)

    def length_limits(self, op: Op, lengths: ir.Value, config: TransformerConfig) -> ir.Value:
        """Most new tokens of each sentence (B,), with eos, for source lengths (B,)."""
        factor = self["max_length_factor"]
        product = op.Ceil(op.Mul(op.Cast(lengths, to=ir.DataType.FLOAT), factor))
        usual = op.Where(op.Equal(factor, 0.0), op.Add(lengths, EXTRA_TOKENS), op.Cast(product, to=ir.DataType.INT64))
        usual = op.Min(usual, config.max_positions)
        usual = op.Max(usual, self["min_new_tokens"])
        return op.Where(op.Greater(self["max_new_tokens"], 0), self["max_new_tokens"], usual)


def set_defaults(graph: ir.Graph, own: Mapping[str, NDArray]) -> None:
    """Give the option inputs their defaults: `own`, the model's by name, otherwise the general ones. Call it on the
    finished graph: the builder treats an input with a value as constant."""
    for value in graph.inputs:
        if (default := default_of(str(value.name), own)) is not None:
            value.const_value = ir.tensor(default, name=value.name)
            graph.register_initializer(value)


def default_of(name: str, own: Mapping[str, NDArray]) -> NDArray | None:
    """The default of an input; None if the input is required."""
    setting = (SETTINGS | TEXT_SETTINGS).get(name)
    return setting and own.get(name, np.full(setting.shape, setting.default, setting.dtype))


Values = Callable[[Op], list[ir.Value]]


def either(
    op: Op, condition: ir.Value, name: str, yes: Values, no: Values, types: tuple[ir.DataType, ...]
) -> tuple[ir.Value, ...]:
    """Return the values of `yes(op)` or `no(op)`, functions returning lists; only one of the branches runs."""

    def values(which: str) -> list[ir.Value]:
        return [ir.Value(name=f"{name}.{which}.{i}", type=ir.TensorType(dtype)) for i, dtype in enumerate(types)]

    then, otherwise = branch(op, f"{name}.yes", values("yes"), yes), branch(op, f"{name}.no", values("no"), no)
    outputs = op.If(condition, then_branch=then, else_branch=otherwise, _outputs=len(types))
    return tuple(outputs) if len(types) > 1 else (outputs,)


def as_they_are(*values: ir.Value) -> Values:
    """A branch returning these values unchanged."""
    return lambda op: [op.Identity(x) for x in values]


ALL_LOGITS = "logits.no"
"""Name of the graph within the loop for the logits of all ids."""
INTEGER, REAL = ir.DataType.INT64, ir.DataType.FLOAT


class Vocabulary:
    """The tokens to choose among; computed outside the loop, as are the classifier's `rows`."""

    ids: ir.Value
    """(C,), ascending."""
    size: ir.Value
    """C, a scalar."""
    listed: ir.Value
    """Whether logits are computed for the candidates only. Not when sampling: the noise belongs to places in the whole
    vocabulary."""
    apart: ir.Value
    """Whether sentences differ in their candidates, so that `unlisted` is needed."""
    unlisted: ir.Value
    """(B, 1, C) to add to logits: BANNED on tokens that aren't the sentence's candidates; (B, 1, 1) of zeros without
    candidates."""

    def __init__(self, op: Op, options: OptionInputs, config: TransformerConfig, count: ir.Value, by_rows: bool):
        """count (1,): B. by_rows: the classifier's rows can be gathered; otherwise columns of all logits are."""
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
            every = op.Where(op.Less(every, 0), v, every)  # padding goes to a place after the vocabulary
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
        """The same vocabulary for the sentences `index` (b,) of the batch."""
        chosen = copy(self)
        chosen.unlisted = op.Gather(self.unlisted, index)
        return chosen

    def take_rows(self, op: Op, model: Transformer) -> None:
        """Gather the classifier's rows of the candidates, if the precision allows it; no rows without candidates."""
        if not self.by_rows:
            return
        ids = either(op, self.listed, "rows", as_they_are(self.ids), lambda op: [op.Expand(0, [0])], (INTEGER,))[0]
        ids.shape = ir.Shape([None])
        self.rows = model.output_rows(op, ids)

    def places(self, op: Op, ids: ir.Value) -> ir.Value:
        """Ids to places; -1 for ids outside these tokens, and for -1."""
        return op.Where(op.Less(ids, 0), -1, op.Gather(self._places, op.Max(ids, 0)))

    def sequences(self, op: Op, ids: ir.Value) -> ir.Value:
        """Sequences of ids (S, N), padded with -1 on the left, as places; sequences with other tokens are left out."""
        places = self.places(op, ids)
        missing = op.Cast(op.And(op.GreaterOrEqual(ids, 0), op.Less(places, 0)), to=INTEGER)
        return op.Compress(places, op.Equal(op.ReduceSum(missing, [1], keepdims=0), 0), axis=0)

    def place(self, op: Op, id: int) -> ir.Value:
        """The place (scalar) of an id that is always among the tokens, e.g. eos."""
        return op.Gather(self._places, id)

    def of_ids(self, op: Op, name: str, per_id: ir.Value, axis: int = 0) -> ir.Value:
        """Gather per-id values (.., V, ..) for these tokens: (.., C, ..)."""

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
        """Logits (b, h, C) with BANNED on other sentences' tokens."""

        def without(op: Op) -> list[ir.Value]:
            return [op.Add(logits, self.unlisted)]

        return either(op, self.apart, "masked", without, as_they_are(logits), (REAL,))[0]
