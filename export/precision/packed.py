"""Checkpoints quantised by MLX: graphs hold the same integers, and nothing is quantised again.

A checkpoint stores a quantised matrix as integers, with a scale and a bias per group (`core/quantization.py`). A graph
reads them in one of two ways.

`unpack_on_load`, for the precision float32: operations compute the parameter from its integers. They are standard
operators of opset 20, with which any runtime computes `mx.dequantize` bit for bit.

    NAME.q4 (O, 1, D/2) uint8 --> shift, mask --> Reshape --> Cast --> Mul --> Add --> Reshape --> NAME.weight (O, D)
    NAME.scales (O, G, 1) ----------------------------------------------^       ^
    NAME.biases (O, G, 1) ------------------------------------------------------/

Short floats (e.g. mxfp4) are looked up in tables instead: Gather(values, q) * Gather(values, scales). The file stores
each integer in its own number of bits: 3, 5 and 6 bits in two parts, e.g. 6 as 4 + 2.

ONNX Runtime computes the matrices once, when it loads a graph, and then runs a float32 model. Loading takes 23 bytes a
weight, or 9 in `OnnxTransformer`, which computes one matrix at a time beforehand (`runtime/unpacking`). (A blocked
DequantizeLinear, scale * (q - zero), rounds differently and would give another matrix.)

`use_packed_operators`, for the precision packed: ONNX Runtime's block operators, with weights packed in memory, too.

    MatMul(x, W^T)     MatMulNBits(x, B (O, G, b * bits / 8), scales (O, G), zero points)
    Gather(W, ids)     GatherBlockQuantized(B (V, D * bits / 8), ids, scales (V, G), zero points)

They compute w = scale * (q - zero), MLX computes scale * q + bias. Up to the rounding of a sum, the results are equal
if zero = -bias / scale is a whole number in q's range. MLX chooses its scales this way, unless it computed them in a
lower precision or all weights of a group are far from zero. Most of GGUF's types don't. For other zeros, a product
uses the nearest whole number and adds the rest of the bias, times the sum of the group's activations:

    y = MatMulNBits(x, W) + (x S) rest        S (D, G): sums of groups; rest (G, O) = bias + scale * zero

An embedding with such a group is unpacked on load, and so is a matrix that other operations read, too. 3-bit integers
are stored in 4 bits, 5 and 6-bit integers in 8.

If the checkpoint has an adapter (LoRA or DoRA), its trained matrices are added to the integers:

    unpacked on load    W --> Cast --> Add f B A --> [Mul m / norm] --> Cast --> NAME.weight    in float64, rounded once
    block operators     y = MatMulNBits(x, W) + (x A^T) (f B)^T   [times m / norm]

The first gives the merged matrix, once, when a runtime loads the graph; the second is computed in every pass. Brackets
show DoRA's part; the norms are computed when the graph is written.

Shapes: O rows, D columns, G groups of b columns in a row, V rows of an embedding; adapter: R rank, A (R, D), B (O, R),
m / norm (O,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.convenience import replace_all_uses_with
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.marks import extent
from mlx_transformer.core.adapter import WeightDelta
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.quantization import Packed, Scheme
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import some_rows

from .products import LateWeight, Linear, Lookup, late_initializer, linears, lookups, put_product
from .table import ACTIVATIONS, DEFAULT_ACTIVATIONS, PRECISIONS

A, B, GAIN = "lora_a", "lora_b", "gain"


def delta_of(checkpoint: Checkpoint, name: str) -> WeightDelta | None:
    """The adapter's change of a quantised parameter; None without one."""
    quantised = checkpoint.adapter is not None and name in checkpoint.quantization
    return checkpoint.adapter.delta(name) if quantised and checkpoint.adapter is not None else None


def merged_on_load(add: Nodes, w: ir.Value, path: str, checkpoint: Checkpoint, name: str) -> ir.Value:
    """Add nodes that merge the adapter's change of parameter `name`, if any, into its float32 matrix w (O, D)."""
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
    """Add nodes for the adapter's branch, if any, to a product y (..., O) with a matrix's integers."""
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
    """The initializers of an adapter's branch: A^T (D, R), f B^T (R, O), for DoRA m / norm (O,).

    Each is rounded to float32 once.
    """
    gain = delta.gain(weight)
    arrays = [delta.a.T, delta.factor * delta.b.astype(np.float64).T, *([] if gain is None else [gain])]
    return [np.ascontiguousarray(array, np.float32) for array in arrays]


