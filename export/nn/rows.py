"""Some rows of the classifier: the logits of a shortlist's ids alone.

    ids (C,) --> Gather(W) --> Transpose --> weight (D, C), once a batch
    hidden (..., D) --> MatMul(weight) --> Add(Gather(bias, ids)) --> logits (..., C)

Lower precisions know the product by its weight's mark (`export/precision/chosen.py`).

Shapes: C ids, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .marks import IS_BIAS, ROWS_OF, extent
from .primitives import Op, Parameter


@dataclass(frozen=True)
class Rows:
    """`weight` (D, C), `bias` (C,)."""

    weight: ir.Value
    bias: ir.Value | None

    def __post_init__(self) -> None:
        if self.bias is not None:
            self.bias.meta[IS_BIAS] = True

    def __call__(self, op: Op, hidden: ir.Value) -> ir.Value:
        """Return (..., D) -> (..., C)."""
        y = op.MatMul(hidden, self.weight)
        return y if self.bias is None else op.Add(y, self.bias)


def mark(weight: ir.Value, parameter: Parameter) -> ir.Value:
    """Say of a weight (D, C) which parameter's rows it holds."""
    weight.meta[ROWS_OF] = parameter
    return weight


def take(op: Op, parameter: Parameter, ids: ir.Value) -> ir.Value:
    """Return the rows `ids` of a parameter (V, D), as a product reads them: (D, C)."""
    parameter._realize(op.builder)
    weight = op.Transpose(op.Gather(parameter, ids, axis=0), perm=[1, 0])
    weight.type, weight.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([extent(parameter, 1), None])
    return mark(weight, parameter)
