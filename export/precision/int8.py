"""int8: signed weights with one scale an output, activations quantised as they come, with one scale a row.

    x --> Abs --> ReduceMax --> m --+-------------------------------------------+
    |                               |                                           |
    +----------------------------> Div --> QuantizeLinear --> MatMulInteger --> Cast --> Mul --> Mul --> [Add] --> y
                                              W int8 --------------^     scale(W) / 127 --^

A row is a token, so what a token becomes hangs on no other: neither on those of its sentence nor on its neighbours in a
batch. m is its largest magnitude; x / m is rounded to 127 steps on either side of zero (uint8, zero point 128), after a
Relu to 255 on one (zero point 0). One quantised x serves all products with it.

The two Muls stay apart: ONNX Runtime takes a Mul by their product, and an Add behind it, for the form with one scale a
tensor, in which it adds the bias before it multiplies. Target cpu has its MatMulIntegerToFloat for Cast, Mul, Mul: it
takes a scale a row as well, but for the same reason no bias.

An embedding's rows are looked up as int8; a classifier that shares the table reads the same integers.

Shapes: D width in, O width out, V entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.primitives import extent

from .late_weights import derived, late_initializer
from .products import Linear, Lookup, linears, lookups, put_product
from .rounding import int8_rows

CONTRIB = "com.microsoft"
IN_STEPS = "scale_"
"""Names a product's scales: W ~ q * steps * NAME.scale_STEPS, which saves a multiplication of m."""
LEAST = 1e-30
"""m of a row of zeros."""


def int8(model: ir.Model, fused: bool) -> None:
    """Change a built graph, before its weights are filled. `fused`: with ONNX Runtime's own operator."""
    to_int8(model, linears(model), lookups(model), fused)
    RemoveUnusedNodesPass()(model)


def to_int8(model: ir.Model, products: Sequence[Linear], looked_up: Sequence[Lookup], fused: bool) -> None:
    """Change these products and lookups alone."""
    tables = {lookup.table.name for lookup in looked_up}
    quantised: dict[tuple[ir.Graph | None, str], Rows] = {}
    for lookup in looked_up:
        _look_up(model, lookup)
    for linear in products:
        add = Nodes(model, linear.node, "int8")
        key = linear.node.graph, str(linear.x.name)
        if key not in quantised:
            quantised[key] = _quantise(add, linear.x)
            add.before()
        _multiply(add, linear, quantised[key], fused, linear.weight.name in tables)


@dataclass(frozen=True)
class Rows:
    """Activations as integers: x ~ (q - zero) * largest / steps."""

    q: ir.Value
    """(..., D) uint8"""
    zero: ir.Value
    largest: ir.Value
    """(..., 1)"""
    steps: int


def _quantise(add: Nodes, x: ir.Value) -> Rows:
    """Quantise x (..., D). Division and rounding are two operators, as QuantizeLinear takes a scale a row from opset 21
    on."""
    producer = x.producer()
    positive = producer is not None and producer.op_type == "Relu"
    zero, steps = (0, 255) if positive else (128, 127)
    largest = add("ReduceMax", x if positive else add("Abs", x), add.constant([-1]), keepdims=1)
    largest = add("Max", largest, add.constant(np.float32(LEAST)))
    unit, zero = add.constant(np.float32(1 / steps)), add.constant(np.uint8(zero))
    return Rows(add("QuantizeLinear", add("Div", x, largest), unit, zero), zero, largest, steps)


def _multiply(add: Nodes, linear: Linear, x: Rows, fused: bool, shared: bool) -> None:
    """Multiply with integers. `shared`: the integers stay (O, D), as the lookup needs them; otherwise (D, O), as the
    product does."""
    weight, scale = _weight(add, linear, shared, x.steps)
    if shared:
        weight = add("Transpose", weight, perm=[1, 0])
    if fused:
        y = add("MatMulIntegerToFloat", x.q, weight, x.largest, scale, x.zero, domain=CONTRIB)
    else:
        y = add("Cast", add("MatMulInteger", x.q, weight, x.zero), to=ir.DataType.FLOAT)
        y = add("Mul", add("Mul", y, scale), x.largest)
    put_product(add, linear, y)


def _weight(add: Nodes, linear: Linear, shared: bool, steps: int) -> tuple[ir.Value, ir.Value]:
    out, width = (extent(linear.weight, axis) for axis in ((0, 1) if linear.rows else (1, 0)))

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = int8_rows(w if linear.rows else w.T)
        return q if shared else np.ascontiguousarray(q.T), scale / np.float32(steps)

    late = derived(linear.weight, make, f"int8_{steps}")
    shape = (out, width) if shared else (width, out)
    kind = "int8_rows" if shared else "int8"
    q = late_initializer(f"{linear.weight.name}.{kind}", late, 0, shape, ir.DataType.INT8)
    scale = late_initializer(f"{linear.weight.name}.{IN_STEPS}{steps}", late, 1, (out,), ir.DataType.FLOAT)
    return add.initializer(q), add.initializer(scale)


def _look_up(model: ir.Model, lookup: Lookup) -> None:
    add = Nodes(model, lookup.node)
    q, scale = _rows(add, lookup.table, True)
    row = add("Cast", add("Gather", q, lookup.ids, axis=0), to=ir.DataType.FLOAT)
    add.replace(add("Mul", row, add("Gather", scale, lookup.ids, axis=0)))


def unpack_rows(add: Nodes, linear: Linear) -> ir.Value:
    """Unpack a weight from the integers that a lookup reads, for a product in float32."""
    q, scale = _rows(add, linear.weight, linear.rows)
    return add("Mul", add("Cast", q, to=ir.DataType.FLOAT), scale)


def _rows(add: Nodes, weight: ir.Value, rows: bool) -> tuple[ir.Value, ir.Value]:
    """Return (O, D) int8, and their scales as a column (O, 1): the same numbers as a product's, which broadcast over
    rows."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    late = derived(weight, lambda w: int8_rows(w if rows else w.T), "int8")
    q = late_initializer(f"{weight.name}.int8_rows", late, 0, (out, width), ir.DataType.INT8)
    scale = late_initializer(f"{weight.name}.scales", late, 1, (out, 1), ir.DataType.FLOAT)
    return add.initializer(q), add.initializer(scale)
