"""`lower`: turns a float32 graph into a graph of another precision."""

from __future__ import annotations

import onnx_ir as ir

from mlx_transformer.core.int8_scales import Int8Scales

from .blocks import weight_only
from .half import half, stored_half
from .int8 import BY_ROW, int8
from .row_length import lengthen_rows
from .table import DEFAULT_ACTIVATIONS, ONNXRUNTIME, PRECISIONS, STANDARD, Lowering, blocks_operators


def lower(
    model: ir.Model,
    precision: str,
    lowering: Lowering,
    activations: str = DEFAULT_ACTIVATIONS,
    scales: Int8Scales = BY_ROW,
) -> None:
    """Change a built float32 graph, whose weights aren't filled yet, to this precision, in place.

    `lowering`: the target's. `activations`: "int8" or "float32", for weights in blocks. `scales`: int8's fixed
    scales. The precision "packed" is made by `packed.py`.
    """
    chosen = PRECISIONS[precision]
    fused, standard = lowering.operators == ONNXRUNTIME, lowering.blocks == STANDARD
    if chosen.form == "integers":
        int8(model, fused, scales)
    elif chosen.form == "blocks":
        operators, tables = blocks_operators(precision, lowering, activations), lowering.tables_in_blocks
        weight_only(model, chosen.bits, activations, operators, fused=fused, blocks_in_tables=tables)
    elif precision in lowering.computes_in:
        half(model, ir.DataType[precision.upper()])
    elif chosen.form == "floats":
        if fused:
            lengthen_rows(model)
        if chosen.bits == 16:
            stored_half(model, ir.DataType[precision.upper()])
    if standard and chosen.opset > model.graph.opset_imports[""]:
        model.graph.opset_imports[""] = chosen.opset
        model.ir_version = max(chosen.ir_version, model.ir_version)
