"""Products in float32 of weights that are stored as integers: ONNX Runtime computes the weights once, when it loads the
graph, and multiplies them as fast as any in float32, in as much memory.

    rows      q int8  (O, D)    --> Cast ------------> Mul scale (O, 1) -----------------------> Transpose --> W (D, O)
    blocks    q uint8 (O, G, b) --> Cast --> Sub 128 --> Mul scale (O, G, 1) --> Reshape [Slice] --> Transpose --> W
    either    MatMul(x, W) [--> Add] --> y

It has no fast product of 8-bit blocks with float32: that took 10 to 17 times as long for one sentence. Of four bits it
has one.

Shapes: D width in, O width out, G blocks of a row, b values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from .products import Linear, Rewriter, constant

Unpack = Callable[["Opening", Linear], ir.Value]
"""Adds what makes the weight (O, D) in float32 of what is stored."""


class Opening:
    """Nodes of the outermost graph, before all else: every branch and body may read what they make."""

    def __init__(self, model: ir.Model, owner: str):
        self.model, self.owner = model, owner
        self.nodes: list[ir.Node] = []

    def __call__(self, operator: str, *inputs: ir.Value, **attributes: int | Sequence[int]) -> ir.Value:
        node = ir.node(operator, inputs, attributes, name=f"{self.owner}/{operator}")
        node.outputs[0].name = str(node.name)
        self.nodes.append(node)
        return node.outputs[0]

    def integers(self, *values: int) -> ir.Value:
        """(n,) int64"""
        return constant(self.model.graph, np.array(values, np.int64), "unpacked")

    def number(self, value: float) -> ir.Value:
        """() float32"""
        return constant(self.model.graph, np.array(value, np.float32), "unpacked")


def multiply_unpacked(model: ir.Model, products: Sequence[Linear], unpack: Unpack) -> None:
    """Change these products, before the graph's weights are filled; each weight is unpacked once."""
    unpacked: dict[str, ir.Value] = {}
    for linear in products:
        name = str(linear.weight.name)
        if name not in unpacked:
            opening = Opening(model, name)
            unpacked[name] = opening("Transpose", unpack(opening, linear), perm=[1, 0])
            model.graph.insert_before(model.graph[0], opening.nodes)
        rewrite = Rewriter(model, linear.node)
        y = rewrite("MatMul", linear.x, unpacked[name])
        rewrite.replace(y if linear.addend is None else rewrite("Add", y, linear.addend))
