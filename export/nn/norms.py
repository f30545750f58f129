"""Normalisation of each position over its features.

Shapes: D width; inputs (..., D).
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.core.config import TransformerConfig

from .primitives import Op, Parameter, full_precision


class LayerNorm(nn.Module):
    """weight * (x - mean) / sqrt(variance + epsilon) + bias, variance with 1/D (Ba et al. 2016; section 3.1)."""

    def __init__(self, width: int, epsilon: float, bias: bool = True):
        super().__init__()
        self.weight = Parameter([width])
        self.bias = Parameter([width]) if bias else None
        self.epsilon = epsilon

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        return op.LayerNormalization(x, *parameters, axis=-1, epsilon=self.epsilon)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019).

    Not the operator RMSNormalization, which begins with opset 23: ONNX Runtime fuses this chain into one kernel.
    """

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = Parameter([width])
        self.epsilon = epsilon

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        with full_precision(op):  # 256 squared overflows float16
            mean_square = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1)
            y = op.Div(x, op.Sqrt(op.Add(mean_square, self.epsilon)))
        return op.Mul(y, self.weight)


def make_norm(config: TransformerConfig) -> LayerNorm | RMSNorm:
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_epsilon)
    return LayerNorm(config.d_model, config.norm_epsilon, config.norm_bias)
