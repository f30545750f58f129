"""What a step computes in: float32, or bfloat16 or float16 with parameters and moments kept in float32.

The parameters that are trained are float32 and stay so; each step computes with a copy of them in the lower type, and
the gradient comes back in float32 (Micikevicius et al. 2018, "Mixed Precision Training"). Gradients of float16 vanish
below 6e-8, so that its loss is multiplied by a factor first: halved where a gradient overflows, doubled after many
steps without.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

FIRST_FACTOR, LARGEST_FACTOR = 2.0**15, 2.0**24
DOUBLED_AFTER = 2000  # steps


class Arithmetic:
    """`dtype`: float32, bfloat16 or float16."""

    def __init__(self, dtype: str = "float32"):
        self.dtype: mx.Dtype = getattr(mx, dtype)
        self.state: dict[str, mx.array] = {}
        """Of float16: the loss's factor, and steps since it changed. A compiled step changes it in place."""
        if self.dtype == mx.float16:
            self.state = {"loss_factor": mx.array(FIRST_FACTOR), "steps_of_loss_factor": mx.array(0, mx.uint32)}

    def lowered(self, parameters: Any) -> Any:
        """The floating-point arrays of a tree in the type; a quantised layer's integers as they are."""
        if self.dtype == mx.float32:
            return parameters
        return tree_map(lambda p: p.astype(self.dtype) if mx.issubdtype(p.dtype, mx.floating) else p, parameters)

    def scaled(self, loss: mx.array) -> mx.array:
        return loss * self.state["loss_factor"] if self.state else loss

    def unscaled(self, gradients: Any) -> Any:
        if not self.state:
            return gradients
        return tree_map(lambda g: g / self.state["loss_factor"], gradients)

    def settle(self, finite: mx.array) -> None:
        """The next step's factor, after a step whose gradient was finite or not."""
        if not self.state:
            return
        factor, steps = self.state["loss_factor"], mx.where(finite, self.state["steps_of_loss_factor"] + 1, 0)
        doubled = steps == DOUBLED_AFTER
        factor = mx.where(finite, mx.where(doubled, mx.minimum(factor * 2, LARGEST_FACTOR), factor), factor / 2)
        self.state["loss_factor"], self.state["steps_of_loss_factor"] = factor, mx.where(doubled, 0, steps)
