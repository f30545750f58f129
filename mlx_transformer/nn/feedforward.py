"""The position-wise feed-forward network (section 3.3) and its gated form.

Shapes: B batch, L positions, D model, F inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.device import tuning

from .dropout import Dropout


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def gelu(x: mx.array) -> mx.array:
    """x * Phi(x), exact (Hendrycks and Gimpel 2016)."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) * 0.5


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of GELU, from the same paper."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _fused(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Compile `function` to one kernel, on devices where MLX compiles."""
    compiled = mx.compile(function, shapeless=True)

    def activation(x: mx.array) -> mx.array:
        return compiled(x) if tuning().compiles else function(x)

    return activation


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": relu,
    "gelu": _fused(gelu),
    "gelu_tanh": _fused(gelu_tanh),
    "silu": _fused(silu),
    "tanh": mx.tanh,
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
            self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)

    def __call__(self, x: mx.array) -> mx.array:
        if self.gated:
            gate, up = self.gate_proj(x), self.up_proj(x)  # (B, L, F)
            inner = recomputed(self.product)(gate, up) if self.training else self.product(gate, up)
        else:
            inner = self.activation(self.up_proj(x))  # (B, L, F)
        return self.down_proj(self.dropout(inner))  # (B, L, D)

    def product(self, gate: mx.array, up: mx.array) -> mx.array:
        return self.activation(gate) * up


def recomputed(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The same function of arrays; its gradient computes it again instead of storing what is within it."""

    @mx.custom_function
    def run(*inputs: mx.array) -> mx.array:
        return function(*inputs)

    @run.vjp
    def gradient(inputs: Any, dy: mx.array, y: mx.array) -> Any:
        # Not before the gradient has arrived here: all layers would be computed again at once.
        return tuple(mx.vjp(function, mx.depends(list(inputs), [dy]), [dy])[1])

    return cast(Callable[..., mx.array], run)
