"""From hidden states to logits (section 3.4), for the network and for a search among chosen ids.

    hidden (..., D) --> before: logit_scale --> product: matrix, bias --> after: logit_cap --> logits (..., C)

To add an option of the logits, add a line to `before` or `after`, here and in the twin. Rules of a search, e.g. banned
tokens, are applied to the finished logits.

Shapes: D model, C outputs: the whole vocabulary V, the classes of an encoder's head, or chosen ids.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mlx_transformer.core.config import TransformerConfig

from .primitives import Op, scope

Product = Callable[[Op, ir.Value], ir.Value]
"""x W^T + b: (..., D) -> (..., C), with all rows of W or with chosen rows (`rows.py`)."""


class Classifier:
    """Maps hidden states (..., D) to logits (..., C)."""

    def __init__(self, config: TransformerConfig, product: Product):
        self.config, self.product = config, product

    def __call__(self, op: Op, hidden: ir.Value) -> ir.Value:
        return self.after(op, self.product(op, self.before(op, hidden)))

    def before(self, op: Op, hidden: ir.Value) -> ir.Value:
        """Scale hidden states (..., D) before the product."""
        scale = self.config.logit_scale
        return hidden if scale is None else op.Mul(hidden, scale)

    def after(self, op: Op, y: ir.Value) -> ir.Value:
        """Elementwise function of the product (..., C)."""
        cap = self.config.logit_cap
        if cap is None:
            return y
        with scope(op, "logit_cap", "Cap"):
            return op.Mul(op.Tanh(op.Div(y, cap)), cap)
