"""Chosen rows of the classifier: logits for the ids of a shortlist only.

    ids (C,) --> Gather(W) --> Transpose --> weight (D, C), once a batch
    hidden (..., D) --> MatMul(weight) --> Add(Gather(bias, ids)) --> logits (..., C)

Passes for lower precisions recognise the product by the mark on its weight (`export/precision/products.py`).

Shapes: C ids, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .marks import IS_BIAS, ROWS_OF, extent
from .primitives import Op, Parameter


@dataclass(frozen=True)
class Rows:
    """The product with chosen rows: `weight` (D, C), `bias` (C,)."""

    weight: ir.Value
    bias: ir.Value | None

    def __post_init__(self) -> None:
        if self.bias is not None:
            self.bias.meta[IS_BIAS] = True

    def __call__(self, op: Op, hidden: ir.Value) -> ir.Value:
        """(..., D) -> (..., C)."""
        y = op.MatMul(hidden, self.weight)
        return y if self.bias is None else op.Add(y, self.bias)


def mark(weight: ir.Value, parameter: Parameter) -> ir.Value:
    """Mark a weight (D, C) with the parameter (V, D) whose rows it holds."""
    weight.meta[ROWS_OF] = parameter
    return weight


def take(op: Op, parameter: Parameter, ids: ir.Value) -> ir.Value:
    """Gather the rows `ids` (C,) of a parameter (V, D), transposed for a product: (D, C)."""
    parameter._realize(op.builder)
    weight = op.Transpose(op.Gather(parameter, ids, axis=0), perm=[1, 0])  # (D, C)
    weight.type, weight.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([extent(parameter, 1), None])
    return mark(weight, parameter)
