"""From hidden states to logits (section 3.4): the one way that the network and a search among chosen ids both take.

    hidden (..., D) --> before: logit_scale --> product: matrix, bias --> after: logit_cap --> logits (..., C)

A new option of logits is a line in `before` or `after`, here and in the twin. What a search adds, such as bans, comes
after all of it.

Shapes: D model, C outputs: all V of the vocabulary (the classes of an encoder's head), or chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mlx_transformer.core.config import TransformerConfig

from .primitives import Op, scope

Product = Callable[[Op, ir.Value], ir.Value]
"""x W^T + b: (..., D) -> (..., C), with all rows of the matrix or with chosen ones (`rows.py`)."""


class Classifier:
    """Called with hidden states (..., D), it returns logits (..., C)."""

    def __init__(self, config: TransformerConfig, product: Product):
        self.config, self.product = config, product

    def __call__(self, op: Op, hidden: ir.Value) -> ir.Value:
        return self.after(op, self.product(op, self.before(op, hidden)))

    def before(self, op: Op, hidden: ir.Value) -> ir.Value:
        """Change what the product reads, (..., D)."""
        scale = self.config.logit_scale
        return hidden if scale is None else op.Mul(hidden, scale)

    def after(self, op: Op, y: ir.Value) -> ir.Value:
        """Change each product (..., C) by itself."""
        cap = self.config.logit_cap
        if cap is None:
            return y
        with scope(op, "logit_cap", "Cap"):
            return op.Mul(op.Tanh(op.Div(y, cap)), cap)
