"""From hidden states to logits (section 3.4): the one way that the network, a search among chosen ids and the training
loss all take.

    hidden (..., D) --> before: logit_scale --> product: matrix, bias --> after: logit_cap --> logits (..., C)

A new option of logits is a line in `before` or `after`, here and in the twin. What a search adds, such as bans, comes
after all of it.

Shapes: D model, C outputs: all V of the vocabulary (the classes of an encoder's head), or chosen ones.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .quantize import matrix, with_rows


class Classifier:
    """Called with hidden states (..., D), it returns logits (..., C)."""

    def __init__(self, config: TransformerConfig, layer: nn.Linear | nn.Embedding, bias: mx.array | None = None):
        """layer: a linear map with its own bias, or the embedding that is tied to it; bias (C,)."""
        self.config, self.layer, self.bias = config, layer, bias

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.after(self.product(self.before(hidden)))

    def before(self, hidden: mx.array) -> mx.array:
        """Change what the product reads, (..., D)."""
        scale = self.config.logit_scale
        return hidden if scale is None else hidden * scale

    def product(self, x: mx.array) -> mx.array:
        """x W^T + b: (..., D) -> (..., C)."""
        if self.config.own_classifier:
            return cast(nn.Linear, self.layer)(x)
        y = cast(nn.Embedding, self.layer).as_linear(x)
        return y if self.bias is None else y + self.bias

    def after(self, y: mx.array) -> mx.array:
        """Change each product (..., C) by itself. The loss takes the derivative of this function, whatever it is."""
        cap = self.config.logit_cap
        return y if cap is None else cap * mx.tanh(y / cap)

    def among(self, ids: mx.array | slice) -> Classifier:
        """The same for chosen outputs (C,), whose rows are taken once; integers stay integers."""
        return Classifier(self.config, with_rows(self.layer, ids), None if self.bias is None else self.bias[ids])

    @property
    def weights(self) -> list[mx.array]:
        """The arrays of the product: W (C, D), and b (C,) if there is a bias."""
        bias = self.layer.get("bias") if self.config.own_classifier else self.bias
        return [matrix(self.layer), *([] if bias is None else [bias])]
