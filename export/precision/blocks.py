"""int8-weights and int4: weights in blocks of a row, 4 or 8 bits, one scale per block.

    portable      W (D, O) --> DequantizeLinear(block_size, axis 0) --> MatMul      opset 21; ONNX Runtime fuses the two
    cpu, web      MatMulNBits(x, W, scales)                                         ONNX Runtime's own operator

The activations are float32 or rounded to int8 (`table.ACTIVATIONS`). MatMulNBits has an attribute for it. If ONNX
Runtime fuses the standard operators to a MatMulNBits, a session option decides, which `runtime/sessions.py` sets. A
program that opens the file with ONNX Runtime and without this option rounds the activations to int8.

8-bit weights with float32 activations are unpacked, in every target. ONNX Runtime has a fast product with float32 for
4-bit blocks, but not for 8-bit blocks (10 to 17 times as long for one sentence). It unpacks the weights once, when it
loads the graph. From then on they are float32 weights, in speed and in memory.

    rows      q int8  (O, D)    --> Cast ------------> Mul scale (O, 1) -----------------------> Transpose --> W (D, O)
    blocks    q uint8 (O, G, b) --> Cast --> Sub 128 --> Mul scale (O, G, 1) --> Reshape [Slice] --> Transpose --> W
    either    MatMul(x, W) [--> Add] --> y

Embeddings and the classifier always have 8 bits: with 4, a few rare words lose their meaning. They are stored as in
`int8.py`, except in target web, where GatherBlockQuantized and MatMulNBits read the same bytes.

Shapes: D width in, O width out, V entries of a table, G blocks of a row, b values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.nn.marks import extent

from .int8 import CONTRIB, join_blocks, look_up_blocks, stored_blocks, to_int8, unpack_blocks, unpack_rows
from .products import Linear, derived, late_initializer, linears, lookups, put_product
from .rounding import BLOCK, block_rows, packed
from .table import ACTIVATIONS, STANDARD, UNPACKED

Unpack = Callable[[Nodes, Linear], ir.Value]
"""Adds nodes that compute the weight (O, D) in float32 from the stored integers."""


def weight_only(
    model: ir.Model, bits: int, activations: str, operators: str, *, fused: bool, blocks_in_tables: bool
) -> None:
    """Change a built graph, before its weights are filled. `bits`: of weights other than tables, which have 8.

    `operators`: read the blocks (`table.blocks_operators`). `blocks_in_tables`: tables are in blocks too; otherwise
    they are stored as in `int8.py`, and `fused` uses ONNX Runtime's own operator for their products.
    """
    products = linears(model)
    others = [linear for linear in products if not linear.is_table]
    _change_tables(model, [linear for linear in products if linear.is_table], activations, fused, blocks_in_tables)
    if operators == UNPACKED:
        _multiply_unpacked(model, others, _unpack)
    else:
        for linear in others:
            if operators == STANDARD:
                _dequantize(model, linear, bits)
            else:
                _matmul_n_bits(model, linear, bits, activations)
    RemoveUnusedNodesPass()(model)


def _change_tables(
    model: ir.Model, products: Sequence[Linear], activations: str, fused: bool, blocks_in_tables: bool
) -> None:
    """Change tables to 8 bits.

    A table is stored once, whether it is looked up, multiplied or both. It is in blocks if `blocks_in_tables` and its
    width is a multiple of `BLOCK`, since GatherBlockQuantized reads only whole blocks; else it is in rows.
    """

    def in_blocks(width: int) -> bool:
        return blocks_in_tables and width % BLOCK == 0

    looked_up = lookups(model)
    for lookup in looked_up:
        if in_blocks(extent(lookup.table, 1)):
            look_up_blocks(Nodes(model, lookup.node), lookup)
    rows_looked_up = [lookup for lookup in looked_up if not in_blocks(extent(lookup.table, 1))]
    blocks = [linear for linear in products if in_blocks(_sizes(linear)[1])]
    rows = [linear for linear in products if not in_blocks(_sizes(linear)[1])]
    if activations == "float32":
        to_int8(model, [], rows_looked_up, fused)
        _multiply_unpacked(model, rows, unpack_rows)
        _multiply_unpacked(model, blocks, _unpack)
    else:
        to_int8(model, rows, rows_looked_up, fused)
        for linear in blocks:
            _matmul_n_bits(model, linear, 8, activations)


def _multiply_unpacked(model: ir.Model, products: Sequence[Linear], unpack: Unpack) -> None:
    """Replace these products by products with unpacked weights; each weight is unpacked once."""
    unpacked: dict[str, ir.Value] = {}
    for linear in products:
        name = str(linear.weight.name)
        if name not in unpacked:
            on_load = Nodes(model, name, "unpacked", output="")
            unpacked[name] = on_load("Transpose", unpack(on_load, linear), perm=[1, 0])
            on_load.at_start()
        add = Nodes(model, linear.node)
        put_product(add, linear, add("MatMul", linear.x, unpacked[name]))


def _matmul_n_bits(model: ir.Model, linear: Linear, bits: int, activations: str) -> None:
    out, width = _sizes(linear)
    add = Nodes(model, linear.node)
    q, scale = stored_blocks(add, linear.weight, linear.rows, bits)
    sizes = {"K": width, "N": out, "bits": bits, "block_size": BLOCK, "accuracy_level": ACTIVATIONS[activations]}
    put_product(add, linear, add("MatMulNBits", linear.x, q, scale, domain=CONTRIB, **sizes))


def _unpack(add: Nodes, linear: Linear) -> ir.Value:
    """A weight (O, D) in float32, computed from 8-bit blocks."""
    out, width = _sizes(linear)
    rows = unpack_blocks(add, *stored_blocks(add, linear.weight, linear.rows, 8), axis=2)
    return join_blocks(add, rows, add.constant([out, -1]), width, axis=1)


def _dequantize(model: ir.Model, linear: Linear, bits: int) -> None:
    out, width = _sizes(linear)
    groups = -(-width // BLOCK)

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = block_rows(w if linear.rows else w.T, bits, BLOCK)
        signed = (q.reshape(out, -1)[:, :width] ^ np.uint8(1 << (bits - 1))).T & np.uint8((1 << bits) - 1)
        return packed(np.ascontiguousarray(signed), bits), np.ascontiguousarray(scale.T)

    late = derived(linear.weight, make, f"columns{bits}")
    name = f"{linear.weight.name}.int{bits}_blocks"
    kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
    add = Nodes(model, linear.node)
    q = add.initializer(late_initializer(name, late, 0, (width, out), kind))
    scale = add.initializer(late_initializer(f"{name}_scale", late, 1, (groups, out), ir.DataType.FLOAT))
    # ONNX Runtime fuses DequantizeLinear and MatMul. In a branch it would not find the weights, which are outside.
    weight = add.outside("DequantizeLinear", q, scale, axis=0, block_size=BLOCK)
    put_product(add, linear, add("MatMul", linear.x, weight))


def _sizes(linear: Linear) -> tuple[int, int]:
    """(O, D) of the weight."""
    out, width = (extent(linear.weight, axis) for axis in ((0, 1) if linear.rows else (1, 0)))
    return out, width
