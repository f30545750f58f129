"""Sampling in a graph: temperature, top-k, nucleus, and a draw by Gumbel noise. Twin of `decoding/greedy.py`: the same
noise and the same tokens.

The noise comes from Philox (Salmon et al. 2011) in integer operations, so its bits are the same everywhere. Words are
int64 between 0 and 2^32 - 1; + - * / on them are as exact as on the paper's unsigned 32 bits.

Shapes: B sentences, h hypotheses (1 here), V vocabulary; N random numbers per row from n = N / 4 Philox counters. In
`_draw` N is the number of vocabulary blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from export.nn.primitives import END, Op, table
from export.targets.cpu.graphs import block_size, top_k
from mlx_transformer.decoding.greedy import BLOCK, MULTIPLIERS, ROUNDS, SPARE_BITS, STEP, WEYL, WORD
from mlx_transformer.decoding.steps import BANNED

from .options import OptionInputs, Vocabulary, as_they_are, either

HALF = 1 << 16


def philox(op: Op, x: ir.Value, y: ir.Value, keys: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Run all rounds. x (2, B, n): words 0 and 2 of each counter; y: words 1 and 3; keys: from `round_keys`. Returns
    new x and y."""
    for k in keys:
        high, low = _product(op, op.Gather(x, [1, 0], axis=0))
        x, y = op.BitwiseXor(op.BitwiseXor(high, y), k), low
    return x, y


def round_keys(op: Op, key: ir.Value) -> Sequence[ir.Value]:
    """Each round's key, (2, 1, 1), from the seed's two words (2,)."""
    weyl = table(op, "philox.weyl", lambda: np.arange(ROUNDS)[:, None] * np.array(WEYL))
    keys = op.Unsqueeze(op.Mod(op.Add(key, weyl), WORD), [2, 3])
    return [op.Squeeze(k, [0]) for k in op.Split(keys, axis=0, num_outputs=ROUNDS, _outputs=ROUNDS)]


def words_of(op: Op, seed: ir.Value) -> ir.Value:
    """The low and the high word (2,) of a scalar; a negative seed stands for seed + 2^64."""
    low = op.Mod(seed, WORD)
    high = op.Mod(op.Div(op.Sub(seed, low), WORD), WORD)
    return op.Concat(op.Unsqueeze(low, [0]), op.Unsqueeze(high, [0]), axis=0)


