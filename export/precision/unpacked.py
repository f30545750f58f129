"""Products in float32 with weights that are stored as integers: ONNX Runtime computes the weights once, when it loads
the graph, and multiplies them as fast as any in float32, in as much memory.

    rows      q int8  (O, D)    --> Cast ------------> Mul scale (O, 1) -----------------------> Transpose --> W (D, O)
    blocks    q uint8 (O, G, b) --> Cast --> Sub 128 --> Mul scale (O, G, 1) --> Reshape [Slice] --> Transpose --> W
    either    MatMul(x, W) [--> Add] --> y

It has a fast product with float32 for blocks of four bits, but none for those of eight: that took 10 to 17 times as
long for one sentence.

Shapes: D width in, O width out, G blocks of a row, b values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from export.graph.edit import Nodes

from .products import Linear, put_product

Unpack = Callable[[Nodes, Linear], ir.Value]
"""Adds the nodes that make the weight (O, D) in float32 from what is stored."""


def multiply_unpacked(model: ir.Model, products: Sequence[Linear], unpack: Unpack) -> None:
    """Change these products, before the graph's weights are filled; each weight is unpacked once."""
    unpacked: dict[str, ir.Value] = {}
    for linear in products:
        name = str(linear.weight.name)
        if name not in unpacked:
            on_load = Nodes(model, name, "unpacked", output="")
            unpacked[name] = on_load("Transpose", unpack(on_load, linear), perm=[1, 0])
            on_load.at_start()
        add = Nodes(model, linear.node)
        put_product(add, linear, add("MatMul", linear.x, unpacked[name]))
