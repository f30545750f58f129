"""int8: signed weights with one scale an output, activations quantised as they come (dynamic uint8, a scale a tensor).

    x --> DynamicQuantizeLinear --+--> MatMulInteger --> Cast --> Mul --> [Add] --> y
                       W int8 ----+            scale(x) * scale(W) -^

One DynamicQuantizeLinear serves all products with the same x. Target cpu has ONNX Runtime's MatMulIntegerToFloat for
what follows it. An embedding's rows are looked up as int8; a classifier that shares the table reads the same integers.

Shapes: D width in, O width out, V entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.nn.primitives import extent

from .products import Linear, Lookup, Rewriter, initializer, linears, lookups
from .recipes import recipe_value, then
from .rounding import int8_rows

CONTRIB = "com.microsoft"


def int8(model: ir.Model, fused: bool) -> None:
    """Change a built graph, before its weights are filled. `fused`: with ONNX Runtime's own operator."""
    to_int8(model, linears(model), lookups(model), fused)
    RemoveUnusedNodesPass()(model)


def to_int8(model: ir.Model, products: Sequence[Linear], looked_up: Sequence[Lookup], fused: bool) -> None:
    """The same for these products and lookups alone."""
    tables = {lookup.table.name for lookup in looked_up}
    quantised: dict[tuple[ir.Graph | None, str], tuple[ir.Value, ...]] = {}
    for lookup in looked_up:
        _look_up(model, lookup)
    for linear in products:
        rewrite = Rewriter(model, linear.node)
        key = linear.node.graph, str(linear.x.name)
        if key not in quantised:
            quantised[key] = rewrite("DynamicQuantizeLinear", linear.x, outputs=3)
            rewrite.before()
        _multiply(rewrite, linear, quantised[key], fused, linear.weight.name in tables)


def _multiply(rewrite: Rewriter, linear: Linear, x: tuple[ir.Value, ...], fused: bool, shared: bool) -> None:
    """`shared`: the integers stay (O, D), as the lookup needs them; otherwise (D, O), as the product does."""
    integers, scale, zero = x
    weight, weight_scale = _weight(rewrite.model, linear, shared)
    if shared:
        weight = rewrite("Transpose", weight, perm=[1, 0])
    if fused:
        bias = linear.addend if linear.addend is not None and _is_vector(linear.addend) else None
        y = rewrite("MatMulIntegerToFloat", integers, weight, scale, weight_scale, zero, None, bias, domain=CONTRIB)
        addend = None if bias is not None else linear.addend
    else:
        y = rewrite("Cast", rewrite("MatMulInteger", integers, weight, zero), to=ir.DataType.FLOAT)
        y = rewrite("Mul", y, rewrite("Mul", scale, weight_scale))
        addend = linear.addend
    rewrite.replace(y if addend is None else rewrite("Add", y, addend))


def _weight(model: ir.Model, linear: Linear, shared: bool) -> tuple[ir.Value, ir.Value]:
    out, width = (extent(linear.weight, axis) for axis in ((0, 1) if linear.rows else (1, 0)))

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = int8_rows(w if linear.rows else w.T)
        return q if shared else np.ascontiguousarray(q.T), scale

    recipe = then(linear.weight, make, "int8")
    shape = (out, width) if shared else (width, out)
    kind = "int8_rows" if shared else "int8"
    q = recipe_value(f"{linear.weight.name}.{kind}", recipe, 0, shape, ir.DataType.INT8)
    scale = recipe_value(f"{linear.weight.name}.scale", recipe, 1, (out,), ir.DataType.FLOAT)
    return initializer(model, q), initializer(model, scale)


def _look_up(model: ir.Model, lookup: Lookup) -> None:
    rewrite = Rewriter(model, lookup.node)
    q, scale = _rows(model, lookup.table, True)
    row = rewrite("Cast", rewrite("Gather", q, lookup.ids, axis=0), to=ir.DataType.FLOAT)
    rewrite.replace(rewrite("Mul", row, rewrite("Gather", scale, lookup.ids, axis=0)))


def multiply_unpacked(model: ir.Model, products: Sequence[Linear]) -> None:
    """These products in float32, of weights that are stored as for a lookup; ONNX Runtime computes those once, when it
    loads the graph.

    W int8 (O, D) --> Cast --> Mul scale(W) --> Transpose --+
                                                       x --> MatMul --> [Add] --> y
    """
    unpacked: dict[str, ir.Value] = {}
    for linear in products:
        name = str(linear.weight.name)
        if name not in unpacked:
            unpacked[name] = _unpacked(model, *_rows(model, linear.weight, linear.rows), name)
        rewrite = Rewriter(model, linear.node)
        y = rewrite("MatMul", linear.x, unpacked[name])
        rewrite.replace(y if linear.addend is None else rewrite("Add", y, linear.addend))


def _unpacked(model: ir.Model, q: ir.Value, scale: ir.Value, name: str) -> ir.Value:
    """(D, O) float32, in the outermost graph, before all else: every branch and body may read it."""
    wide = ir.node("Cast", [q], {"to": ir.DataType.FLOAT}, name=f"{name}/Cast")
    scaled = ir.node("Mul", [wide.outputs[0], scale], name=f"{name}/Mul")
    turned = ir.node("Transpose", [scaled.outputs[0]], {"perm": [1, 0]}, name=f"{name}/Transpose")
    nodes = [wide, scaled, turned]
    for node in nodes:
        node.outputs[0].name = str(node.name)
    model.graph.insert_before(model.graph[0], nodes)
    return turned.outputs[0]


def _rows(model: ir.Model, weight: ir.Value, rows: bool) -> tuple[ir.Value, ir.Value]:
    """(O, D) int8, and their scales as a column (O, 1): the same numbers as a product's, which broadcast over rows."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    recipe = then(weight, lambda w: int8_rows(w if rows else w.T), "int8")
    q = recipe_value(f"{weight.name}.int8_rows", recipe, 0, (out, width), ir.DataType.INT8)
    scale = recipe_value(f"{weight.name}.scales", recipe, 1, (out, 1), ir.DataType.FLOAT)
    return initializer(model, q), initializer(model, scale)


def _is_vector(value: ir.Value) -> bool:
    return len(value.shape or [0, 0]) == 1 and value.is_initializer()
