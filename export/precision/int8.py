"""int8: signed weights with one scale per output or per matrix; activations with one scale per row or a fixed scale.

    x --> Abs --> ReduceMax --> m --+-------------------------------------------+
    |                               |                                           |
    +----------------------------> Div --> QuantizeLinear --> MatMulInteger --> Cast --> Mul --> Mul --> [Add] --> y
                                              W int8 --------------^     scale(W) / 127 --^

    x --> QuantizeLinear [--> Clip] --> MatMulInteger --> Cast --> Mul --> [Add] --> y
              ^ 1/a                        ^ W int8                 ^ scale(W) / a

A row is a token, so a token's result doesn't depend on other tokens, neither of its sentence nor of its batch. All
products with the same x share one quantised x. In the single graph of an encoder-only model, target cpu also joins
these products into one, with their matrices side by side. A runtime joins the matrices when it loads the graph; a
single text then takes a twentieth less time.

If `Int8Scales` has a fixed scale a, no scale is computed from x; q, k and v share one quantised x because they share a.
If `Int8Scales` has a multiplier for W, the multiplier determines W's integers.

Activations become integers in one of three ways:

    x --> Abs --> ReduceMax --> m --> Max(least)
    |                                    |
    +---------------------------------> Div --> QuantizeLinear(1 / 127) --> q (by_row)

    x --> Abs --> ReduceMax --> m --> Mul(1 / 127)
    |                                    |
    +---------------------------> QuantizeLinear --> q (in_rows)

    x --> QuantizeLinear(1 / a) [--> Clip] --> q (fixed_steps)

m is a row's largest magnitude. x / m is rounded to 127 steps on either side of zero (uint8, zero point 128), after a
Relu to 255 steps above zero (zero point 0). A Gelu gives no number below -0.17: m is then the row's largest number, at
least 0.17, and the Abs is left out.

The two Muls of the first form stay separate. ONNX Runtime would mistake a single Mul by their product, followed by an
Add, for the form with one scale per tensor, and add the bias before it multiplies. Target cpu replaces Cast, Mul, Mul
by MatMulIntegerToFloat, which also takes a scale per row, but for the same reason gets no bias. With fixed scales it
gets the bias too, and the result has the same bits as Cast, Mul, Add.

An embedding's rows are looked up as int8; a classifier tied to the table reads the same integers. A table that only an
encoder looks up needs no single scale per row: every 32 numbers have their own scale, with steps half as large. (The
extra operators would slow down the single steps of a decoder.)

    ids --+--> Gather(q uint8 (V, G, 32)) --> Cast --> Sub 128 --> Mul --> Reshape [--> Slice] --> rows
          +--> Gather(scale (V, G)) --> Unsqueeze -----------------^

With ONNX Runtime's own operators and whole blocks, GatherBlockQuantized does all of this and gives the same bits.

Matrices that `Int8Scales` leaves in float32 stay as they were built.

Shapes: N rows, D width in, O width out, C chosen ids, V entries of a table, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.edit import Nodes
from export.interface import ENCODER_CPU, LISTED, MODEL, PROMPT_CPU, SCALES, STEP_CPU
from export.nn.marks import FEW_ROWS, IS_BIAS, ROLE, ROWS_OF, Role, extent
from mlx_transformer.core.int8_scales import SYMMETRIC, UNSIGNED, Int8Scales, ProductScales
from mlx_transformer.system.errors import UserError

from .products import (
    LateWeight,
    Linear,
    Lookup,
    Rows,
    derived,
    is_vector,
    late_initializer,
    least_of,
    linears,
    lookups,
    put_parts,
    put_product,
)
from .rounding import BLOCK, block_rows, int8_matrix, int8_rows, packed
from .table import BLOCKS_IR_VERSION, BLOCKS_OPSET

LEAST = 1e-30
"""m for a row of zeros."""
ROUNDED = 127
"""Steps from zero to the largest magnitude, on either side."""
ZERO = 128
"""The zero point of signed activations."""
LAYERS = ".layers."
"""Separates the stack from the layer in a weight's name, e.g. encoder.layers.0; a stack's layers have the same rows."""


@dataclass(frozen=True)
class Activations:
    """Activations as integers: x ~ (q - zero) * unit / steps."""

    q: ir.Value
    """(..., D) uint8"""
    zero: ir.Value
    unit: ir.Value
    """(..., 1), or a scalar if it is fixed."""
    steps: int = 1


def by_row(add: Nodes, x: ir.Value) -> Activations:
    """Quantise x (..., D) by the largest magnitude of each row."""
    zero, steps, largest = _largest(add, x, LEAST)
    unit, zero = add.constant(np.float32(1 / steps)), add.constant(np.uint8(zero))
    return Activations(add("QuantizeLinear", add("Div", x, largest), unit, zero), zero, largest, steps)


def in_rows(add: Nodes, linear: Linear, zeros: dict[str, ir.Value]) -> Activations:
    """Quantise the input x (N, D) of a product by row, if the rows are the tokens of a batch.

    zeros: the zero points (N, 1) for the rows of each stack; added if missing.

    For QuantizeLinear each row is a block. It also takes scales along an axis, but then uses its threads row by row. A
    row of zeros gives 0 / 0, which becomes an arbitrary integer; multiplied by m it is 0 again. With D of several
    hundred, a whole model takes a twenty-fifth less time than with Div, or Reciprocal and Mul, before QuantizeLinear.
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
    """(zero point of x (..., D), steps from zero to the largest, largest magnitudes (..., 1), at least `least`)."""
    below = least_of(x)
    zero, steps = (0, UNSIGNED) if below == 0 else (ZERO, ROUNDED)
    largest = add("ReduceMax", add("Abs", x) if below is None else x, add.constant([-1]), keepdims=1)
    least = max(least, below or 0.0)
    return zero, steps, add("Max", largest, add.constant(np.float32(least))) if least else largest


