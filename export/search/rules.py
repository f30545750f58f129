"""Rules on which tokens are banned, forced, or end a sentence, within a graph. Twin of `Rules` in `decoding/steps.py`.

Shapes: B sentences, h hypotheses before the step, V vocabulary (or the candidates), L tokens written so far, with the
start token.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, size, table
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.steps import BANNED, banned_ids

from .options import OptionInputs, Vocabulary


class Rules:
    """Everything constant during the search is computed here, outside the loop."""

    def __init__(self, op: Op, options: OptionInputs, config: TransformerConfig, vocabulary: Vocabulary):
        self.options, self.eos = options, vocabulary.place(op, config.eos_id)
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
        """The history (B, 1, L) of start tokens (B, 1)."""
        return op.Slice(op.Unsqueeze(ids, [2]), [0], self.written_count, [2])

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
        seen = op.ScatterElements(op.Expand(0.0, op.Shape(scores)), history, op.Expand(1.0, op.Shape(history)), axis=2)
        weaker = op.Where(op.Less(scores, 0.0), op.Mul(scores, penalty), op.Div(scores, penalty))
        return op.Where(op.Greater(seen, 0.0), weaker, scores)

    def by_history(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Scores (B, h, V) with BANNED on tokens that would repeat an n-gram or complete a banned sequence."""
        return self._without_sequences(op, self._without_repeats(op, scores, history), history)

    def _without_sequences(self, op: Op, scores: ir.Value, history: ir.Value) -> ir.Value:
        """Ban tokens that complete one of `banned_sequences` (S, N)."""
        first = op.Slice(self.sequences, [0], [-1], [1])  # (S, N - 1)
        last = op.Squeeze(op.Slice(self.sequences, [-1], [1 << 62], [1]), [1])  # (S,)
        before, length = op.Shape(first, start=1), op.Shape(history, start=2)
        padded = op.Pad(history, op.Concat([0, 0], before, [0, 0, 0], axis=0), -2)
        latest = op.Slice(padded, length, [1 << 62], [2])  # (B, h, N - 1)
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
