"""From float32 graphs to those of another precision."""

from __future__ import annotations

import onnx_ir as ir

from mlx_transformer.spec.errors import UserError

from .blocks import weight_only
from .half import half, stored_half
from .int8 import int8
from .table import PRECISIONS, STANDARD


def change(model: ir.Model, precision: str, target: str) -> None:
    """Make a built float32 graph, whose weights aren't filled yet, one of this precision, in place."""
    if target == "coreml" and precision != "float32":
        raise UserError(f"precision {precision}: target coreml takes float32 alone and chooses its own arithmetic")
    if precision == "int8":
        int8(model, fused=target == "cpu")
    elif precision in ("int4", "int8-weights"):
        bits = 4 if precision == "int4" else 8
        weight_only(model, bits, standard=target in STANDARD, fused=target == "cpu", blocks_in_tables=target == "web")
    elif precision in ("float16", "bfloat16"):
        if target == "cpu" or (precision == "bfloat16" and target != "cuda"):
            stored_half(model, ir.DataType[precision.upper()])
        else:
            half(model, ir.DataType[precision.upper()])
    chosen = PRECISIONS[precision]
    if target in STANDARD and chosen.opset > model.graph.opset_imports[""]:
        model.graph.opset_imports[""] = chosen.opset
        model.ir_version = max(chosen.ir_version, model.ir_version)