def fixed_steps(add: Nodes, x: ir.Value, fixed: ProductScales) -> Activations:
    """Quantise x (..., D) with the fixed scale."""
    zero, unit = add.constant(np.uint8(zero_point(fixed))), add.constant(unit_of(fixed))
    q = add("QuantizeLinear", x, unit, zero)
    if fixed.steps == SYMMETRIC:  # clipped as bytes, which are a quarter of float32's memory
        q = add("Clip", q, add.constant(np.uint8(ZERO - SYMMETRIC)))
    return Activations(q, zero, unit)


def zero_point(fixed: ProductScales) -> int:
    """The integer for 0."""
    return 0 if fixed.steps == UNSIGNED else ZERO


def unit_of(fixed: ProductScales) -> np.float32:
    """QuantizeLinear's divisor, 1/a."""
    assert fixed.activation is not None
    return np.float32(1) / fixed.activation


CONTRIB = "com.microsoft"
OF_MANY_ROWS = (MODEL, ENCODER_CPU, STEP_CPU, PROMPT_CPU)
"""Graphs of target cpu with a row for each token of a batch."""
IN_STEPS = "scale_"
"""Suffix of a product's scales, e.g. NAME.scale_127: W ~ q * 127 * NAME.scale_127. m then needs no division by 127."""
WHOLE = "scale"
"""Suffix of the scales of a product with a fixed activation scale: W ~ q * NAME.scale."""
BY_ROW = Int8Scales({})
"""No fixed scales."""


def int8(model: ir.Model, fused: bool, scales: Int8Scales = BY_ROW) -> None:
    """Change a built graph to int8, before its weights are filled. `fused`: use ONNX Runtime's own operators."""
    chosen = chosen_rows(model, scales)
    products = [linear for linear in linears(model) if not scales.of(str(linear.weight.name)).float32]
    looked_up = [lookup for lookup in lookups(model) if not scales.of(str(lookup.table.name)).float32]
    to_int8(model, products, looked_up, fused, scales, chosen)
    RemoveUnusedNodesPass()(model)


def to_int8(
    model: ir.Model,
    products: Sequence[Linear],
    looked_up: Sequence[Lookup],
    fused: bool,
    scales: Int8Scales = BY_ROW,
    chosen: Mapping[ir.Value, ir.Value] = MappingProxyType({}),
) -> None:
    """Change only these products and lookups. chosen: {rows of chosen ids, already integers: their scales (C,)}."""
    tables = {lookup.table.name for lookup in looked_up}
    quantised: dict[tuple[ir.Graph | None, str, ProductScales], Activations] = {}
    zeros: dict[str, ir.Value] = {}
    groups: dict[Activations, list[Linear]] = {}
    rows: Rows = {}

    def multiply(linear: Linear, x: Activations) -> None:
        add, fixed = Nodes(model, linear.node, "int8"), scales.of(str(linear.weight.name))
        if linear.chosen is None:
            shared = linear.weight.name in tables
            weight, scale = _integers(add, linear.weight, linear.rows, shared, x.steps, fixed)
            if shared:
                weight = add("Transpose", weight, perm=[1, 0])
        else:
            weight, scale = linear.chosen, chosen[linear.chosen]
        _multiply(add, linear, x, fused, (weight, scale), fixed)

    for lookup in looked_up:
        _look_up(model, lookup, fused, scales.of(str(lookup.table.name)))
    for linear in products:
        add = Nodes(model, linear.node, "int8")
        fixed = scales.of(str(linear.weight.name))
        key = linear.node.graph, str(linear.x.name), replace(fixed, weight=None)
        if key not in quantised:
            if fixed.activation is not None:
                quantised[key] = fixed_steps(add, linear.x, fixed)
            elif fused and model.graph.name in OF_MANY_ROWS and FEW_ROWS not in linear.weight.meta:
                quantised[key] = in_rows(add, linear, zeros)
            else:
                quantised[key] = by_row(add, linear.x)
            add.before()
        alone = fixed.weight is not None or linear.chosen is not None or linear.weight.name in tables
        if fused and model.graph.name == MODEL and not alone:
            groups.setdefault(quantised[key], []).append(linear)
        else:
            multiply(linear, quantised[key])
    for x, together in groups.items():
        if len(together) > 1:
            _multiply_together(model, together, x, scales, rows)
        else:
            multiply(together[0], x)


