"""The position-wise feed-forward network (section 3.3) and its gated form.

Shapes: B batch, L positions, D model, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnxscript import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import is_unbounded

from .marks import Role
from .primitives import Linear, Op


def relu(op: Op, x: ir.Value) -> ir.Value:
    return op.Relu(x)


def gelu(op: Op, x: ir.Value) -> ir.Value:
    """x * Phi(x), exact (Hendrycks and Gimpel 2016)."""
    return op.Gelu(x, approximate="none")


def gelu_tanh(op: Op, x: ir.Value) -> ir.Value:
    """The tanh approximation of GELU, from the same paper."""
    return op.Gelu(x, approximate="tanh")


def silu(op: Op, x: ir.Value) -> ir.Value:
    return op.Mul(x, op.Sigmoid(x))


ACTIVATIONS: dict[str, Callable[[Op, ir.Value], ir.Value]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "tanh": lambda op, x: op.Tanh(x),
}


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2, or gated (act(x Wg) * x W1) W2 (Shazeer 2020), at each position separately.

    The activation is ReLU in the paper; `config.activation` chooses another, e.g. "gelu".
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        bias = config.feed_forward_bias
        self.gated = config.gated
        if self.gated:
            self.gate_proj = Linear(config.d_model, config.d_ff, bias)
        self.up_proj = Linear(config.d_model, config.d_ff, bias)
        # T5's results exceed float16's range: as in transformers, this matrix and the sums over it stay float32.
        role = Role.UNBOUNDED if is_unbounded("feed_forward.down_proj.weight", config) else Role.WEIGHT
        self.down_proj = Linear(config.d_ff, config.d_model, bias, role)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """(B, L, D) -> (B, L, D)."""
        if self.gated:
            inner = op.Mul(self.activation(op, self.gate_proj(op, x)), self.up_proj(op, x))  # (B, L, F)
        else:
            inner = self.activation(op, self.up_proj(op, x))  # (B, L, F)
        return self.down_proj(op, inner)  # (B, L, D)