def merged(name: str, weight: NDArray, stored: Mapping[str, Any]) -> NDArray[np.float32]:
    """The weight (O, D) merged with its adapter's branch, if `stored` has the branch, e.g. NAME.lora_a."""
    if f"{name}.{A}" not in stored:
        return weight
    a, b = (stored[f"{name}.{kind}"].astype(np.float64) for kind in (A, B))
    gain = stored.get(f"{name}.{GAIN}", np.ones(1)).astype(np.float64)
    return (gain[:, None] * (weight + b.T @ a.T)).astype(np.float32)


CONTRIB = "com.microsoft"
HELD_IN = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
"""{bits of an integer: bits it is stored in}; the operators read only 2, 4 and 8."""
TOLERANCE = 2.0**-21
"""Largest error of a zero point, relative to the bias: a little more than float32's rounding."""


def check_integers(checkpoint: Checkpoint, precisions: Sequence[str]) -> None:
    """Raise `UserError` if a precision doesn't fit the checkpoint, e.g. int8 for a quantised checkpoint."""
    folder, quantized = checkpoint.folder, checkpoint.quantization
    if again := [name for name in precisions if PRECISIONS[name].rounds_blocks and quantized]:
        raise UserError(f"{folder}: is quantised, and {again[0]} would round it again: choose packed")
    if halves := [n for n in precisions if PRECISIONS[n].form == "floats" and PRECISIONS[n].bits == 16 and quantized]:
        raise UserError(f"{folder}: is quantised, and {halves[0]} would be larger: choose float32 or packed")
    if "packed" in precisions and not quantized:
        raise UserError(f"{folder}: isn't quantised: run mlx-transformer quantize before packed")
    if "packed" in precisions and all(nearest_zeros(checkpoint.packed(name)) is None for name in quantized):
        raise UserError(f"{folder}: packed has no short floats: choose float32, whose file is as small")


def use_packed_operators(model: ir.Model, checkpoint: Checkpoint, activations: str = DEFAULT_ACTIVATIONS) -> None:
    """Use block operators in a built graph without weights: for quantised matrices, and for embeddings if all their
    zero points are whole.

    activations: "int8" or "float32", in products. With float32, a product is slower than with a float32 matrix.
    """
    known: dict[str, Rest] = {}
    sums: dict[tuple[ir.Graph | None, ir.Value, int], ir.Value] = {}

    def rest_of(weight: ir.Value) -> Rest:
        name = str(weight.name)
        if name not in known:
            is_quantised = name in checkpoint.quantization and weight is model.graph.initializers.get(name)
            zero = nearest_zeros(checkpoint.packed(name)) if is_quantised else None
            known[name] = "unpacked" if zero is None else "none" if zero[1] is None else "added"
        return known[name]

    looked_up = lookups(model)
    for lookup in looked_up:
        if rest_of(lookup.table) == "none":
            _look_up(model, lookup, checkpoint)
    tables = {lookup.table.name for lookup in looked_up}
    for linear in linears(model):
        rest = rest_of(linear.weight)
        if linear.rows and (rest == "none" or (rest == "added" and linear.weight.name not in tables)):
            _multiply(model, linear, checkpoint, activations, sums if rest == "added" else None)
    RemoveUnusedNodesPass()(model)


Rest = Literal["unpacked", "none", "added"]
"""What whole zero points leave of a matrix's biases: "none", or a rest that is "added" to the product. "unpacked":
block operators can't read the matrix."""
REST, SUMS = "rest", "sums_of"
"""Suffix of the rest's name, and prefix of the name of the matrix that sums groups."""


def nearest_zeros(packed: Packed) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None] | None:
    """(zero points (O, G), rest (O, G)) with scale * (q - zero) + rest = scale * q + bias; None for short floats.

    rest: None if every group's zero point is whole.
    """
    if packed.biases is None:
        return None
    scales, biases = packed.scales.astype(np.float64), packed.biases.astype(np.float64)
    nearest = np.rint(np.divide(-biases, scales, out=np.zeros_like(biases), where=scales != 0))
    zero = np.clip(nearest, 0, 2 ** HELD_IN[packed.scheme.bits] - 1)
    rest = scales * zero + biases
    whole = (np.abs(rest) <= TOLERANCE * np.abs(biases)).all()
    return zero.astype(np.uint8), None if whole else rest.astype(np.float32)