def _multiply(
    add: Nodes,
    linear: Linear,
    x: Activations,
    fused: bool,
    integers: tuple[ir.Value, ir.Value],
    fixed: ProductScales,
) -> None:
    """Replace a product; integers: q (D, O) and scales (O,) of its weight."""
    weight, scale = integers
    addend = linear.addend
    is_bias = is_vector(addend) or (addend is not None and IS_BIAS in addend.meta)
    bias = addend if fixed.activation is not None and is_bias else None
    if fused and bias is not None:
        add.replace(add("MatMulIntegerToFloat", x.q, weight, x.unit, scale, x.zero, None, bias, domain=CONTRIB))
        return
    if fused:
        y = add("MatMulIntegerToFloat", x.q, weight, x.unit, scale, x.zero, domain=CONTRIB)
    else:
        y = add("Cast", add("MatMulInteger", x.q, weight, x.zero), to=ir.DataType.FLOAT)
        if fixed.activation is None:
            y = add("Mul", add("Mul", y, scale), x.unit)
        else:  # outside a branch, a runtime computes the product of constants once, on loading
            both = add.outside if scale.is_initializer() else add
            y = add("Mul", y, both("Mul", x.unit, scale))
    put_product(add, linear, y)


def _multiply_together(
    model: ir.Model, products: Sequence[Linear], x: Activations, scales: Int8Scales, rows: Rows
) -> None:
    """Replace products with the same quantised x by a single product, with their matrices side by side."""
    add, fixed = Nodes(model, products[0].node, "int8"), scales.of(str(products[0].weight.name))
    parts = [_integers(add, each.weight, each.rows, False, x.steps, fixed) for each in products]
    weights, each_scale = zip(*parts, strict=True)
    weight, scale = add("Concat", *weights, axis=1), add("Concat", *each_scale, axis=0)
    biases = [linear.addend for linear in products if is_vector(linear.addend)]
    joined = len(biases) == len(products)
    bias = add("Concat", *biases, axis=0) if joined else None
    within = [None, bias] if fixed.activation is not None and joined else []
    y = add("MatMulIntegerToFloat", x.q, weight, x.unit, scale, x.zero, *within, domain=CONTRIB)
    y = y if within or bias is None else add("Add", y, bias)
    add.before()
    put_parts(model, products, y, joined, rows)


def quantiser(name: str, multiplier: np.float32 | None) -> Callable[[NDArray], tuple[NDArray, NDArray]]:
    """A function from the matrix `name` (O, D) to q (O, D) and scales (O,).

    It raises `UserError` if the matrix doesn't fit the multiplier.
    """

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        if multiplier is None:
            return int8_rows(w)
        try:
            return int8_matrix(w, multiplier)
        except ValueError as error:
            raise UserError(f"{name}: has other weights than its int8 scales are of: {error}") from None

    return make


def _late(weight: ir.Value, rows: bool, fixed: ProductScales, turned: bool = False, steps: int = 1) -> LateWeight:
    """The late weight of q (O, D), transposed (D, O) if `turned`, and of the scales divided by `steps`.

    The scales are (O,), or a scalar if the matrix has a fixed multiplier. `rows`: the weight is (O, D).
    """
    quantise = quantiser(str(weight.name), fixed.weight)

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = quantise(w if rows else w.T)
        scale = scale if fixed.weight is None else scale[0]
        return np.ascontiguousarray(q.T) if turned else q, scale if steps == 1 else scale / np.float32(steps)

    return derived(weight, make, f"int8_{steps}{'_turned' * turned}")


