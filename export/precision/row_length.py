"""A pass that pads the inner rows of feed-forward networks by a cache line, if their length is bad for the CPU's cache.

    Gemm(x, W1, b1) --> activation --> Gemm(., W2, C)        W1 (F, D), b1 (F,), W2 (D, F) --> F + 16, padded with zeros

A float32 product reads several rows of its left matrix at a time, in ONNX Runtime on x86 twelve. If a row has a
multiple of 4096 bytes, e.g. with F = 1024, 2048, 3072 or 4096, equal places of all rows fall into the same set of the
level 1 cache. The set has only eight to twelve ways: rows evict each other, and the product takes a tenth longer
(benchmarks/RESULTS.md, "Vectors of texts"). Results stay the same, because the new columns of W2 are 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.marks import ROLE, extent

from .products import Linear, derived, is_vector, late_initializer, linears

SET_SPAN = 1024
"""Floats after which addresses fall into the same set of the level 1 cache again: 4096 bytes, on x86 and ARM."""
LINE = 16
"""Floats in a cache line."""
LENGTHENED = "longer_rows"
"""Suffix of a padded parameter, e.g. NAME.longer_rows: zeros follow its last row, number or column."""
ACTIVATIONS = ("Relu", "Gelu", "Sigmoid", "Tanh", "Mul")
"""Elementwise operators that are finite at 0."""


def lengthen_rows(model: ir.Model) -> None:
    """Pad the feed-forward networks of a graph of Gemms, before its weights are filled."""
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
    """The values between `down` and the products before it, the results of those products included.

    None if another node reads one of these values, or if one comes from neither a product nor one of `ACTIVATIONS`.
    """
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
    """The parameter with `LINE` zeros added at the end of an axis, as an initializer."""
    shape = [extent(parameter, i) for i in range(len(parameter.shape or ()))]
    behind = [(0, LINE if i == axis else 0) for i in range(len(shape))]

    def make(array: NDArray) -> list[NDArray]:
        return [np.pad(array, behind)]

    late, longer = derived(parameter, make, LENGTHENED), [n + more for n, (_, more) in zip(shape, behind, strict=True)]
    value = late_initializer(f"{parameter.name}.{LENGTHENED}", late, 0, longer, ir.DataType.FLOAT)
    value.meta[ROLE] = parameter.meta.get(ROLE)
    return Nodes(model, str(parameter.name)).initializer(value)


def without_zeros(tensors: Mapping[str, NDArray], names: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray]:
    """The tensors without their padding, parameters under their own names. `names`: {parameter: shape}.

    A tensor whose padding isn't all zero keeps it, so that a comparison of shapes finds the fault.
    """
    own_shapes = {}
    for tensor, array in tensors.items():
        name, _, kind = tensor.rpartition(".")
        if kind == LENGTHENED and name in names:
            own = array[tuple(slice(n) for n in names[name])]
            tensor, array = name, own if np.count_nonzero(array) == np.count_nonzero(own) else array
        own_shapes[tensor] = array
    return own_shapes
