"""The integers of a checkpoint quantised by MLX in ONNX Runtime's block operators: weights stay packed in memory too.

    MatMul(x, W^T)     MatMulNBits(x, B (O, G, b * bits / 8), scales (O, G), zero points)
    Gather(W, ids)     GatherBlockQuantized(B (V, D * bits / 8), ids, scales (V, G), zero points)

w = scale * (q - zero) there, and scale * q + bias in MLX: the same numbers, up to the rounding of one sum, if
zero = -bias / scale is a whole number that q's type can hold. MLX chooses its scales so, unless it computed them in a
lower precision or a group's weights are all far from zero; a matrix with such a group keeps its exact form
(`mlx_integers.py`), as does one that is read otherwise. Integers of 3 bits are stored as 4, those of 5 and 6 as 8.

Shapes: O rows, D columns, G groups of b columns in a row, V entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.marks import extent
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.quantization import Packed
from mlx_transformer.system.errors import UserError

from .adapters import added_each_pass
from .late_weights import LateWeight, late_initializer
from .products import Linear, Lookup, linears, lookups, put_product
from .table import ACTIVATIONS, DEFAULT_ACTIVATIONS, PRECISIONS

CONTRIB = "com.microsoft"
HELD_IN = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
"""Bits of a stored value: the operators know three kinds."""
TOLERANCE = 2.0**-21
"""A share of the biases: float32's rounding and a little more."""


def check_integers(checkpoint: Checkpoint, precisions: Sequence[str]) -> None:
    """Raise `UserError` for precisions that a checkpoint's matrices, quantised or not, can't be exported in."""
    folder, quantized = checkpoint.folder, checkpoint.quantization
    if again := [name for name in precisions if PRECISIONS[name].rounds_blocks and quantized]:
        raise UserError(f"{folder}: is quantised; {again[0]} would round again: packed keeps its integers")
    if halves := [n for n in precisions if PRECISIONS[n].form == "floats" and PRECISIONS[n].bits == 16 and quantized]:
        raise UserError(f"{folder}: is quantised; {halves[0]} takes more room than its integers: float32 or packed")
    if "packed" in precisions and not quantized:
        raise UserError(f"{folder}: isn't quantised; packed is for what mlx-transformer quantize writes")
    if "packed" in precisions and all(zero_points(checkpoint.packed(name)) is None for name in quantized):
        raise UserError(f"{folder}: no matrix has whole zero points: export it in float32, which is as small")


def use_packed_operators(model: ir.Model, checkpoint: Checkpoint, activations: str = DEFAULT_ACTIVATIONS) -> None:
    """Change a built graph, before its weights are filled, for the quantised matrices whose zero points are whole.

    `activations`: of `table.ACTIVATIONS`; in float32 the products are slower than of a float32 matrix in every size.
    """
    known: dict[str, bool] = {}

    def fits(weight: ir.Value) -> bool:
        name = str(weight.name)
        if name not in known:
            is_quantised = name in checkpoint.quantization and weight is model.graph.initializers.get(name)
            known[name] = is_quantised and zero_points(checkpoint.packed(name)) is not None
        return known[name]

    for lookup in lookups(model):
        if fits(lookup.table):
            _look_up(model, lookup, checkpoint)
    for linear in linears(model):
        if linear.rows and fits(linear.weight):
            _multiply(model, linear, checkpoint, activations)
    RemoveUnusedNodesPass()(model)


def zero_points(packed: Packed) -> NDArray[np.uint8] | None:
    """Return (O, G), so that scale * (q - zero) = scale * q + bias; None if a group has none."""
    scales, biases = packed.scales.astype(np.float64), packed.biases.astype(np.float64)
    zero = np.rint(np.divide(-biases, scales, out=np.zeros_like(biases), where=scales != 0))
    exact = np.abs(scales * zero + biases) <= TOLERANCE * np.abs(biases)
    fitting = (zero >= 0) & (zero < 2 ** HELD_IN[packed.scheme.bits])
    return zero.astype(np.uint8) if (exact & fitting).all() else None


def _multiply(model: ir.Model, linear: Linear, checkpoint: Checkpoint, activations: str) -> None:
    add = Nodes(model, linear.node)
    rows, width = extent(linear.weight, 0), extent(linear.weight, 1)
    scheme = checkpoint.quantization[str(linear.weight.name)]
    bits, groups = HELD_IN[scheme.bits], width // scheme.group_size
    blocks = _stored(add, linear.weight, checkpoint, "blocks", (rows, groups, scheme.group_size * bits // 8))
    options = {"K": width, "N": rows, "bits": bits, "block_size": scheme.group_size}
    options["accuracy_level"] = ACTIVATIONS[activations]
    y = add("MatMulNBits", linear.x, *blocks, domain=CONTRIB, **options)
    put_product(add, linear, added_each_pass(add, linear, y, checkpoint))


def _look_up(model: ir.Model, lookup: Lookup, checkpoint: Checkpoint) -> None:
    add = Nodes(model, lookup.node)
    rows, width = extent(lookup.table, 0), extent(lookup.table, 1)
    scheme = checkpoint.quantization[str(lookup.table.name)]
    bits = HELD_IN[scheme.bits]
    data, *numbers = _stored(add, lookup.table, checkpoint, "rows", (rows, width * bits // 8))
    options = {"bits": bits, "block_size": scheme.group_size, "gather_axis": 0, "quantize_axis": 1}
    add.replace(add("GatherBlockQuantized", data, lookup.ids, *numbers, domain=CONTRIB, **options))


def _stored(add: Nodes, weight: ir.Value, checkpoint: Checkpoint, kind: str, shape: tuple[int, ...]) -> list[ir.Value]:
    """Return integers, scales and zero points as initializers; `kind` names the integers' shape, in the file they are
    once."""
    name = str(weight.name)
    scheme = checkpoint.quantization[name]
    late = LateWeight((), lambda: blocks(checkpoint.packed(name)), f"{name}.blocks")
    rows, groups = extent(weight, 0), extent(weight, 1) // scheme.group_size
    zeros = -(-groups * HELD_IN[scheme.bits] // 8)
    made = [
        late_initializer(f"{name}.{kind}", late, 0, shape, ir.DataType.UINT8),
        late_initializer(f"{name}.scales", late, 1, (rows, groups), ir.DataType.FLOAT),
        late_initializer(f"{name}.zeros", late, 2, (rows, zeros), ir.DataType.UINT8),
    ]
    return [add.initializer(value) for value in made]


def blocks(packed: Packed) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Return bytes (O, D * bits / 8), the first value in the lowest bits, scales (O, G) and zero points packed
    likewise."""
    zero = zero_points(packed)
    assert zero is not None
    bits = HELD_IN[packed.scheme.bits]
    return in_bytes(packed.integers(), bits), packed.scales, in_bytes(zero, bits)


def in_bytes(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack (O, N) into (O, N * bits / 8, rounded up): neighbours share a byte, the first in its lowest bits."""
    each = 8 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % each))).reshape(len(values), -1, each)
    return np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=2)


def from_bytes(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Undo `in_bytes`: (O, N * 8 / bits)."""
    shifted = packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8)
    return (shifted & np.uint8(2**bits - 1)).reshape(len(packed), -1)