def chosen_rows(model: ir.Model, scales: Int8Scales) -> dict[ir.Value, ir.Value]:
    """Make the rows of chosen ids integers, in the graph that gathers them and in the graph that reads them.

    Returns {rows: their scales (C,)}. The scales go from one graph to the other as `SCALES`; a single scale for the
    whole matrix is an initializer of both.
    """
    graph, rows_of = model.graph, {}
    for value in [value for value in graph.inputs if ROWS_OF in value.meta]:
        value.type = ir.TensorType(ir.DataType.INT8)
        parameter = value.meta[ROWS_OF]
        if (fixed := scales.of(str(parameter.name))).weight is None:
            rows_of[value] = ir.Value(name=SCALES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([LISTED]))
            graph.inputs.append(rows_of[value])
        else:
            late = _late(parameter, True, fixed, steps=_steps(fixed))
            rows_of[value] = _scales(Nodes(model, str(value.name)), parameter, late, _steps(fixed), fixed, 0)
    for node in [node for node in graph if ROWS_OF in node.outputs[0].meta]:
        rows, scale = _taken(model, node, scales.of(str(node.outputs[0].meta[ROWS_OF].name)))
        rows_of[rows] = scale
        if rows.is_graph_output() and not scale.is_initializer():
            scale.name = SCALES
            graph.outputs.append(scale)
    return rows_of


def _taken(model: ir.Model, node: ir.Node, fixed: ProductScales) -> tuple[ir.Value, ir.Value]:
    """Replace the node, a Transpose of a Gather, by integers (D, C); returns them and their scales (C,).

    The stored integers of an embedding are (V, D), as its lookup reads them; a classifier's own are (D, V), as its
    product reads them.
    """
    rows, taken = node.outputs[0], node.inputs[0]
    gather = None if taken is None else taken.producer()
    assert gather is not None
    parameter, ids = rows.meta[ROWS_OF], gather.inputs[1]
    table, add = parameter.meta[ROLE] is Role.EMBEDDING, Nodes(model, node, "int8")
    q, scale = _integers(add, parameter, True, table, _steps(fixed), fixed)
    integers = add("Gather", q, ids, axis=0 if table else 1)
    integers = add("Transpose", integers, perm=[1, 0]) if table else integers
    chosen = scale if fixed.weight is not None else add("Gather", scale, ids, axis=0)
    add.replace(integers)
    integers.type, integers.shape = ir.TensorType(ir.DataType.INT8), ir.Shape([extent(parameter, 1), LISTED])
    if chosen is not scale:
        chosen.type, chosen.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([LISTED])
    integers.meta[ROWS_OF] = parameter
    return integers, chosen


def _integers(
    add: Nodes, weight: ir.Value, rows: bool, shared: bool, steps: int, fixed: ProductScales
) -> tuple[ir.Value, ir.Value]:
    """The integers of a matrix, (O, D) if `shared` with a lookup, else (D, O), and their scales (O,) divided by the
    steps of the activations. `rows`: the matrix is (O, D)."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    late = _late(weight, rows, fixed, not shared, steps)
    shape = (out, width) if shared else (width, out)
    kind = "int8_rows" if shared else "int8"
    q = late_initializer(f"{weight.name}.{kind}", late, 0, shape, ir.DataType.INT8)
    return add.initializer(q), _scales(add, weight, late, steps, fixed, out)


def _scales(add: Nodes, weight: ir.Value, late: LateWeight, steps: int, fixed: ProductScales, out: int) -> ir.Value:
    """The scales of a product with `out` outputs, divided by the steps of its activations."""
    name = f"{weight.name}.{WHOLE if steps == 1 else f'{IN_STEPS}{steps}'}"
    return add.initializer(late_initializer(name, late, 1, _scales_shape(fixed, out), ir.DataType.FLOAT))


def _steps(fixed: ProductScales) -> int:
    """The steps of the activations multiplied with the classifier: `ROUNDED`, or 1 if they have a fixed scale."""
    return ROUNDED if fixed.activation is None else 1


def _scales_shape(fixed: ProductScales, *each: int) -> tuple[int, ...]:
    """The shape of a matrix's scales: `each`, e.g. (O,), or () if the matrix has a single scale. With a scalar, ONNX
    Runtime's product of a single row takes two thirds of the time."""
    return each if fixed.weight is None else ()