def _multiply(
    model: ir.Model,
    linear: Linear,
    checkpoint: Checkpoint,
    activations: str,
    sums: dict[tuple[ir.Graph | None, ir.Value, int], ir.Value] | None,
) -> None:
    """Replace a product by MatMulNBits. sums: {(graph, x, G): sums of x's groups (..., G)}, shared by products with the
    same x; None if the matrix has no rest."""
    add = Nodes(model, linear.node)
    rows, width = extent(linear.weight, 0), extent(linear.weight, 1)
    scheme = checkpoint.quantization[str(linear.weight.name)]
    bits, groups = HELD_IN[scheme.bits], width // scheme.group_size
    blocks = _stored(add, linear.weight, checkpoint, "blocks", (rows, groups, scheme.group_size * bits // 8))
    options = {"K": width, "N": rows, "bits": bits, "block_size": scheme.group_size}
    options["accuracy_level"] = ACTIVATIONS[activations]
    if sums is not None:
        name = f"{linear.weight.name}.{REST}"
        late = LateWeight((), lambda: _rest(checkpoint.packed(str(linear.weight.name))), name)
        rest = add.initializer(late_initializer(name, late, 0, (groups, rows), ir.DataType.FLOAT))
        if (key := (linear.node.graph, linear.x, groups)) not in sums:
            sums[key] = add("MatMul", linear.x, _sums(add, width, groups))
            add.before()
        added = add("MatMul", sums[key], rest)
    y = add("MatMulNBits", linear.x, *blocks, domain=CONTRIB, **options)
    y = y if sums is None else add("Add", y, added)
    put_product(add, linear, added_each_pass(add, linear, y, checkpoint))


def _sums(add: Nodes, width: int, groups: int) -> ir.Value:
    """The matrix (D, G) that sums the groups of a row."""
    ones = np.repeat(np.eye(groups, dtype=np.float32), width // groups, axis=0)
    tensor = ir.tensor(ones, name=f"{SUMS}.{width}.{groups}")
    value = ir.Value(name=tensor.name, shape=ir.Shape(ones.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return add.initializer(value)


def _rest(packed: Packed) -> list[NDArray[np.float32]]:
    zero = nearest_zeros(packed)
    assert zero is not None
    assert zero[1] is not None
    return [np.ascontiguousarray(zero[1].T)]


def _look_up(model: ir.Model, lookup: Lookup, checkpoint: Checkpoint) -> None:
    add = Nodes(model, lookup.node)
    rows, width = extent(lookup.table, 0), extent(lookup.table, 1)
    scheme = checkpoint.quantization[str(lookup.table.name)]
    bits = HELD_IN[scheme.bits]
    data, *numbers = _stored(add, lookup.table, checkpoint, "rows", (rows, width * bits // 8))
    options = {"bits": bits, "block_size": scheme.group_size, "gather_axis": 0, "quantize_axis": 1}
    add.replace(add("GatherBlockQuantized", data, lookup.ids, *numbers, domain=CONTRIB, **options))


def _stored(add: Nodes, weight: ir.Value, checkpoint: Checkpoint, kind: str, shape: tuple[int, ...]) -> list[ir.Value]:
    """Integers, scales and zero points of a matrix as initializers.

    kind: "blocks" for a product, "rows" for a lookup; they differ in shape, and the file stores their bytes once.
    """
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
    """A matrix in the operators' form: bytes (O, D * bits / 8), scales (O, G), bytes of zero points (O, G * bits /
    8)."""
    zero = nearest_zeros(packed)
    assert zero is not None
    bits, (count, width) = HELD_IN[packed.scheme.bits], packed.shape
    octets = np.empty((count, -(-width * bits // 8)), np.uint8)
    for rows in some_rows(packed.shape):
        octets[rows] = in_bytes(packed[rows].integers(), bits)
    return octets, packed.scales, in_bytes(zero[0], bits)


def in_bytes(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack (O, N) into bytes (O, N * bits / 8, rounded up). Neighbours share a byte, the first in the lowest bits.

    >>> in_bytes(np.array([[1, 2, 3]], np.uint8), 4)
    array([[33,  3]], dtype=uint8)
    """
    each = 8 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % each))).reshape(len(values), -1, each)
    return np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=2)


def from_bytes(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Undo `in_bytes`: bytes (O, N) -> values (O, N * 8 / bits)."""
    shifted = packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8)
    return (shifted & np.uint8(2**bits - 1)).reshape(len(packed), -1)


PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""{bits of an integer: bits of its stored parts}, the lowest bits first. Each number divides 8, so parts fill bytes."""


def unpack_on_load(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Add nodes that compute the quantised parameters from their integers, to a built graph without weights."""
    for value in list(model.graph.initializers.values()):
        name = str(value.name)
        if name in checkpoint.quantization:
            _replace(model, value, name, checkpoint.quantization[name], checkpoint)


def _replace(model: ir.Model, parameter: ir.Value, name: str, scheme: Scheme, checkpoint: Checkpoint) -> None:
    del model.graph.initializers[name]
    rows, width = extent(parameter, 0), extent(parameter, 1)
    groups = width // scheme.group_size
    path = name.removesuffix(".weight")
    parts = PARTS[scheme.bits]

    def stored() -> Sequence[NDArray]:
        packed = checkpoint.packed(name)
        numbers = scheme.levels if packed.biases is None else (packed.biases,)
        return *planes(packed.integers(), parts), packed.scales, *map(np.nan_to_num, numbers)

    inputs = {f"{path}.q{bits}": ((rows, 1, width * bits // 8), ir.DataType.UINT8) for bits in parts}
    grid, codes = (rows, groups, 1), (2**scheme.bits, 256)
    if scheme.affine:
        inputs |= {f"{path}.{part}": (grid, ir.DataType.FLOAT) for part in ("scales", "biases")}
    else:
        inputs[f"{path}.scales"] = grid, ir.DataType.UINT8
        inputs |= {f"{path}.levels{i}": ((count,), ir.DataType.FLOAT) for i, count in enumerate(codes)}
    late = LateWeight((), stored, f"{path}.packed")
    add = Nodes(model, name, "quantised", output="/output", numbered=True)
    values = [add.initializer(late_initializer(key, late, i, *kind)) for i, (key, kind) in enumerate(inputs.items())]
    packed, (scales, *numbers) = values[: len(parts)], values[len(parts) :]

    grouped = add.constant([rows, groups, scheme.group_size])
    q = add("Reshape", _unpacked(add, packed[0], parts[0]), grouped)
    if len(parts) > 1:
        high = add("Reshape", _unpacked(add, packed[1], parts[1]), grouped)
        shift = add.constant(np.uint8(parts[0]))
        q = add("BitwiseOr", q, add("BitShift", high, shift, direction="LEFT"))
    if scheme.affine:
        w = add("Add", add("Mul", add("Cast", q, to=ir.DataType.FLOAT), scales), numbers[0])
    else:
        q, scales = (
            add("Gather", level, add("Cast", codes, to=ir.DataType.INT32))
            for level, codes in zip(numbers, (q, scales), strict=True)
        )
        w = add("Mul", q, scales)
    w = add("Reshape", w, add.constant([rows, width]))
    w = merged_on_load(add, w, path, checkpoint, name)
    w.name, w.shape, w.type = name, parameter.shape, parameter.type
    replace_all_uses_with(parameter, w)
    add.at_start()


def planes(q: NDArray[np.uint8], parts: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Split integers (O, D) into parts of their bits, the lowest first: (O, 1, D * part / 8) bytes per part.

    Byte i of a row of W bytes holds the values i, i + W, i + 2 W, ..., the first in its lowest bits. Runtimes unpack
    this order fast, by operations on whole rows.
    """
    stored_parts, shift = [], 0
    for bits in parts:
        part = (q >> shift & (2**bits - 1)).reshape(len(q), 8 // bits, -1)
        places = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        stored_parts.append(np.bitwise_or.reduce(part << places, axis=1, keepdims=True))
        shift += bits
    return stored_parts


def _unpacked(add: Nodes, packed: ir.Value, bits: int) -> ir.Value:
    """Add nodes that unpack a part of `planes`: bytes (O, 1, W) -> values (O, 8 / bits, W), in the row's order."""
    if bits == 8:
        return packed
    places = add.constant(np.arange(0, 8, bits, dtype=np.uint8)[:, None])
    shifted = add("BitShift", packed, places, direction="RIGHT")
    return add("BitwiseAnd", shifted, add.constant(np.uint8(2**bits - 1)))
