"""The noise of `generation/philox.py` within a graph: the same bits, from integer operations.

Words are int64 between 0 and 2^32 - 1, with + - * / as exact as in the paper's unsigned 32 bits.

Shapes: B rows, N numbers of each, n = N / 4 counters.

Sampling: temperature, top-k, nucleus, and a draw. `generation/sampling.py` is the same on the host: the same noise,
the same tokens.

Shapes: B sentences, h hypotheses (1 here), V vocabulary, N blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, table
from export.targets.cpu.graphs import block_size, top_k
from mlx_transformer.decoding.greedy import BLOCK, MULTIPLIERS, ROUNDS, SPARE_BITS, STEP, WEYL, WORD
from mlx_transformer.decoding.steps import BANNED

from .options import OptionInputs, Vocabulary, as_they_are, either

HALF = 1 << 16


def philox(op: Op, x: ir.Value, y: ir.Value, keys: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """x (2, B, n): words 0 and 2 of each counter, y words 1 and 3, keys as from `round_keys`. The same of the
    results."""
    for k in keys:
        high, low = _product(op, op.Gather(x, [1, 0], axis=0))
        x, y = op.BitwiseXor(op.BitwiseXor(high, y), k), low
    return x, y


def round_keys(op: Op, key: ir.Value) -> Sequence[ir.Value]:
    """Return the key's two words (2,) in each round: (2, 1, 1) each."""
    weyl = table(op, "philox.weyl", lambda: np.arange(ROUNDS)[:, None] * np.array(WEYL))
    keys = op.Unsqueeze(op.Mod(op.Add(key, weyl), WORD), [2, 3])
    return [op.Squeeze(k, [0]) for k in op.Split(keys, axis=0, num_outputs=ROUNDS, _outputs=ROUNDS)]


def words_of(op: Op, seed: ir.Value) -> ir.Value:
    """Return the low and the high word (2,) of a scalar. A negative one stands for itself + 2^64."""
    low = op.Mod(seed, WORD)
    high = op.Mod(op.Div(op.Sub(seed, low), WORD), WORD)
    return op.Concat(op.Unsqueeze(low, [0]), op.Unsqueeze(high, [0]), axis=0)


def counters(op: Op, rows: ir.Value, count: int) -> ir.Value:
    """Return words 0 and 2 (2, B, n) of what the rows (B,) count for N = `count` numbers: i // 4 and the row."""
    n = -(-count // 4)
    first = table(op, "philox.counters", lambda: np.stack([np.arange(n), np.zeros(n, np.int64)])[:, None])
    second = op.Unsqueeze(op.Unsqueeze(rows, [1]), [0])
    return op.Add(first, op.Mul(second, table(op, "philox.rows", lambda: np.array([0, 1])[:, None, None])))


def gumbel(op: Op, x: ir.Value, t: ir.Value, keys: Sequence[ir.Value]) -> ir.Value:
    """Return the noise (B, 4n) for new token number t (scalar) of the rows that `counters` counted for."""
    y = op.Mul(t, table(op, "philox.step", lambda: np.array([1, 0])[:, None, None]))
    x, y = (op.Unsqueeze(words, [1]) for words in philox(op, x, y, keys))
    words = op.Transpose(op.Concat(x, y, axis=1), perm=[2, 3, 0, 1])  # (B, n, 2, 2)
    numbers = op.Cast(op.Div(op.Flatten(words), 1 << SPARE_BITS), to=ir.DataType.FLOAT)
    uniform = op.Mul(op.Add(numbers, 0.5), STEP)
    return op.Neg(op.Log(op.Neg(op.Log(uniform))))


def _product(op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the high and the low words of words 2 and 0 times their multipliers; in halves of these, as 64 bits with a
    sign can't hold the whole."""
    factors = np.array(MULTIPLIERS[::-1])[:, None, None]
    upper = op.Mul(x, table(op, "philox.upper", lambda: factors // HALF))
    lower = op.Mul(x, table(op, "philox.lower", lambda: factors % HALF))
    middle = op.Add(upper, op.Div(lower, HALF))  # the product over 2^16, below 2^49
    low = op.Add(op.Mul(op.BitwiseAnd(middle, HALF - 1), HALF), op.BitwiseAnd(lower, HALF - 1))
    return op.Div(middle, HALF), low


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
