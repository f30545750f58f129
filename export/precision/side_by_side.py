"""One product in the place of several with the same x, whose matrices lie side by side: each takes its own columns.

    y (N, T d) --> Split --> (N, H d) of each product

Where each is split into heads of one width d at once, which are gathered into the places where attention reads them,
the heads are gathered from the rows of y:

    y --> Reshape (N T, d) --> Gather(i // H * T + i % H + first) --> (B, H, S, d) of each product

Shapes: N rows, H heads of a product, T those of all, i (B, H, S) the row of each head among those of its product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from export.graph.edit import Nodes
from export.nn.marks import extent

from .products import Linear, put_product

Rows = dict[tuple[str, int, int, int], ir.Value]
"""Rows of heads among those of several products, by i, H, T and first: all layers of a graph share them."""


class Heads(NamedTuple):
    """Where a product's rows become heads. `split`: the Reshape to (N H, d); `taken`: the Gather of its rows, by
    `index`."""

    split: ir.Node
    taken: ir.Node
    index: ir.Value
    width: int


def put_parts(model: ir.Model, products: Sequence[Linear], y: ir.Value, biased: bool, rows: Rows) -> None:
    """Let `y` take the place of these products. biased: it has their biases in it. rows: those of earlier layers, to
    which this one's are added."""
    add, widths = Nodes(model, products[0].node, "int8"), [_width(linear) for linear in products]
    heads = [_heads(linear) for linear in products if biased or linear.addend is None]
    taken = [each for each in heads if each is not None]
    sizes = {each.width for each in taken}
    if len(taken) < len(products) or len(sizes) > 1:
        parts = add.several(len(products), "Split", y, add.constant(np.array(widths)), axis=-1)
        add.before()
        for linear, part in zip(products, parts, strict=True):
            each = Nodes(model, linear.node, "int8")
            if biased:
                each.replace(part)
            else:
                put_product(each, linear, part)
        return
    (d,) = sizes
    split = add("Reshape", y, add.constant(np.array([-1, d])))
    add.before()
    first = 0
    for linear, own, width in zip(products, taken, widths, strict=True):
        own.taken.replace_input_with(0, split)
        own.taken.replace_input_with(1, _rows(model, own.index, width // d, sum(widths) // d, first, rows))
        for node in (own.split, linear.node):
            assert node.graph is not None
            node.graph.remove(node, safe=True)
        first += width // d


def _rows(model: ir.Model, index: ir.Value, own: int, of_all: int, first: int, rows: Rows) -> ir.Value:
    """Return the rows of heads, `own` a row, where there are `of_all`, `first` others before them."""
    name = str(index.name)
    if (key := (name, own, of_all, first)) not in rows:
        add = Nodes(model, f"{name}/{own}_of_{of_all}/{first}", "int8")
        if first:
            index = _rows(model, index, own, of_all, 0, rows)
            rows[key] = add("Add", index, add.constant(first))
        else:
            rows[key] = add("Add", index, add("Mul", add("Div", index, add.constant(own)), add.constant(of_all - own)))
        producer = index.producer()
        assert producer is not None
        assert producer.graph is not None
        producer.graph.insert_after(producer, add.nodes)
    return rows[key]


def _width(linear: Linear) -> int:
    return extent(linear.weight, 0 if linear.rows else 1)


def _heads(linear: Linear) -> Heads | None:
    """Return where the product's rows become heads, if nothing else becomes of them."""
    split = _only_user(linear.node, "Reshape")
    taken = _only_user(split, "Gather") if split else None
    if split is None or taken is None or taken.attributes.get_int("axis", 0) != 0:
        return None
    (_, shape), (data, index) = split.inputs, taken.inputs
    sizes = [] if shape is None or shape.const_value is None else shape.const_value.numpy().tolist()
    if len(sizes) != 2 or sizes[0] != -1 or _width(linear) % sizes[1] or data is not split.outputs[0]:
        return None
    return None if index is None or index.producer() is None else Heads(split, taken, index, sizes[1])


def _only_user(node: ir.Node, operator: str) -> ir.Node | None:
    """Return the one node that reads the node's output, if it is such an operator's."""
    uses = [*node.outputs[0].uses()]
    alone = len(uses) == 1 and uses[0].node.op_type == operator and not node.outputs[0].is_graph_output()
    return uses[0].node if alone else None
