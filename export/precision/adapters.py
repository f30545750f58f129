"""An adapter beside the integers of a checkpoint: in graphs too they stay what they are, and what was trained is added.

    unpacked on load    W --> Cast --> Add f B A --> [Mul m / norm] --> Cast --> NAME.weight    in float64, rounded once
    block operators     y = MatMulNBits(x, W) + (x A^T) (f B)^T   [times m / norm]

The first is computed once, when a runtime loads the graph, and gives the merged matrix; the second once a pass. In
brackets what DoRA adds; norms are known when the graph is written.

Shapes: O rows, D columns, R rank; A (R, D), B (O, R), m / norm (O,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph.edit import Nodes
from mlx_transformer.core.adapter import WeightDelta
from mlx_transformer.core.checkpoint import Checkpoint

from .late_weights import LateWeight, late_initializer
from .products import Linear

A, B, GAIN = "lora_a", "lora_b", "gain"


def delta_of(checkpoint: Checkpoint, name: str) -> WeightDelta | None:
    """Return what an adapter adds to the integers of this parameter, or None."""
    quantised = checkpoint.adapter is not None and name in checkpoint.quantization
    return checkpoint.adapter.delta(name) if quantised and checkpoint.adapter is not None else None


def merged_on_load(add: Nodes, w: ir.Value, path: str, checkpoint: Checkpoint, name: str) -> ir.Value:
    """Return `w`, the parameter NAME in float32, with what an adapter adds, if one does."""
    delta = delta_of(checkpoint, name)
    if delta is None:
        return w

    def arrays() -> list[NDArray]:
        gain = delta.gain(checkpoint.packed(name).dequantised())
        parts = [delta.a, delta.b, np.array(delta.factor, np.float64)]
        return parts if gain is None else [*parts, gain[:, None]]

    shapes = {A: delta.a.shape, B: delta.b.shape, "factor": ()}
    shapes |= {GAIN: (len(delta.b), 1)} if delta.magnitude is not None else {}
    late = LateWeight((), arrays, f"{path}.adapter")
    values = []
    for i, (kind, shape) in enumerate(shapes.items()):
        dtype = ir.DataType.FLOAT if kind in (A, B) else ir.DataType.DOUBLE
        values.append(add.initializer(late_initializer(f"{path}.{kind}", late, i, shape, dtype)))
    a, b, factor, *gains = values
    double = ir.DataType.DOUBLE
    product = add("MatMul", add("Cast", b, to=double), add("Cast", a, to=double))
    changed = add("Add", add("Cast", w, to=double), add("Mul", product, factor))
    for gain in gains:
        changed = add("Mul", changed, gain)
    return add("Cast", changed, to=ir.DataType.FLOAT)


def added_each_pass(add: Nodes, linear: Linear, y: ir.Value, checkpoint: Checkpoint) -> ir.Value:
    """Return `y`, the product with a matrix's integers, with what an adapter adds, if one does."""
    name = str(linear.weight.name)
    delta = delta_of(checkpoint, name)
    if delta is None:
        return y
    late = LateWeight((), lambda: branch(delta, checkpoint.packed(name).dequantised()), f"{name}.adapter")
    (rank, width), rows = delta.a.shape, len(delta.b)
    shapes: dict[str, Sequence[int]] = {A: (width, rank), B: (rank, rows)}
    shapes |= {GAIN: (rows,)} if delta.magnitude is not None else {}
    a, b, *gains = (
        add.initializer(late_initializer(f"{name}.{kind}", late, i, shape, ir.DataType.FLOAT))
        for i, (kind, shape) in enumerate(shapes.items())
    )
    y = add("Add", y, add("MatMul", add("MatMul", linear.x, a), b))
    for gain in gains:
        y = add("Mul", y, gain)
    return y


def branch(delta: WeightDelta, weight: NDArray) -> list[NDArray[np.float32]]:
    """Return A^T (D, R), f B^T (R, O) and, in DoRA, m / norm (O,), each rounded to float32 once."""
    gain = delta.gain(weight)
    arrays = [delta.a.T, delta.factor * delta.b.astype(np.float64).T, *([] if gain is None else [gain])]
    return [np.ascontiguousarray(array, np.float32) for array in arrays]


def merged(name: str, weight: NDArray, stored: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the matrix (O, D) that a branch with the initializers of the parameter NAME makes of its weight."""
    if f"{name}.{A}" not in stored:
        return weight
    a, b = (stored[f"{name}.{kind}"].astype(np.float64) for kind in (A, B))
    gain = stored.get(f"{name}.{GAIN}", np.ones(1)).astype(np.float64)
    return (gain[:, None] * (weight + b.T @ a.T)).astype(np.float32)
