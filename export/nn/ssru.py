"""The simpler simple recurrent unit (SSRU), which can replace a decoder's self-attention (Kim et al. 2019, "From
Research to Production and Back: Ludicrously Fast Neural Machine Translation", section 3.3).

    u_t = x_t W    f_t = sigmoid(x_t W_f + b_f)    c_t = f_t c_{t-1} + (1 - f_t) u_t    y_t = relu(c_t)

u and f are computed for all positions at once; the recurrence of c takes ceil(log2 T) rounds.

Shapes: B batch, T new positions, R rows (sentences x beams), D model.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.core.config import TransformerConfig

from .feedforward import relu
from .primitives import END, Linear, Op, branch, scope, size


class LayerState:
    """The cache of a layer: c of the last position (R, D), before the ReLU; None (zeros) at the start."""

    def __init__(self, state: ir.Value | None = None) -> None:
        self.state = state

    def extend(self, op: Op, f: ir.Value, v: ir.Value) -> ir.Value:
        """Continue the recurrence with f and v = (1 - f) u, both (R, T, D); return c of each new position."""
        c = recurrence(op, f, v, self.state)
        self.state = op.Gather(c, -1, axis=1)
        return c

    def contents(self) -> tuple[ir.Value]:
        """The state after the last position; ValueError before the first."""
        if self.state is None:
            raise ValueError("an empty layer holds nothing")
        return (self.state,)


class OneStep(LayerState):
    """A cache that advances by one position per run: without the axis T, f, v and the state are (..., D)."""

    def extend(self, op: Op, f: ir.Value, v: ir.Value) -> ir.Value:
        """Continue the recurrence with f and v (..., D); return c (..., D), the new state."""
        (state,) = self.contents()
        self.state = op.Add(op.Mul(f, state), v)
        return self.state


class SSRU(nn.Module):
    """Replaces self-attention by a gated running average of the inputs, with a forget gate for each feature."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.input_proj = Linear(config.d_model, config.d_model, bias=False)
        self.forget_proj = Linear(config.d_model, config.d_model)

    def forward(self, op: Op, x: ir.Value, past: LayerState | None = None) -> ir.Value:
        """(B, T, D) -> (B, T, D), continuing from the earlier positions in `past`."""
        f = op.Sigmoid(self.forget_proj(op, x))  # (B, T, D)
        v = op.Mul(op.Sub(1.0, f), self.input_proj(op, x))  # (B, T, D)
        return relu(op, (LayerState() if past is None else past).extend(op, f, v))


def recurrence(op: Op, f: ir.Value, v: ir.Value, state: ir.Value | None = None) -> ir.Value:
    """c_t = f_t c_{t-1} + v_t along the second axis, (B, T, D) -> (B, T, D). c_{-1} is `state` (B, D), or 0.

    A parallel scan (Hillis and Steele 1986): for s = 1, 2, 4, ..., positions t - s and t combine to
    (f_{t-s} f_t, f_t v_{t-s} + v_t), so that each round doubles the number of positions in c_t. A single position takes
    no round: then no Loop runs, for which a GPU has no kernel, and everything stays on the GPU.
    """
    length, name = size(op, f, 1), f"{v.name}/recurrence"

    def first(op: Op, f: ir.Value, v: ir.Value) -> ir.Value:
        return op.Identity(v) if state is None else op.Add(op.Mul(f, op.Unsqueeze(state, [1])), v)

    def rounds(op: Op) -> list[ir.Value]:
        begun = first(op, *(op.Slice(x, [0], [1], [1]) for x in (f, v)))
        return [_rounds(op, f, op.Concat(begun, op.Slice(v, [1], [END], [1]), axis=1), length, name)]

    several = branch(op, f"{name}/several", [ir.Value(name=f"{name}/several")], rounds)
    one = branch(op, f"{name}/one", [ir.Value(name=f"{name}/one")], lambda op: [first(op, f, v)])
    c = op.If(op.Less(1, length), then_branch=several, else_branch=one)
    c.type, c.shape = v.type, v.shape
    return c


def _rounds(op: Op, f: ir.Value, v: ir.Value, length: ir.Value, name: str) -> ir.Value:
    def round_of(op: Op, _: ir.Value, __: ir.Value, s: ir.Value, f: ir.Value, v: ir.Value) -> list[ir.Value]:
        with scope(op, name, "Loop"):
            at, last = op.Reshape(s, [1]), op.Reshape(op.Neg(s), [1])

            def with_later(x: ir.Value, later: ir.Value) -> ir.Value:
                return op.Concat(op.Slice(x, [0], at, [1]), later, axis=1)

            def before(x: ir.Value) -> ir.Value:
                return op.Slice(x, [0], last, [1])

            f_later, doubled = op.Slice(f, at, [END], [1]), op.Add(s, s)
            v_later = op.Add(op.Slice(v, at, [END], [1]), op.Mul(f_later, before(v)))
            more = op.Less(doubled, length)
            return [more, doubled, with_later(f, op.Mul(f_later, before(f))), with_later(v, v_later)]

    def value(key: str, dtype: ir.DataType, shape: Any = ()) -> ir.Value:
        return ir.Value(name=f"{name}/{key}", type=ir.TensorType(dtype), shape=ir.Shape(shape))

    shape = v.shape or (None, None, None)
    integer, boolean, real = ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.FLOAT
    taken = [value("round", integer), value("continue", boolean), value("s", integer)]
    taken += [value(key, real, shape) for key in ("f", "v")]
    inputs = [value("more", boolean), value("s.next", integer)]
    inputs += [value(f"{key}.next", real, shape) for key in ("f", "v")]
    body = op.builder.subgraph(round_of, taken, inputs, name=name)
    return op.Loop(None, True, 1, f, v, body=body, _outputs=3)[2]
