"""Where a graph multiplies with weights or looks rows up in them: what the passes for lower precision replace.

    MatMul(x, Transpose(W))   MatMul(x, W)   Gemm(x, W, C, transB=1 or 0)        y = x W^T [+ C]
    Gather(W, ids)                                                               rows of a table

W is an initializer of the outermost graph that isn't filled yet. Its role, which `nn/` has said, tells whether it is
one that is multiplied, a table of tokens or both: what is looked up by positions or kinds of tokens is neither.

One product in the place of several with the same x, whose matrices lie side by side: each takes its own columns.

    y (N, T D) --> Split --> (N, D) of each product

Where all are as wide and each one's rows are gathered into the places where attention reads them, they are gathered
from the rows of y:

    y --> Reshape (N T, D) --> Gather(i T + k) --> (B, S, D) of each product

Shapes: N rows, T products, D columns of each, i (B, S) the row of each place among those of one product, k its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.edit import Nodes
from export.nn.marks import ROLE, ROWS_OF, Role, extent

MULTIPLIED = (Role.WEIGHT, Role.UNBOUNDED, Role.CLASSIFIER, Role.EMBEDDING)
LOOKED_UP = (Role.EMBEDDING, Role.LOOKED_UP)
LEAST_OF = {"Relu": 0.0, "Gelu": 0.1701}
"""How far below zero they go: x * Phi(x) by 0.16997, its approximation with tanh by 0.17004."""


@dataclass(frozen=True)
class Linear:
    """One product. `weight` is (O, D) if `rows`, else (D, O)."""

    node: ir.Node
    weight: ir.Value
    rows: bool
    chosen: ir.Value | None = None
    """(D, C): the rows of chosen ids, which are multiplied with in place of all."""

    @property
    def is_table(self) -> bool:
        """A row a token: a classifier, or an embedding that is one."""
        return self.weight.meta[ROLE] in (Role.EMBEDDING, Role.CLASSIFIER)

    # Asked of the node, as a pass may have put other values in their place since it was found.

    @property
    def x(self) -> ir.Value:
        """(..., D)"""
        return _required(self.node.inputs[0])

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
    """List the products in every graph of the model, in order."""
    return [linear for node in model.graph.all_nodes() if (linear := _linear(node)) is not None]


def lookups(model: ir.Model) -> list[Lookup]:
    """List the lookups in embeddings, in every graph of the model."""
    return list(_lookups(model))


def _lookups(model: ir.Model) -> Iterator[Lookup]:
    for node in model.graph.all_nodes():
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            table, ids = node.inputs
            if any(ROWS_OF in user.node.outputs[0].meta for user in node.outputs[0].uses()):
                continue
            if table is not None and ids is not None and _is_matrix(table, *LOOKED_UP):
                yield Lookup(node, table, ids)


def _linear(node: ir.Node) -> Linear | None:
    if node.op_type == "MatMul" and node.domain == "":
        x, weight = node.inputs
        if weight is not None and ROWS_OF in weight.meta:
            return Linear(node, weight.meta[ROWS_OF], True, weight)
        producer = None if weight is None else weight.producer()
        transposed = producer is not None and producer.op_type == "Transpose"
        weight = producer.inputs[0] if transposed and producer is not None else weight
        if x is not None and weight is not None and _is_matrix(weight, *MULTIPLIED):
            return Linear(node, weight, transposed)
    if node.op_type == "Gemm":
        x, weight = node.inputs[:2]
        if weight is not None and ROWS_OF in weight.meta:
            return Linear(node, weight.meta[ROWS_OF], True, weight)
        plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        plain = plain and not node.attributes.get_int("transA", 0)
        if x is not None and weight is not None and _is_matrix(weight, *MULTIPLIED) and plain:
            return Linear(node, weight, bool(node.attributes.get_int("transB", 0)))
    return None


def _required(value: ir.Value | None) -> ir.Value:
    """Return the value of an input that its operator can't do without."""
    assert value is not None
    return value


def _is_matrix(value: ir.Value, *roles: Role) -> bool:
    """Say whether it is unfilled, and of one of these roles."""
    return value.is_initializer() and value.const_value is None and value.meta.get(ROLE) in roles


def least_of(x: ir.Value) -> float | None:
    """Return how far below zero an activation goes at most, where the function that it comes from tells."""
    producer = x.producer()
    return None if producer is None else LEAST_OF.get(producer.op_type)


def is_vector(value: ir.Value | None) -> bool:
    """Return whether what is added to a product is a parameter with a number an output, its bias."""
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) == 1


def put_product(add: Nodes, linear: Linear, y: ir.Value) -> None:
    """Let `y`, plus what is added to the product, take the product's place."""
    add.replace(y if linear.addend is None else add("Add", y, linear.addend))


Rows = dict[tuple[str, int, int], ir.Value]
"""Rows of one product among those of several, by i, T and k: all layers of a graph share them."""


def put_parts(model: ir.Model, products: Sequence[Linear], y: ir.Value, biased: bool, rows: Rows) -> None:
    """Let `y` take the place of these products. biased: it has their biases in it. rows: those of earlier layers, to
    which this one's are added."""
    add, widths = Nodes(model, products[0].node, "int8"), [_width(linear) for linear in products]
    gathers = [_gather(linear) for linear in products if biased or linear.addend is None]
    taken = [node for node in gathers if node is not None]
    if len(taken) < len(products) or len({*widths}) > 1:
        parts = add.several(len(products), "Split", y, add.constant(np.array(widths)), axis=-1)
        add.before()
        for linear, part in zip(products, parts, strict=True):
            each = Nodes(model, linear.node, "int8")
            if biased:
                each.replace(part)
            else:
                put_product(each, linear, part)
        return
    split = add("Reshape", y, add.constant(np.array([-1, widths[0]])))
    add.before()
    for k, (linear, node) in enumerate(zip(products, taken, strict=True)):
        index = node.inputs[1]
        assert index is not None
        node.replace_input_with(0, split)
        node.replace_input_with(1, _rows(model, index, len(products), k, rows))
        assert linear.node.graph is not None
        linear.node.graph.remove(linear.node, safe=True)


def _rows(model: ir.Model, index: ir.Value, count: int, k: int, rows: Rows) -> ir.Value:
    """Return the rows of product k where each of `index` stands for those of `count` products."""
    if (key := (str(index.name), count, k)) not in rows:
        first = _rows(model, index, count, 0, rows) if k else index
        add = Nodes(model, f"{index.name}/of_{count}/{k}", "int8")
        rows[key] = add("Add", first, add.constant(k)) if k else add("Mul", index, add.constant(count))
        producer = first.producer()
        assert producer is not None
        assert producer.graph is not None
        producer.graph.insert_after(producer, add.nodes)
    return rows[key]


def _width(linear: Linear) -> int:
    return extent(linear.weight, 0 if linear.rows else 1)


def _gather(linear: Linear) -> ir.Node | None:
    """Return what gathers the product's rows, if nothing else becomes of them."""
    uses = [*linear.node.outputs[0].uses()]
    if len(uses) != 1 or uses[0].node.op_type != "Gather" or linear.node.outputs[0].is_graph_output():
        return None
    node = uses[0].node
    (data, index), axis = node.inputs, node.attributes.get_int("axis", 0)
    by_rows = axis == 0 and data is linear.node.outputs[0] and index is not None and index.producer() is not None
    return node if by_rows else None
