"""Sampling: temperature, top-k, nucleus, and a draw by inverting the distribution function. `likeliest` is the twin of
`generation/greedy.py`'s.

The host draws a Gumbel variable for each token; a graph has no generator of that kind, so here one uniform number a
sentence and step picks the token: the same distribution, other draws. Numbers depend on the seed, the row and the step
alone, on every runtime.

Shapes: B sentences, h hypotheses (1 here), V vocabulary, T steps.
"""

from __future__ import annotations

from copy import copy

import onnx_ir as ir

from mlx_transformer.generation.steps import BANNED

from ..primitives import Op
from .options import OptionInputs
from .philox import uniforms


class Sampling:
    """Which tokens are candidates: the likeliest, or with `options.sample` a drawn one."""

    def __init__(self, op: Op, options: OptionInputs, size: ir.Value, steps: ir.Value):
        """size: B (1,); steps: T (scalar)."""
        self.options = options

        def numbers(op: Op) -> list[ir.Value]:
            here = op.Range(0, op.Squeeze(size, [0]), 1)
            return [uniforms(op, options.seed, steps, op.Where(op.Less(options.rows, 0), here, options.rows))]

        def nothing(op: Op) -> list[ir.Value]:
            return [op.Unsqueeze(op.Cast(0.5, to=ir.DataType.DOUBLE), [0, 1])]

        self.uniforms = either(op, options.sample, "uniforms", ir.DataType.DOUBLE, numbers, nothing)  # (T, B)

        self.index: ir.Value | None = None

    def at(self, index: ir.Value) -> Sampling:
        chosen = copy(self)
        chosen.index = index
        return chosen

    def or_likeliest(self, op: Op, logits: ir.Value, bans: ir.Value, t: ir.Value, taken: ir.Value) -> ir.Value:
        """Candidates (B, h, c) by logits (B, h, V): the c = `taken` likeliest, or the one drawn (c = 1)."""

        def best(op: Op) -> list[ir.Value]:
            return [op.TopK(logits, taken, _outputs=2)[1]]

        def drawn(op: Op) -> list[ir.Value]:
            uniform = op.Reshape(op.Gather(op.Gather(self.uniforms, t), self.index), [-1, 1, 1])
            return [draw(op, likeliest(op, op.Add(logits, bans), self.options), uniform)]

        return either(op, self.options.sample, "candidates", ir.DataType.INT64, drawn, best)


def likeliest(op: Op, logits: ir.Value, options: OptionInputs) -> ir.Value:
    """Scores (B, h, V) at the temperature, BANNED outside the `top_k` likeliest and the nucleus `top_p`.

    Nucleus (Holtzman et al. 2020): the fewest likeliest tokens that reach probability top_p together. Equal scores at a
    border stay in together.
    """
    scores = op.Div(logits, options.temperature)
    every = op.Shape(logits, start=2)
    k = op.Where(op.Greater(options.top_k, 0), op.Min(options.top_k, every), every)
    falling = op.TopK(scores, every, _outputs=2)[0]
    border = op.Gather(falling, op.Sub(k, 1), axis=2)  # (B, h, 1)
    scores = op.Where(op.Less(scores, border), BANNED, scores)
    falling = op.Where(op.Less(falling, border), BANNED, falling)
    p = op.Softmax(falling, axis=-1)
    inside = op.Less(op.Sub(op.CumSum(p, 2), p), options.top_p)
    # With top_p = 1 all stay: the sum's rounding must not cut the tail.
    inside = op.Or(inside, op.GreaterOrEqual(options.top_p, 1.0))
    last = op.Sub(op.ReduceSum(op.Cast(inside, to=ir.DataType.INT64), [2], keepdims=1), 1)
    return op.Where(op.Less(scores, op.GatherElements(falling, last, axis=2)), BANNED, scores)


def draw(op: Op, scores: ir.Value, uniform: ir.Value) -> ir.Value:
    """A token (B, h, 1) from softmax(scores), for uniform numbers (B, 1, 1) in (0, 1): the first one up to which the
    distribution function exceeds the number."""
    p = op.Cast(op.Softmax(scores, axis=-1), to=ir.DataType.DOUBLE)
    below = op.CumSum(p, 2)
    total = op.ReduceMax(below, [2], keepdims=1)
    beyond = op.And(op.Greater(below, op.Mul(uniform, total)), op.Cast(p, to=ir.DataType.BOOL))
    return op.ArgMax(op.Cast(beyond, to=ir.DataType.INT32), axis=2, keepdims=1)


def either(op: Op, condition: ir.Value, name: str, dtype: ir.DataType, yes, no) -> ir.Value:
    """One value from `yes(op)` or `no(op)`, lists of it; only the branch that is wanted runs."""

    def branch(make, kind: str) -> ir.Graph:
        def scoped(op: Op) -> list[ir.Value]:
            op.builder.push_module(f"{name}.{kind}", "If")
            found = make(op)
            op.builder.pop_module()
            return found

        output = ir.Value(name=f"{name}.{kind}", type=ir.TensorType(dtype))
        return op.builder.subgraph(scoped, [], [output], name=f"{name}.{kind}")

    return op.If(condition, then_branch=branch(yes, "drawn"), else_branch=branch(no, "best"))
