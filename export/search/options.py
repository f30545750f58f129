"""The search's options as inputs of the graph, the tokens to choose among, and the rules on tokens. Twins:
`decoding/options.py`, `decoding/candidates.py`, and `Rules` in `decoding/steps.py`.

Only the source is required; every option has a default in the file, so callers feed only what differs.

The search may choose among all tokens, or among a batch's candidates. It numbers a token by its place among them;
decoders read ids, and ids are returned. Rules say which tokens are banned, forced, or end a sentence.

Shapes: B sentences, V vocabulary, C tokens to choose among (V without candidates), N candidates of a sentence,
h hypotheses before the step, L tokens written so far, with the start token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.interface import SETTINGS, TEXT_SETTINGS, Setting
from export.nn.classifier import Product
from export.nn.model import Transformer
from export.nn.primitives import END, Op, branch, size, table
from export.nn.rows import Rows
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import EXTRA_TOKENS
from mlx_transformer.decoding.steps import BANNED, banned_ids


class OptionInputs:
    """The options by name, scalars unless a shape is given.

    beam, n_best, min_new_tokens, length_penalty, early_stopping, sample, temperature, top_k, top_p, repetition_penalty,
        no_repeat_ngram, heuristic_stop, forced_end: as in `Options`; with `sample` the beam is always 1.
    forced_first, suppressed, suppressed_first, end_ids: as in `Options`, (N,) ids each; (0,): none.
    banned_sequences: as in `Options`, (S, N), shorter sequences padded with -1 on the left; (0, 1): none.
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

    def __init__(self, op: Op, inputs: Mapping[str, ir.Value]):
        def given(name: str, setting: Setting) -> ir.Value:
            if name in inputs:
                return inputs[name]
            return op.Constant(value=ir.tensor(np.full(setting.shape, setting.default, setting.dtype)))

        self._inputs = {name: given(name, setting) for name, setting in SETTINGS.items()}

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
        room = config.max_positions if config.has_encoder else op.Sub(config.max_positions + 1, lengths)
        usual = op.Min(usual, room)
        usual = op.Max(usual, self["min_new_tokens"])
        return op.Where(op.Greater(self["max_new_tokens"], 0), self["max_new_tokens"], usual)


