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
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.nn.primitives import extent

from .products import Linear, Lookup, Rewriter, constant, initializer, linears, lookups
from .recipes import recipe_value, then
from .rounding import int8_rows
from .unpacked import Opening

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
    """The same for these products and lookups alone."""
    tables = {lookup.table.name for lookup in looked_up}
    quantised: dict[tuple[ir.Graph | None, str], Rows] = {}
    for lookup in looked_up:
        _look_up(model, lookup)
    for linear in products:
        rewrite = Rewriter(model, linear.node)
        key = linear.node.graph, str(linear.x.name)
        if key not in quantised:
            quantised[key] = _quantise(rewrite, linear.x)
            rewrite.before()
        _multiply(rewrite, linear, quantised[key], fused, linear.weight.name in tables)


@dataclass(frozen=True)
class Rows:
    """Activations as integers: x ~ (q - zero) * largest / steps."""

    q: ir.Value
    """(..., D) uint8"""
    zero: ir.Value
    largest: ir.Value
    """(..., 1)"""
    steps: int


def _quantise(rewrite: Rewriter, x: ir.Value) -> Rows:
    """x (..., D). Division and rounding are two operators, as QuantizeLinear takes a scale a row from opset 21 on."""
    number = partial(constant, rewrite.model.graph, owner="int8")
    producer = x.producer()
    positive = producer is not None and producer.op_type == "Relu"
    zero, steps = (0, 255) if positive else (128, 127)
    largest = rewrite("ReduceMax", x if positive else rewrite("Abs", x), number(np.array([-1])), keepdims=1)
    largest = rewrite("Max", largest, number(np.array(LEAST, np.float32)))
    unit, zero = number(np.array(1 / steps, np.float32)), number(np.array(zero, np.uint8))
    return Rows(rewrite("QuantizeLinear", rewrite("Div", x, largest), unit, zero), zero, largest, steps)


def _multiply(rewrite: Rewriter, linear: Linear, x: Rows, fused: bool, shared: bool) -> None:
    """`shared`: the integers stay (O, D), as the lookup needs them; otherwise (D, O), as the product does."""
    weight, scale = _weight(rewrite.model, linear, shared, x.steps)
    if shared:
        weight = rewrite("Transpose", weight, perm=[1, 0])
    if fused:
        y = rewrite("MatMulIntegerToFloat", x.q, weight, x.largest, scale, x.zero, domain=CONTRIB)
    else:
        y = rewrite("Cast", rewrite("MatMulInteger", x.q, weight, x.zero), to=ir.DataType.FLOAT)
        y = rewrite("Mul", rewrite("Mul", y, scale), x.largest)
    rewrite.replace(y if linear.addend is None else rewrite("Add", y, linear.addend))


def _weight(model: ir.Model, linear: Linear, shared: bool, steps: int) -> tuple[ir.Value, ir.Value]:
    out, width = (extent(linear.weight, axis) for axis in ((0, 1) if linear.rows else (1, 0)))

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = int8_rows(w if linear.rows else w.T)
        return q if shared else np.ascontiguousarray(q.T), scale / np.float32(steps)

    recipe = then(linear.weight, make, f"int8_{steps}")
    shape = (out, width) if shared else (width, out)
    kind = "int8_rows" if shared else "int8"
    q = recipe_value(f"{linear.weight.name}.{kind}", recipe, 0, shape, ir.DataType.INT8)
    scale = recipe_value(f"{linear.weight.name}.{IN_STEPS}{steps}", recipe, 1, (out,), ir.DataType.FLOAT)
    return initializer(model, q), initializer(model, scale)


def _look_up(model: ir.Model, lookup: Lookup) -> None:
    rewrite = Rewriter(model, lookup.node)
    q, scale = _rows(model, lookup.table, True)
    row = rewrite("Cast", rewrite("Gather", q, lookup.ids, axis=0), to=ir.DataType.FLOAT)
    rewrite.replace(rewrite("Mul", row, rewrite("Gather", scale, lookup.ids, axis=0)))


def unpack_rows(opening: Opening, linear: Linear) -> ir.Value:
    """For `multiply_unpacked`: of the integers of a lookup."""
    q, scale = _rows(opening.model, linear.weight, linear.rows)
    return opening("Mul", opening("Cast", q, to=ir.DataType.FLOAT), scale)


def _rows(model: ir.Model, weight: ir.Value, rows: bool) -> tuple[ir.Value, ir.Value]:
    """(O, D) int8, and their scales as a column (O, 1): the same numbers as a product's, which broadcast over rows."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    recipe = then(weight, lambda w: int8_rows(w if rows else w.T), "int8")
    q = recipe_value(f"{weight.name}.int8_rows", recipe, 0, (out, width), ir.DataType.INT8)
    scale = recipe_value(f"{weight.name}.scales", recipe, 1, (out, 1), ir.DataType.FLOAT)
    return initializer(model, q), initializer(model, scale)
