"""Activations as integers of 8 bits, what a product of integers reads: with a scale a row, or with a fixed one.

    x --> Abs --> ReduceMax --> m --> Max(least)
    |                                    |
    +---------------------------------> Div --> QuantizeLinear(1 / 127) --> q (by_row)

    x --> Abs --> ReduceMax --> m --> Mul(1 / 127)
    |                                    |
    +---------------------------> QuantizeLinear --> q (in_rows)

    x --> QuantizeLinear(1 / a) [--> Clip] --> q (fixed_steps)

m is a row's largest magnitude: x / m is rounded to 127 steps on either side of zero (uint8, zero point 128), after a
Relu to 255 on one (zero point 0). Behind a Gelu nothing is less than -0.17: m is the row's largest number there, 0.17
at least, and there is no Abs.

Shapes: N rows, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.edit import Nodes
from export.nn.marks import extent
from mlx_transformer.core.int8_scales import SYMMETRIC, UNSIGNED, ProductScales

from .products import Linear, least_of
from .table import BLOCKS_IR_VERSION, BLOCKS_OPSET

LEAST = 1e-30
"""m of a row of zeros."""
ROUNDED = 127
"""Steps of the largest magnitude, on either side of zero."""
ZERO = 128
"""The zero point of activations of both signs."""
LAYERS = ".layers."
"""Follows the name of a stack in that of a weight: all layers of a stack have the same rows."""


@dataclass(frozen=True)
class Activations:
    """Activations as integers: x ~ (q - zero) * unit / steps."""

    q: ir.Value
    """(..., D) uint8"""
    zero: ir.Value
    unit: ir.Value
    """(..., 1), or a scalar where it is fixed."""
    steps: int = 1


def by_row(add: Nodes, x: ir.Value) -> Activations:
    """Quantise x (..., D) by the largest magnitude of each row."""
    zero, steps, largest = _largest(add, x, LEAST)
    unit, zero = add.constant(np.float32(1 / steps)), add.constant(np.uint8(zero))
    return Activations(add("QuantizeLinear", add("Div", x, largest), unit, zero), zero, largest, steps)


def in_rows(add: Nodes, linear: Linear, zeros: dict[str, ir.Value]) -> Activations:
    """Quantise the x (N, D) of a product likewise, with a row for each token of a batch. zeros: the zero points (N, 1)
    of each stack's rows, made where they aren't there.

    Each row is a block of its own. QuantizeLinear takes a scale a row as that of an axis too, but then asks its threads
    row by row. A row of zeros has 0 / 0 here, which becomes some integer, and that times m is 0. With D of several
    hundred, all of a model takes a twenty-fifth less time than with Div, or Reciprocal and Mul, in front.
    """
    graph, width = add.model.graph, extent(linear.weight, 1 if linear.rows else 0)
    graph.opset_imports[""] = max(BLOCKS_OPSET, graph.opset_imports[""])
    add.model.ir_version = max(BLOCKS_IR_VERSION, add.model.ir_version)
    zero, steps, largest = _largest(add, linear.x)
    name, of_layer, _ = str(linear.weight.name).partition(LAYERS)
    if zero and (name not in zeros or not of_layer):
        value = ir.tensor(np.array([zero], np.uint8))
        zeros[name] = add("ConstantOfShape", add("Shape", largest), value=value)
    scale = add("Mul", largest, add.constant(np.float32(1 / steps)))
    q = add("QuantizeLinear", linear.x, scale, zeros[name] if zero else None, axis=-1, block_size=width)
    return Activations(q, add.constant(np.uint8(zero)), largest, steps)


def _largest(add: Nodes, x: ir.Value, least: float = 0.0) -> tuple[int, int, ir.Value]:
    """Return the zero point of x (..., D), the steps on each side of it, and the largest magnitudes (..., 1), at least
    `least`."""
    below = least_of(x)
    zero, steps = (0, UNSIGNED) if below == 0 else (ZERO, ROUNDED)
    largest = add("ReduceMax", add("Abs", x) if below is None else x, add.constant([-1]), keepdims=1)
    least = max(least, below or 0.0)
    return zero, steps, add("Max", largest, add.constant(np.float32(least))) if least else largest


def fixed_steps(add: Nodes, x: ir.Value, fixed: ProductScales) -> Activations:
    """Quantise x (..., D) as `fixed` says."""
    zero, unit = add.constant(np.uint8(zero_point(fixed))), add.constant(unit_of(fixed))
    q = add("QuantizeLinear", x, unit, zero)
    if fixed.steps == SYMMETRIC:  # as bytes, a quarter of the memory
        q = add("Clip", q, add.constant(np.uint8(ZERO - SYMMETRIC)))
    return Activations(q, zero, unit)


def zero_point(fixed: ProductScales) -> int:
    """Return the integer that stands for 0."""
    return 0 if fixed.steps == UNSIGNED else ZERO


def unit_of(fixed: ProductScales) -> np.float32:
    """Return what QuantizeLinear divides by, 1/a."""
    assert fixed.activation is not None
    return np.float32(1) / fixed.activation
