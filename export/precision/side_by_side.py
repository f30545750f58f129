"""One product in the place of several with the same x, whose matrices lie side by side: each takes its own columns.

    y (N, T D) --> Split --> (N, D) of each product

Where all are as wide and each one's rows are gathered into the places where attention reads them, they are gathered
from the rows of y:

    y --> Reshape (N T, D) --> Gather(i T + k) --> (B, S, D) of each product

Shapes: N rows, T products, D columns of each, i (B, S) the row of each place among those of one product, k its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.edit import Nodes
from export.nn.marks import extent

from .products import Linear, put_product

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
