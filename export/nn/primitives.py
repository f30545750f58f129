"""The parts that `mlx.nn` provides on the MLX side: Linear, Embedding, parameters and their names, constant tables.

An initializer has the parameter's name in the checkpoint, and a graph holds only the parameters that it uses. Weights
stay (out, in), bit for bit.

Shapes: L positions, D width in, O width out, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import GraphBuilder, nn

from .marks import FULL_PRECISION, ROLE, Role

Op = Any
"""The builder's dispatcher: `op.MatMul(x, w)` adds a node. Every `forward` takes it first."""
END = 1 << 62
"""The end of a Slice up to the last element."""


class Parameter(nn.Parameter):
    """An initializer of the outermost graph, float32; `name_parameters` gives it its full name. A matrix has a role."""

    def __init__(self, shape: Sequence[int], role: Role | None = None) -> None:
        super().__init__(list(shape))
        if role is not None:
            self.meta[ROLE] = role

    def _realize(self, builder: GraphBuilder) -> Parameter:
        # The inherited method names a parameter after its scope, which differs inside the branches of an If.
        builder.root.graph.initializers.setdefault(str(self.name), self)
        return self


def name_parameters(model: nn.Module) -> None:
    """Name every parameter by its path in the modules, e.g. encoder.layers.0.self_attention.query_proj.weight."""
    for name, parameter in model.named_parameters():
        parameter.name = name


@contextmanager
def scope(op: Op, name: str, kind: str) -> Iterator[None]:
    """Nodes added inside belong to a module `name` of class `kind`, and are named after it."""
    op.builder.push_module(name, kind)
    try:
        yield
    finally:
        op.builder.pop_module()


@contextmanager
def full_precision(op: Op) -> Iterator[None]:
    """Nodes added inside stay float32 in 16-bit graphs."""
    graph = op.builder.graph
    before = len(graph)
    yield
    for node in graph[before:]:
        node.meta[FULL_PRECISION] = True


def branch(op: Op, name: str, outputs: Sequence[ir.Value], values: Callable[[Op], Sequence[ir.Value]]) -> ir.Graph:
    """A branch of an If: the nodes that `values` adds, named within `name`."""

    def named(op: Op) -> Sequence[ir.Value]:
        with scope(op, name, "If"):
            return values(op)

    return op.builder.subgraph(named, [], outputs, name=name)


def scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: nodes and parameters of a method are named within the module, as they are in `forward`."""

    @functools.wraps(method)
    def call(self: nn.Module, op: Op, *args: Any, **named: Any) -> Any:
        with scope(op, self.name or "", type(self).__qualname__):
            for parameter in self.parameters(recurse=False):
                parameter._realize(op.builder)
            return method(self, op, *args, **named)

    return call


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, width: int, out: int, bias: bool = True, role: Role = Role.WEIGHT):
        super().__init__()
        self.weight = Parameter([out, width], role)
        self.bias = Parameter([out]) if bias else None

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """(..., D) -> (..., O)."""
        y = matmul_transposed(op, x, self.weight)
        return y if self.bias is None else op.Add(y, self.bias)


class Embedding(nn.Module):
    """Rows of a table (V, D); transposed, the same table is a tied classifier."""

    def __init__(self, vocab_size: int, width: int, role: Role):
        super().__init__()
        self.weight = Parameter([vocab_size, width], role)

    def forward(self, op: Op, ids: ir.Value) -> ir.Value:
        """Look up ids (B, L) -> (B, L, D)."""
        return op.Gather(self.weight, ids, axis=0)

    @scoped
    def as_linear(self, op: Op, x: ir.Value) -> ir.Value:
        """x W^T: (B, L, D) -> (B, L, V)."""
        return matmul_transposed(op, x, self.weight)


def matmul_transposed(op: Op, x: ir.Value, weight: ir.Value) -> ir.Value:
    """x W^T. The Transpose is in the outermost graph, where every runtime folds that of an initializer when loading."""
    return op.MatMul(x, op.builder.root.op.Transpose(weight, perm=[1, 0], _name=f"{weight.name}/Transpose"))


def table(op: Op, name: str, make: Callable[[], NDArray | ir.TensorProtocol]) -> ir.Value:
    """The constant called `name`, which `make` computes at its first use in a graph."""
    root = op.builder.root
    known = root.graph.initializers.get(name)
    return root.initializer(ir.tensor(make(), name=name), qualify=False) if known is None else known


def size(op: Op, x: ir.Value, axis: int) -> ir.Value:
    """The length of a dynamic axis, a scalar int64."""
    return op.Gather(op.Shape(x), axis, axis=0)
