"""Matrices that MLX has quantised go into the graphs as the integers that they are; nothing is quantised again.

A parameter that the checkpoint stores as integers with a scale and a bias a group (`core/quantization.py`) is replaced
by operations whose result has its name, standard ones of opset 20: any runtime computes, bit for bit, `mx.dequantize`.

    NAME.q4 (O, 1, D/2) uint8 --> shift, mask --> Reshape --> Cast --> Mul --> Add --> Reshape --> NAME.weight (O, D)
    NAME.scales (O, G, 1) ----------------------------------------------^       ^
    NAME.biases (O, G, 1) ------------------------------------------------------/

The file holds every value in its own number of bits, 3, 5 and 6 as the sum of two powers of two. ONNX Runtime folds the
operations when it loads a graph: from then on it is a float32 model. (A blocked DequantizeLinear, scale * (q - zero),
rounds differently: that isn't the same matrix.)

Shapes: O rows, D columns, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.convenience import replace_all_uses_with

from export.graph.edit import Nodes
from export.nn.marks import extent
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.quantization import Scheme

from .adapters import merged_on_load
from .late_weights import LateWeight, late_initializer

PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""How many bits of each value the stored parts hold: a byte must be a whole number of them."""


def unpack_on_load(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Change a built graph, before its weights are filled, for the quantised matrices of `checkpoint`."""
    for value in list(model.graph.initializers.values()):
        name = str(value.name)
        if name in checkpoint.quantization:
            _replace(model, value, name, checkpoint.quantization[name], checkpoint)


def _replace(model: ir.Model, parameter: ir.Value, name: str, scheme: Scheme, checkpoint: Checkpoint) -> None:
    """Compute the parameter of this name from its integers."""
    del model.graph.initializers[name]
    rows, width = extent(parameter, 0), extent(parameter, 1)
    groups = width // scheme.group_size
    path = name.removesuffix(".weight")
    parts = PARTS[scheme.bits]

    def stored() -> Sequence[NDArray]:
        packed = checkpoint.packed(name)
        return *planes(packed.integers(), parts), packed.scales, packed.biases

    inputs = {f"{path}.q{bits}": ((rows, 1, width * bits // 8), ir.DataType.UINT8) for bits in parts}
    inputs |= {f"{path}.{part}": ((rows, groups, 1), ir.DataType.FLOAT) for part in ("scales", "biases")}
    late = LateWeight((), stored, f"{path}.packed")
    add = Nodes(model, name, "quantised", output="/output", numbered=True)
    values = [add.initializer(late_initializer(key, late, i, *kind)) for i, (key, kind) in enumerate(inputs.items())]
    *packed, scales, biases = values

    grouped = add.constant([rows, groups, scheme.group_size])
    q = add("Reshape", _unpacked(add, packed[0], parts[0]), grouped)
    if len(parts) > 1:
        high = add("Reshape", _unpacked(add, packed[1], parts[1]), grouped)
        shift = add.constant(np.uint8(parts[0]))
        q = add("BitwiseOr", q, add("BitShift", high, shift, direction="LEFT"))
    w = add("Add", add("Mul", add("Cast", q, to=ir.DataType.FLOAT), scales), biases)
    w = add("Reshape", w, add.constant([rows, width]))
    w = merged_on_load(add, w, path, checkpoint, name)
    w.name, w.shape, w.type = name, parameter.shape, parameter.type
    replace_all_uses_with(parameter, w)
    add.at_start()


def planes(q: NDArray[np.uint8], parts: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Split integers (O, D) into parts of their bits, the lowest first: (O, 1, D * part / 8) bytes each.

    Byte i of a row of width W has values i, i + W, i + 2 W, ..., the first in its lowest bits: unpacked by operations
    on whole rows, which runtimes do fast.
    """
    stored_parts, shift = [], 0
    for bits in parts:
        part = (q >> shift & (2**bits - 1)).reshape(len(q), 8 // bits, -1)
        places = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        stored_parts.append(np.bitwise_or.reduce(part << places, axis=1, keepdims=True))
        shift += bits
    return stored_parts


def _unpacked(add: Nodes, packed: ir.Value, bits: int) -> ir.Value:
    """Add what undoes it: bytes (O, 1, W) -> (O, 8 / bits, W), a value a byte, in the order of the row."""
    if bits == 8:
        return packed
    places = add.constant(np.arange(0, 8, bits, dtype=np.uint8)[:, None])
    shifted = add("BitShift", packed, places, direction="RIGHT")
    return add("BitwiseAnd", shifted, add.constant(np.uint8(2**bits - 1)))
