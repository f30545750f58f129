"""A pass that makes inner rows of feed-forward nets a cache line longer, where their length hinders the cache.

    Gemm(x, W1, b1) --> activation --> Gemm(., W2, C)        W1 (F, D), b1 (F,), W2 (D, F) --> F + 16, filled with zeros

A product of float32 matrices reads several rows of its left one at a time: ONNX Runtime's on x86 twelve. Where a row
has a multiple of 4096 bytes, as F = 1024, 2048, 3072 and 4096 give, the same place of every row falls into the same set
of the level 1 cache, which has eight to twelve ways: rows drive each other out, and the product takes a tenth longer
(benchmarks/RESULTS.md, "Vectors of texts"). Nothing is added to a sum: the new columns of W2 are 0, whatever is
multiplied with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.marks import ROLE, extent

from .late_weights import derived, late_initializer
from .products import Linear, is_vector, linears

SET_SPAN = 1024
"""Floats after which an address has the same set of the level 1 cache: 4096 bytes, on x86 and ARM."""
LINE = 16
"""Floats of a cache line."""
LENGTHENED = "longer_rows"
"""NAME.longer_rows is the parameter with zeros behind its last row, number or column."""
ACTIVATIONS = ("Relu", "Gelu", "Sigmoid", "Tanh", "Mul")
"""Each number by itself, and finite at 0."""


def lengthen_rows(model: ir.Model) -> None:
    """Change a graph of Gemms, before its weights are filled."""
    products = {linear.node.outputs[0]: linear for linear in linears(model) if linear.node.op_type == "Gemm"}
    for down in products.values():
        if not down.rows or extent(down.weight, 1) % SET_SPAN or (inner := _inner(down, products)) is None:
            continue
        for value in inner:
            value.shape = None
            if (up := products.get(value)) is not None:
                up.node.replace_input_with(1, _longer(model, up.weight, 0))
                if up.addend is not None:
                    up.node.replace_input_with(2, _longer(model, up.addend, 0))
        down.node.replace_input_with(1, _longer(model, down.weight, 1))
    RemoveUnusedNodesPass()(model)


def _inner(down: Linear, products: Mapping[ir.Value, Linear]) -> set[ir.Value] | None:
    """Return what lies between a product and those whose rows it reads, their results too; None if something else
    reads one of these, or if one has another form."""
    inner, values, readers = [down.x], {down.x}, {down.node}
    for value in inner:
        node, up = value.producer(), products.get(value)
        if node is None or value.is_graph_output():
            return None
        if up is not None and up.rows and (up.addend is None or _is_bias(up.addend)):
            continue
        if node.op_type not in ACTIVATIONS:
            return None
        readers.add(node)
        before = [x for x in node.inputs if x is not None and x.const_value is None and x not in values]
        inner += before
        values.update(before)
    alone = all(user.node in readers for value in inner for user in value.uses())
    return values if alone else None


def _is_bias(addend: ir.Value) -> bool:
    return is_vector(addend) and addend.const_value is None


def _longer(model: ir.Model, parameter: ir.Value, axis: int) -> ir.Value:
    """Return the initializer with zeros behind the last entry of an axis."""
    shape = [extent(parameter, i) for i in range(len(parameter.shape or ()))]
    behind = [(0, LINE if i == axis else 0) for i in range(len(shape))]

    def make(array: NDArray) -> list[NDArray]:
        return [np.pad(array, behind)]

    late, longer = derived(parameter, make, LENGTHENED), [n + more for n, (_, more) in zip(shape, behind, strict=True)]
    value = late_initializer(f"{parameter.name}.{LENGTHENED}", late, 0, longer, ir.DataType.FLOAT)
    value.meta[ROLE] = parameter.meta.get(ROLE)
    return Nodes(model, str(parameter.name)).initializer(value)


def without_zeros(tensors: Mapping[str, NDArray], names: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray]:
    """Return the tensors, parameters under their own names and in their own shapes, which `names` tells; one that has
    anything but zeros behind it stays as long as it is."""
    own_shapes = {}
    for tensor, array in tensors.items():
        name, _, kind = tensor.rpartition(".")
        if kind == LENGTHENED and name in names:
            own = array[tuple(slice(n) for n in names[name])]
            tensor, array = name, own if np.count_nonzero(array) == np.count_nonzero(own) else array
        own_shapes[tensor] = array
    return own_shapes
