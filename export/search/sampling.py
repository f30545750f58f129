"""Sampling: temperature, top-k, nucleus, and a draw. `generation/sampling.py` is the same on the host: the same noise,
the same tokens.

Shapes: B sentences, h hypotheses (1 here), V vocabulary, N blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import onnx_ir as ir

from export.nn.primitives import Op
from export.targets.top_k import block_size, top_k
from mlx_transformer.generation.sampling import BLOCK
from mlx_transformer.generation.steps import BANNED

from .branches import as_they_are, either
from .options import OptionInputs
from .philox import counters, gumbel, round_keys, words_of
from .vocabulary import Vocabulary

BEYOND = 1 << 62  # any axis ends before it


class Weighed(NamedTuple):
    """The logits that rules make, and whether there are such rules."""

    condition: ir.Value
    scores: Callable[[Op], ir.Value]


class Sampling:
    """Which tokens are candidates: the likeliest, or with `options.sample` a drawn one."""

    def __init__(self, op: Op, options: OptionInputs, size: ir.Value, vocabulary: Vocabulary):
        """size: B (1,)."""
        self.options, self.vocabulary, vocab_size = options, vocabulary, vocabulary.config.vocab_size
        self.vocab_size = vocab_size
        numbers = op.Range(0, op.Squeeze(size, [0]), 1)
        rows = op.Where(op.Less(options["rows"], 0), numbers, options["rows"])
        self.blocks = -(-vocab_size // BLOCK)
        self.counters = counters(op, rows, BLOCK + self.blocks)
        self.keys = round_keys(op, words_of(op, options["seed"]))
        every = op.Or(op.LessOrEqual(options["top_k"], 0), op.GreaterOrEqual(options["top_k"], vocab_size))
        self.restricted = op.Not(op.And(every, op.GreaterOrEqual(options["top_p"], 1.0)))

    def at(self, op: Op, index: ir.Value) -> Sampling:
        chosen = copy(self)
        chosen.counters = op.Gather(self.counters, index, axis=1)
        return chosen

    def or_likeliest(
        self, op: Op, logits: ir.Value, weighed: Weighed, bans: ir.Value, t: ir.Value, count: ir.Value
    ) -> ir.Value:
        """Return candidates (B, h, c) by logits (B, h, V), or by what rules make of them: the c = `count` likeliest, or
        the one drawn (c = 1)."""

        def likeliest_of(op: Op, scores: ir.Value) -> list[ir.Value]:
            tokens = self._largest(op, op.Flatten(scores, axis=2), count)
            return [op.Reshape(tokens, op.Concat(op.Shape(scores, end=2), count, axis=0))]

        def best(op: Op) -> list[ir.Value]:
            def by_rules(op: Op) -> list[ir.Value]:
                return likeliest_of(op, weighed.scores(op))

            def by_logits(op: Op) -> list[ir.Value]:
                return likeliest_of(op, logits)

            return [either(op, weighed.condition, "weighed", by_rules, by_logits, (ir.DataType.INT64,))[0]]

        def drawn(op: Op) -> list[ir.Value]:
            def by_rules(op: Op) -> list[ir.Value]:
                return [weighed.scores(op)]

            scores = either(op, weighed.condition, "scores", by_rules, as_they_are(logits), (ir.DataType.FLOAT,))[0]
            scores = op.Div(op.Squeeze(op.Add(scores, bans), [1]), self.options["temperature"])

            def restricted(op: Op) -> list[ir.Value]:
                return [likeliest(op, scores, self.options)]

            scores = either(op, self.restricted, "kept", restricted, as_they_are(scores), (ir.DataType.FLOAT,))[0]
            return [op.Unsqueeze(self._draw(op, scores, gumbel(op, self.counters, t, self.keys)), [1, 2])]

        return either(op, self.options["sample"], "candidates", drawn, best, (ir.DataType.INT64,))[0]

    def _largest(self, op: Op, scores: ir.Value, count: ir.Value) -> ir.Value:
        """Return the tokens (R, c) of the largest scores (R, C): all ids are looked through in blocks, a list is
        short."""

        def of_list(op: Op) -> list[ir.Value]:
            return [top_k(op, scores, count, None)[1]]

        def of_all(op: Op) -> list[ir.Value]:
            return [top_k(op, scores, count, self.vocab_size)[1]]

        if block_size(self.vocab_size) is None:
            return of_list(op)[0]
        return either(op, self.vocabulary.listed, "largest", of_list, of_all, (ir.DataType.INT64,))[0]

    def _draw(self, op: Op, scores: ir.Value, noise: ir.Value) -> ir.Value:
        """Return a token (B,) from softmax(scores), for scores (B, V) and noise (B, BLOCK + N or more)."""
        missing = self.blocks * BLOCK - self.vocab_size
        scores = op.Pad(scores, [0, 0, 0, missing], BANNED) if missing else scores
        blocks = op.Reshape(scores, [-1, self.blocks, BLOCK])
        largest = op.ReduceMax(blocks, [2], keepdims=1)
        total = op.Add(op.Log(op.ReduceSum(op.Exp(op.Sub(blocks, largest)), [2], keepdims=0)), op.Squeeze(largest, [2]))
        block = op.ArgMax(op.Add(total, op.Slice(noise, [BLOCK], [BLOCK + self.blocks], [1])), axis=1, keepdims=1)
        within = op.GatherND(blocks, block, batch_dims=1)  # (B, BLOCK)
        place = op.ArgMax(op.Add(within, op.Slice(noise, [0], [BLOCK], [1])), axis=1, keepdims=0)
        token = op.Add(op.Mul(op.Squeeze(block, [1]), BLOCK), place)
        # A place that is filled up wins only where no score is a number.
        return op.Where(op.Less(token, self.vocab_size), token, 0)


def likeliest(op: Op, scores: ir.Value, options: OptionInputs) -> ir.Value:
    """Return scores (B, V), BANNED outside the `top_k` likeliest and the nucleus `top_p`.

    Nucleus (Holtzman et al. 2020): the fewest likeliest tokens that reach probability top_p together. Equal scores at a
    border stay in together.
    """
    every = op.Shape(scores, start=1)
    k = op.Where(op.Greater(options["top_k"], 0), op.Min(options["top_k"], every), every)
    falling = op.TopK(scores, k, _outputs=2)[0]
    scores = op.Where(op.Less(scores, op.Slice(falling, [-1], [BEYOND], [1])), BANNED, scores)
    p = op.Softmax(falling, axis=-1)
    in_nucleus = op.Less(op.Sub(op.CumSum(p, 1), p), options["top_p"])
    # With top_p = 1 all stay: the sum's rounding must not cut the tail.
    in_nucleus = op.Or(in_nucleus, op.GreaterOrEqual(options["top_p"], 1.0))
    last = op.Sub(op.ReduceSum(op.Cast(in_nucleus, to=ir.DataType.INT64), [1], keepdims=1), 1)
    return op.Where(op.Less(scores, op.GatherElements(falling, last, axis=1)), BANNED, scores)