def _look_up(model: ir.Model, lookup: Lookup, fused: bool, fixed: ProductScales) -> None:
    add = Nodes(model, lookup.node)
    if lookup.table.meta[ROLE] is Role.LOOKED_UP and fixed.weight is None:
        if fused and extent(lookup.table, 1) % BLOCK == 0:
            look_up_blocks(add, lookup)
            return
        q, scale = (add("Gather", values, lookup.ids, axis=0) for values in stored_blocks(add, lookup.table, True, 8))
        shape = add("Concat", add("Shape", lookup.ids), add.constant([-1]), axis=0)
        add.replace(join_blocks(add, unpack_blocks(add, q, scale), shape, extent(lookup.table, 1)))
        return
    q, scale = _rows(add, lookup.table, True, fixed)
    row = add("Cast", add("Gather", q, lookup.ids, axis=0), to=ir.DataType.FLOAT)
    add.replace(add("Mul", row, scale if fixed.weight is not None else add("Gather", scale, lookup.ids, axis=0)))


def look_up_blocks(add: Nodes, lookup: Lookup) -> None:
    """Look up rows of whole 8-bit blocks by GatherBlockQuantized. Stores the bytes of `stored_blocks` as (V, D)."""
    size, width = extent(lookup.table, 0), extent(lookup.table, 1)
    name = f"{lookup.table.name}.uint8"
    late = derived(lookup.table, lambda w: block_rows(w, 8, BLOCK), "blocks8")
    q = add.initializer(late_initializer(f"{name}_rows", late, 0, (size, width), ir.DataType.UINT8))
    scale = add.initializer(late_initializer(f"{name}_scale", late, 1, (size, width // BLOCK), ir.DataType.FLOAT))
    options = {"bits": 8, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    add.replace(add("GatherBlockQuantized", q, lookup.ids, scale, domain=CONTRIB, **options))


def stored_blocks(add: Nodes, weight: ir.Value, rows: bool, bits: int) -> tuple[ir.Value, ir.Value]:
    """A matrix in blocks: uint8 (O, G, 32 * bits / 8), and scales (O, G). `rows`: the matrix is (O, D)."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    groups = -(-width // BLOCK)

    def make(w: NDArray) -> tuple[NDArray, NDArray]:
        q, scale = block_rows(w if rows else w.T, bits, BLOCK)
        return packed(q, bits), scale

    late = derived(weight, make, f"blocks{bits}")
    name = f"{weight.name}.uint{bits}"
    q = late_initializer(name, late, 0, (out, groups, BLOCK * bits // 8), ir.DataType.UINT8)
    scale = late_initializer(f"{name}_scale", late, 1, (out, groups), ir.DataType.FLOAT)
    return add.initializer(q), add.initializer(scale)


def unpack_blocks(add: Nodes, q: ir.Value, scale: ir.Value, axis: int = -1) -> ir.Value:
    """float32 from 8-bit blocks (..., G, 32) and scales (..., G). axis: the axis of the 32 numbers."""
    signed = add("Sub", add("Cast", q, to=ir.DataType.FLOAT), add.constant(np.float32(ZERO)))
    return add("Mul", signed, add("Unsqueeze", scale, add.constant([axis])))


def join_blocks(add: Nodes, rows: ir.Value, shape: ir.Value, width: int, axis: int = -1) -> ir.Value:
    """Blocks (..., G, 32) -> (..., D), without the padding of the last block. shape: (..., -1); axis: the axis of D."""
    rows = add("Reshape", rows, shape)
    if width % BLOCK == 0:
        return rows
    return add("Slice", rows, *(add.constant([k]) for k in (0, width, axis)))


def unpack_rows(add: Nodes, linear: Linear) -> ir.Value:
    """A weight (O, D) in float32, computed from the integers that a lookup reads."""
    q, scale = _rows(add, linear.weight, linear.rows, ProductScales())
    return add("Mul", add("Cast", q, to=ir.DataType.FLOAT), scale)


def _rows(add: Nodes, weight: ir.Value, rows: bool, fixed: ProductScales) -> tuple[ir.Value, ir.Value]:
    """int8 (O, D) and its scales, to broadcast over rows: a column (O, 1), or a scalar. Unlike a product's scales they
    aren't divided by steps."""
    out, width = (extent(weight, axis) for axis in ((0, 1) if rows else (1, 0)))
    late = _late(weight, rows, fixed)
    q = late_initializer(f"{weight.name}.int8_rows", late, 0, (out, width), ir.DataType.INT8)
    scale = late_initializer(f"{weight.name}.scales", late, 1, _scales_shape(fixed, out, 1), ir.DataType.FLOAT)
    return add.initializer(q), add.initializer(scale)
