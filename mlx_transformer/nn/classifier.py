"""From hidden states to logits (section 3.4), for the network, the training loss and a search among chosen ids.

    hidden (..., D) --> before: logit_scale --> product: matrix, bias --> after: logit_cap --> logits (..., C)

To add an option of the logits, add a line to `before` or `after`, here and in the twin. Rules of a search, e.g. banned
tokens, are applied to the finished logits.

Shapes: D model, C outputs: the whole vocabulary V, the classes of an encoder's head, or chosen ids.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx import nn

from mlx_transformer.core.config import TransformerConfig

from .quantize import matrix, recast, with_rows


class Classifier:
    """Maps hidden states (..., D) to logits (..., C)."""

    def __init__(self, config: TransformerConfig, layer: nn.Linear | nn.Embedding, bias: mx.array | None = None):
        """layer: the linear map (which has its own bias), or the tied embedding; bias (C,): for a tied embedding."""
        self.config, self.layer, self.bias = config, layer, bias

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.after(self.product(self.before(hidden)))

    def before(self, hidden: mx.array) -> mx.array:
        """Scale hidden states (..., D) before the product."""
        scale = self.config.logit_scale
        return hidden if scale is None else hidden * scale

    def product(self, x: mx.array) -> mx.array:
        """x W^T + b: (..., D) -> (..., C)."""
        if self.config.own_classifier:
            return cast(nn.Linear, self.layer)(x)
        y = cast(nn.Embedding, self.layer).as_linear(x)
        return y if self.bias is None else y + self.bias

    def after(self, y: mx.array) -> mx.array:
        """Elementwise function of the product (..., C). The training loss takes its derivative automatically."""
        cap = self.config.logit_cap
        return y if cap is None else cap * mx.tanh(y / cap)

    def among(self, ids: mx.array | slice) -> Classifier:
        """The classifier of outputs `ids` (C,) only. Rows are copied once; quantised weights stay quantised."""
        return Classifier(self.config, with_rows(self.layer, ids), None if self.bias is None else self.bias[ids])

    @property
    def weights(self) -> list[mx.array]:
        """W (C, D), and b (C,) if there is a bias."""
        bias = self.layer.get("bias") if self.config.own_classifier else self.bias
        return [matrix(self.layer), *([] if bias is None else [bias])]

    def unpacked(self) -> Classifier:
        """The classifier with its quantised weight dequantised."""
        layer = recast(self.layer, nn.Linear if self.config.own_classifier else nn.Embedding)
        layer.weight = matrix(self.layer)
        return Classifier(self.config, layer, self.bias)

    @property
    def trained(self) -> bool:
        """Whether a gradient is taken of W or b; a tied embedding's b is taken to be trained."""
        return bool(self.layer.trainable_parameters()) or self.bias is not None
