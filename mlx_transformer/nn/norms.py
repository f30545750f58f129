"""Normalisation of each position over its features. MLX's fused kernels compute in float32 inside; the result has the
type of the input, whatever that of the weights.

Shapes: D width; inputs (..., D).
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig


class LayerNorm(nn.Module):
    """weight * (x - mean) / sqrt(variance + epsilon) + bias, variance with 1/D (Ba et al. 2016; section 3.1)."""

    def __init__(self, width: int, epsilon: float, bias: bool = True):
        super().__init__()
        self.weight = mx.ones((width,))
        if bias:
            self.bias = mx.zeros((width,))
        self.epsilon = epsilon

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.get("bias"), self.epsilon).astype(x.dtype)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = mx.ones((width,))
        self.epsilon = epsilon

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.epsilon).astype(x.dtype)


def make_norm(config: TransformerConfig) -> LayerNorm | RMSNorm:
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_epsilon)
    return LayerNorm(config.d_model, config.norm_epsilon, config.norm_bias)
