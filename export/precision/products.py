"""The products of a graph, and late weights: initializers computed from parameters while the weights are written.

`linears` and `lookups` find products with weights and lookups in tables, which the passes for lower precisions replace.

    MatMul(x, Transpose(W))   MatMul(x, W)   Gemm(x, W, C, transB=1 or 0)        y = x W^T [+ C]
    Gather(W, ids)                                                               rows of a table

W is an initializer of the outermost graph, not filled yet. Its role, set in `nn/`, says whether it is multiplied, a
table looked up by tokens, or both. Tables looked up by positions or token types are neither.

`put_parts` splits one product y that replaces several products with the same x, e.g. with the query, key and value
matrices side by side:

    y (N, T D) --> Split --> (N, D) of each product

If all products are equally wide and their rows only go into Gathers (target cpu puts them in the places where attention
reads them), the Gathers read y itself:

    y --> Reshape (N T, D) --> Gather(i T + k) --> (B, S, D) of each product

Shapes: N rows, T products, D columns of each; i (B, S) is a Gather's index of rows, k the number of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph.edit import Nodes
from export.nn.marks import ROLE, ROWS_OF, Role, extent

LATE = "late"
"""Key in an initializer's `meta`; the entry is (LateWeight, index of its result)."""


@dataclass(frozen=True)
class LateWeight:
    """Computes initializers from parameters of the checkpoint: `make(*arrays) -> arrays`.

    It runs while the weights are written, so only the arrays of a single call are in memory. `key`: the same for all
    initializers from a call of `make`. `elementwise`: `make` changes each number of a single parameter by itself. The
    parameter may then be computed and written in parts.
    """

    parameters: tuple[str, ...]
    make: Callable[..., Sequence[NDArray]]
    key: str
    elementwise: bool = False


def late_initializer(name: str, late: LateWeight, index: int, shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
    """Result `index` of `late` as an initializer. For types NumPy lacks, e.g. INT4, `make` returns bytes."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.meta[LATE] = late, index
    return value


def derived(
    weight: ir.Value, make: Callable[[NDArray], Sequence[NDArray]], kind: str, elementwise: bool = False
) -> LateWeight:
    """A late weight computed by `make` from an initializer: a parameter, or a late weight itself."""
    key = f"{weight.name}|{kind}"
    if LATE not in weight.meta:
        return LateWeight((str(weight.name),), make, key, elementwise)
    before, index = weight.meta[LATE]
    return LateWeight(before.parameters, lambda *arrays: make(before.make(*arrays)[index]), key)


MULTIPLIED = (Role.WEIGHT, Role.UNBOUNDED, Role.CLASSIFIER, Role.EMBEDDING)
LOOKED_UP = (Role.EMBEDDING, Role.LOOKED_UP)
LEAST_OF = {"Relu": 0.0, "Gelu": 0.1701}
"""How far below zero these functions go: x * Phi(x) by 0.16997, its approximation with tanh by 0.17004."""


@dataclass(frozen=True)
class Linear:
    """One product with a weight: (O, D) if `rows`, else (D, O)."""

    node: ir.Node
    weight: ir.Value
    rows: bool
    chosen: ir.Value | None = None
    """(D, C): rows of chosen ids; the product reads these instead of the whole weight."""

    @property
    def is_table(self) -> bool:
        """Whether the weight has a row per token: a classifier's own matrix, or a tied embedding."""
        return self.weight.meta[ROLE] in (Role.EMBEDDING, Role.CLASSIFIER)

    # Read from the node each time: a pass may have replaced its inputs since the product was found.

    @property
    def x(self) -> ir.Value:
        """(..., D)"""
        return _required(self.node.inputs[0])

    @property
    def addend(self) -> ir.Value | None:
        """C of a Gemm; None without it."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None


@dataclass(frozen=True)
class Lookup:
    """One Gather along axis 0 of a table (V, D)."""

    node: ir.Node
    table: ir.Value
    ids: ir.Value


def linears(model: ir.Model) -> list[Linear]:
    """The products in every graph of the model, in order."""
    return [linear for node in model.graph.all_nodes() if (linear := _linear(node)) is not None]


def lookups(model: ir.Model) -> list[Lookup]:
    """The lookups in embeddings, in every graph of the model."""
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
    assert value is not None
    return value


def _is_matrix(value: ir.Value, *roles: Role) -> bool:
    """Whether the value is an unfilled initializer with one of these roles."""
    return value.is_initializer() and value.const_value is None and value.meta.get(ROLE) in roles


def least_of(x: ir.Value) -> float | None:
    """How far below zero x can go, e.g. 0.0 after a Relu; None if the operator that makes x doesn't say."""
    producer = x.producer()
    return None if producer is None else LEAST_OF.get(producer.op_type)


def is_vector(value: ir.Value | None) -> bool:
    """Whether the value added to a product is a bias: an initializer with one axis."""
    return value is not None and value.is_initializer() and value.shape is not None and len(value.shape) == 1


def put_product(add: Nodes, linear: Linear, y: ir.Value) -> None:
    """Replace the product by `y`, plus its addend, if any."""
    add.replace(y if linear.addend is None else add("Add", y, linear.addend))


Rows = dict[tuple[str, int, int], ir.Value]
"""The index i T + k of a Gather, by (name of i, T, k). All layers of a graph share these."""


def put_parts(model: ir.Model, products: Sequence[Linear], y: ir.Value, biased: bool, rows: Rows) -> None:
    """Replace these products by their columns of `y`.

    biased: y includes their biases. rows: the indices made so far; more are added.
    """
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
    """The rows of product k in y: index * count + k."""
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
    """The Gather of the product's rows, if it is the product's only reader."""
    uses = [*linear.node.outputs[0].uses()]
    if len(uses) != 1 or uses[0].node.op_type != "Gather" or linear.node.outputs[0].is_graph_output():
        return None
    node = uses[0].node
    (data, index), axis = node.inputs, node.attributes.get_int("axis", 0)
    by_rows = axis == 0 and data is linear.node.outputs[0] and index is not None and index.producer() is not None
    return node if by_rows else None