def set_defaults(graph: ir.Graph, own: Mapping[str, NDArray]) -> None:
    """Give the option inputs their defaults: `own`, the model's by name, otherwise everybody's. Call it on the
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


class Rules:
    """Everything constant during the search is computed here, outside the loop."""

    def __init__(self, op: Op, options: OptionInputs, config: TransformerConfig, vocabulary: Vocabulary):
        self.options, self.eos, self.padded = options, vocabulary.place(op, config.eos_id), not config.has_encoder
        ids, suppressed, at_first = options["end_ids"], options["suppressed"], options["suppressed_first"]
        every = op.Concat([config.eos_id], ids, axis=0)
        ends = op.Cast(_marked(op, config.vocab_size, every, 1.0), to=ir.DataType.BOOL)
        never = table(op, "search.bans", lambda: never_written(config))
        never = op.Add(never, _marked(op, config.vocab_size, suppressed, BANNED))
        early = op.Add(never, op.Where(ends, BANNED, 0.0))
        self.ends = vocabulary.of_ids(op, "ends", ends)  # (C,)
        later = op.Concat(op.Unsqueeze(never, [0]), op.Unsqueeze(early, [0]), axis=0)
        first = op.Add(later, _marked(op, config.vocab_size, at_first, BANNED))
        self.rows = vocabulary.of_ids(op, "bans", op.Concat(later, first, axis=0), axis=1)  # (4, C)
        self.more_ends = size(op, ids, 0)
        self.excluded = op.Add(self.more_ends, op.Add(size(op, suppressed, 0), size(op, at_first, 0)))
        """Number of tokens these rules may ban, in addition to `EXCLUDED`."""
        self.first_count = size(op, options["forced_first"], 0)
        first = vocabulary.places(op, options["forced_first"])
        self.first = op.Pad(first, [0, 1], -1)  # nothing is forced after these
        n, penalty = options["no_repeat_ngram"], options["repetition_penalty"]
        self.sequences = vocabulary.sequences(op, options["banned_sequences"])
        repeats = op.Or(op.Greater(n, 0), op.Greater(size(op, self.sequences, 0), 0))
        self.reads_history = op.Or(repeats, op.Not(op.Equal(penalty, 1.0)))
        self.written_count = op.Reshape(op.Cast(self.reads_history, to=ir.DataType.INT64), [1])
        """Tokens added to the history per step: 1, or 0 if no rule reads the history."""

    def bans(self, op: Op, t: ir.Value) -> ir.Value:
        """Bans (V,) to add to the scores of new token number t, whatever the history."""
        early = op.Cast(op.Less(t, self.options["min_new_tokens"]), to=ir.DataType.INT64)
        first = op.Cast(op.Equal(t, self.first_count), to=ir.DataType.INT64)
        return op.Gather(self.rows, op.Add(early, op.Mul(first, 2)))

    def begun(self, op: Op, ids: ir.Value) -> ir.Value:
        """The history (B, 1, L) of start tokens (B, 1); L is 0 if no rule reads it."""
        return op.Slice(op.Unsqueeze(ids, [2]), [0], self.written_count, [2])

    def begun_by(self, op: Op, prompts: ir.Value) -> ir.Value:
        """The history (B, 1, L) of prompts (B, S)."""
        count = op.Mul(self.written_count, op.Shape(prompts, start=1))
        return op.Slice(op.Unsqueeze(prompts, [1]), [0], count, [2])

    def written(self, op: Op, history: ir.Value, parents: ir.Value, ids: ir.Value) -> ir.Value:
        """The history after appending tokens (B, K); token k follows hypothesis parents[:, k] of its sentence."""
        before = op.GatherND(history, op.Unsqueeze(parents, [2]), batch_dims=1)
        return op.Concat(before, self.begun(op, ids), axis=2)

    def forced(self, op: Op, limits: ir.Value, t: ir.Value) -> ir.Value:
        """Each sentence's token number t (B, 1), if it is forced regardless of scores; otherwise -1. limits: (B, 1)."""
        at_end = op.And(self.options["forced_end"], op.Equal(limits, op.Add(t, 1)))
        first = op.Gather(self.first, op.Min(t, self.first_count))
        return op.Where(op.GreaterOrEqual(first, 0), first, op.Where(at_end, self.eos, -1))

    def forces(self, op: Op, t: ir.Value) -> ir.Value:
        """Whether any sentence may get a forced token as number t."""
        return op.Or(op.Less(t, self.first_count), self.options["forced_end"])

    def penalised(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Scores (B, h, V), logits or log p, with the repetition penalty on tokens of the history."""
        penalty = self.options["repetition_penalty"]
        if self.padded:  # -1 before a prompt marks no token
            nothing, each = op.Expand(0.0, op.Shape(scores)), op.Where(op.Less(history, 0), 0.0, 1.0)
            seen = op.ScatterElements(nothing, op.Max(history, 0), each, axis=2, reduction="max")
        else:
            every = op.Expand(1.0, op.Shape(history))
            seen = op.ScatterElements(op.Expand(0.0, op.Shape(scores)), history, every, axis=2)
        weaker = op.Where(op.Less(scores, 0.0), op.Mul(scores, penalty), op.Div(scores, penalty))
        return op.Where(op.Greater(seen, 0.0), weaker, scores)

    def by_history(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Scores (B, h, V) with BANNED on tokens that would repeat an n-gram or complete a banned sequence."""
        return self._without_sequences(op, self._without_repeats(op, scores, history), history)

    def _without_sequences(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Ban tokens that complete one of `banned_sequences` (S, N)."""
        first = op.Slice(self.sequences, [0], [-1], [1])  # (S, N - 1)
        last = op.Squeeze(op.Slice(self.sequences, [-1], [END], [1]), [1])  # (S,)
        before, length = op.Shape(first, start=1), op.Shape(history, start=2)
        padded = op.Pad(history, op.Concat([0, 0], before, [0, 0, 0], axis=0), -2)
        latest = op.Slice(padded, length, [END], [2])  # (B, h, N - 1)
        other = op.And(op.Not(op.Equal(op.Unsqueeze(latest, [2]), first)), op.GreaterOrEqual(first, 0))
        same = op.Equal(op.ReduceSum(op.Cast(other, to=ir.DataType.INT64), [3], keepdims=0), 0)  # (B, h, S)
        tokens = op.Expand(last, op.Shape(same))
        return op.ScatterElements(scores, tokens, op.Where(same, BANNED, 0.0), axis=2, reduction="add")

    def _without_repeats(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Ban tokens that repeat an n-gram of the history."""
        n = op.Max(self.options["no_repeat_ngram"], 1)
        before, length = op.Sub(n, 1), size(op, history, 2)
        step = op.Range(0, before, 1)  # offsets in a window of n tokens, without the last
        first = op.Range(0, op.Sub(op.Add(length, 1), n), 1)  # starts of windows
        windows = op.Gather(history, op.Add(op.Unsqueeze(first, [1]), step), axis=2)  # (B, h, W, n - 1)
        latest = op.Gather(history, op.Max(op.Add(op.Sub(length, before), step), 0), axis=2)  # (B, h, n - 1)
        other = op.Cast(op.Not(op.Equal(windows, op.Unsqueeze(latest, [2]))), to=ir.DataType.INT64)
        same = op.And(op.Equal(op.ReduceSum(other, [3], keepdims=0), 0), op.Greater(self.options["no_repeat_ngram"], 0))
        tokens = op.Gather(history, op.Add(first, before), axis=2)  # (B, h, W)
        return op.ScatterElements(scores, tokens, op.Where(same, BANNED, 0.0), axis=2, reduction="add")


def never_written(config: TransformerConfig) -> np.ndarray:
    """Row (V,) to add to scores: BANNED on padding and other ids never written."""
    row = np.zeros(config.vocab_size, np.float32)
    row[banned_ids(config)] = BANNED
    return row


def _marked(op: Op, width: int, ids: ir.Value, value: float) -> ir.Value:
    """Row (width,) with `value` at ids (N,), otherwise 0."""
    return op.ScatterElements(op.Expand(0.0, [width]), ids, op.Expand(value, op.Shape(ids)), axis=0)
