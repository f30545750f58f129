"""Values of which one of two branches computes those that are wanted."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from export.nn.primitives import Op, branch

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
