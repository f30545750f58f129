"""Where a graph multiplies with weights or looks rows up in them: what the passes for lower precision replace.

    MatMul(x, Transpose(W))   MatMul(x, W)   Gemm(x, W, C, transB=1 or 0)        y = x W^T [+ C]
    Gather(W, ids)                                                               rows of a table

W is an initializer of the outermost graph that isn't filled yet. Its role, which `nn/` has said, tells whether it is
one that is multiplied, or a table of tokens: what is looked up by positions is neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.convenience import replace_nodes_and_values

from export.nn.primitives import ROLE, Role

MULTIPLIED = (Role.WEIGHT, Role.CLASSIFIER, Role.EMBEDDING)


@dataclass(frozen=True)
class Linear:
    """One product. `weight` is (O, D) if `rows`, else (D, O)."""

    node: ir.Node
    weight: ir.Value
    rows: bool

    @property
    def is_table(self) -> bool:
        """A row a token: a classifier, or an embedding that is one."""
        return self.weight.meta[ROLE] in (Role.EMBEDDING, Role.CLASSIFIER)

    # Asked of the node, as a pass may have put other values in their place since it was found.

    @property
    def x(self) -> ir.Value:
        """(..., D)"""
        return _given(self.node.inputs[0])

    @property
    def addend(self) -> ir.Value | None:
        """Gemm's C."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None


@dataclass(frozen=True)
class Lookup:
    """One Gather along axis 0 of a table (V, D)."""

    node: ir.Node
    table: ir.Value
    ids: ir.Value


def linears(model: ir.Model) -> list[Linear]:
    """In every graph of the model, in order."""
    return [found for node in model.graph.all_nodes() if (found := _linear(node)) is not None]


def lookups(model: ir.Model) -> list[Lookup]:
    """Those of embeddings, in every graph of the model."""
    return list(_lookups(model))


def _lookups(model: ir.Model) -> Iterator[Lookup]:
    for node in model.graph.all_nodes():
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            table, ids = node.inputs
            if table is not None and ids is not None and _is_matrix(table, Role.EMBEDDING):
                yield Lookup(node, table, ids)


def _linear(node: ir.Node) -> Linear | None:
    if node.op_type == "MatMul" and node.domain == "":
        x, weight = node.inputs
        producer = None if weight is None else weight.producer()
        transposed = producer is not None and producer.op_type == "Transpose"
        weight = producer.inputs[0] if transposed and producer is not None else weight
        if x is not None and weight is not None and _is_matrix(weight, *MULTIPLIED):
            return Linear(node, weight, transposed)
    if node.op_type == "Gemm":
        x, weight = node.inputs[:2]
        plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        plain = plain and not node.attributes.get_int("transA", 0)
        if x is not None and weight is not None and _is_matrix(weight, *MULTIPLIED) and plain:
            return Linear(node, weight, bool(node.attributes.get_int("transB", 0)))
    return None


def _given(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _is_matrix(value: ir.Value, *roles: Role) -> bool:
    """Unfilled, and of one of these roles."""
    return value.is_initializer() and value.const_value is None and value.meta.get(ROLE) in roles


class Rewriter:
    """New nodes in the place of one, named after it; they go into the same graph, initializers into the outermost."""

    def __init__(self, model: ir.Model, node: ir.Node):
        self.model, self.node = model, node
        self.nodes: list[ir.Node] = []
        self.made = Counter[str]()

    def __call__(
        self, operator: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node; returns its output, or all of several."""
        count = self.made[operator]
        self.made[operator] += 1
        name = f"{self.node.name}/{operator}" + (f"_{count}" if count else "")
        made = ir.node(operator, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        for i, value in enumerate(made.outputs):
            value.name = f"{name}.{i}"
        self.nodes.append(made)
        if domain:
            self.model.graph.opset_imports.setdefault(domain, 1)
        return made.outputs[0] if outputs == 1 else tuple(made.outputs)

    def outside(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The same, but in the outermost graph if the node is in a branch of it."""
        value = self(operator, *inputs, **attributes)
        if self.node.graph is not self.model.graph:
            self.model.graph.insert_before(self.model.graph[0], self.nodes.pop())
        return value

    def before(self) -> None:
        """Put what there is before the node, which stays."""
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, self.nodes)
        self.nodes = []

    def replace(self, result: ir.Value, *, and_also: Sequence[ir.Node] = ()) -> None:
        """`result` takes the place of the node's output, or of that of the last node in `and_also`, which go too."""
        assert self.node.graph is not None
        last = and_also[-1] if and_also else self.node
        replace_nodes_and_values(self.node.graph, last, [self.node, *and_also], self.nodes, [last.outputs[0]], [result])


def constant(graph: ir.Graph, array: NDArray, owner: str) -> ir.Value:
    """An initializer of this value, one for all that are equal; `owner` begins its name."""
    kind = "x".join(map(str, array.shape)) or "scalar"
    name = f"{owner}.{array.dtype.name}.{kind}.{'_'.join(map(str, array.ravel()))}"
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        graph.initializers[name] = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
    return graph.initializers[name]


def initializer(model: ir.Model, value: ir.Value) -> ir.Value:
    """The initializer of this name, which is `value` if there was none."""
    return model.graph.initializers.setdefault(str(value.name), value)