def counters(op: Op, rows: ir.Value, count: int) -> ir.Value:
    """Words 0 and 2 of the counters for N = `count` numbers per row: i // 4 and the row's number (B,) -> (2, B, n)."""
    n = -(-count // 4)
    first = table(op, "philox.counters", lambda: np.stack([np.arange(n), np.zeros(n, np.int64)])[:, None])
    second = op.Unsqueeze(op.Unsqueeze(rows, [1]), [0])
    return op.Add(first, op.Mul(second, table(op, "philox.rows", lambda: np.array([0, 1])[:, None, None])))


def gumbel(op: Op, x: ir.Value, t: ir.Value, keys: Sequence[ir.Value]) -> ir.Value:
    """Gumbel noise (B, 4n) for new token number t (scalar). x: from `counters`; keys: from `round_keys`."""
    y = op.Mul(t, table(op, "philox.step", lambda: np.array([1, 0])[:, None, None]))
    x, y = (op.Unsqueeze(words, [1]) for words in philox(op, x, y, keys))
    words = op.Transpose(op.Concat(x, y, axis=1), perm=[2, 3, 0, 1])  # (B, n, 2, 2)
    numbers = op.Cast(op.Div(op.Flatten(words), 1 << SPARE_BITS), to=ir.DataType.FLOAT)
    uniform = op.Mul(op.Add(numbers, 0.5), STEP)
    return op.Neg(op.Log(op.Neg(op.Log(uniform))))


def _product(op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """High and low words of the products of words 2 and 0 with their multipliers. Multipliers are split into 16-bit
    halves, since a whole product doesn't fit into a signed 64-bit integer."""
    factors = np.array(MULTIPLIERS[::-1])[:, None, None]
    upper = op.Mul(x, table(op, "philox.upper", lambda: factors // HALF))
    lower = op.Mul(x, table(op, "philox.lower", lambda: factors % HALF))
    middle = op.Add(upper, op.Div(lower, HALF))  # the product over 2^16, below 2^49
    low = op.Add(op.Mul(op.BitwiseAnd(middle, HALF - 1), HALF), op.BitwiseAnd(lower, HALF - 1))
    return op.Div(middle, HALF), low


class Weighed(NamedTuple):
    """`condition`: whether rules change the scores by the history; `scores`: computes those scores."""

    condition: ir.Value
    scores: Callable[[Op], ir.Value]


class Sampling:
    """Chooses candidate tokens: the most likely, or a drawn one if `options.sample`."""

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
        """Candidates (B, h, c) from logits (B, h, V), or from the scores of the rules if there are any.

        The c = `count` most likely; when sampling, the drawn token (c = 1). bans (V,): added before the draw. t: number
        of the new token.
        """

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
        """Tokens (R, c) of the largest scores (R, C). The whole vocabulary is searched in blocks; a list of candidates
        is short."""

        def of_list(op: Op) -> list[ir.Value]:
            return [top_k(op, scores, count, None)[1]]

        def of_all(op: Op) -> list[ir.Value]:
            return [top_k(op, scores, count, self.vocab_size)[1]]

        if block_size(self.vocab_size) is None:
            return of_list(op)[0]
        return either(op, self.vocabulary.listed, "largest", of_list, of_all, (ir.DataType.INT64,))[0]

    def _draw(self, op: Op, scores: ir.Value, noise: ir.Value) -> ir.Value:
        """Draw a token (B,) from softmax(scores), for scores (B, V) and noise (B, BLOCK + N or more)."""
        missing = self.blocks * BLOCK - self.vocab_size
        scores = op.Pad(scores, [0, 0, 0, missing], BANNED) if missing else scores
        blocks = op.Reshape(scores, [-1, self.blocks, BLOCK])
        largest = op.ReduceMax(blocks, [2], keepdims=1)
        total = op.Add(op.Log(op.ReduceSum(op.Exp(op.Sub(blocks, largest)), [2], keepdims=0)), op.Squeeze(largest, [2]))
        block = op.ArgMax(op.Add(total, op.Slice(noise, [BLOCK], [BLOCK + self.blocks], [1])), axis=1, keepdims=1)
        within = op.GatherND(blocks, block, batch_dims=1)  # (B, BLOCK)
        place = op.ArgMax(op.Add(within, op.Slice(noise, [0], [BLOCK], [1])), axis=1, keepdims=0)
        token = op.Add(op.Mul(op.Squeeze(block, [1]), BLOCK), place)
        # A place of the padding wins only if all scores are NaN.
        return op.Where(op.Less(token, self.vocab_size), token, 0)


def likeliest(op: Op, scores: ir.Value, options: OptionInputs) -> ir.Value:
    """Scores (B, V) with BANNED outside the `top_k` most likely tokens and the nucleus `top_p`.

    Nucleus (Holtzman et al. 2020): the fewest most likely tokens with a total probability of at least top_p. Equal
    scores at the border all stay.
    """
    every = op.Shape(scores, start=1)
    k = op.Where(op.Greater(options["top_k"], 0), op.Min(options["top_k"], every), every)
    falling = op.TopK(scores, k, _outputs=2)[0]
    scores = op.Where(op.Less(scores, op.Slice(falling, [-1], [END], [1])), BANNED, scores)
    p = op.Softmax(falling, axis=-1)
    in_nucleus = op.Less(op.Sub(op.CumSum(p, 1), p), options["top_p"])
    # With top_p = 1 all tokens stay: the sum's rounding must not cut the tail.
    in_nucleus = op.Or(in_nucleus, op.GreaterOrEqual(options["top_p"], 1.0))
    last = op.Sub(op.ReduceSum(op.Cast(in_nucleus, to=ir.DataType.INT64), [1], keepdims=1), 1)
    return op.Where(op.Less(scores, op.GatherElements(falling, last, axis=1)), BANNED, scores)
