"""Gradient checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): of a layer only its input
is kept for the gradient, and the rest is computed again there. Less memory, for the time of one more forward pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_transformer.nn import Transformer
from mlx_transformer.nn.dropout import drawing_from


def checkpoint_layers(model: Transformer) -> None:
    """Compute the layers of both stacks so, in training; nothing else about them changes."""
    for stack in ("encoder", "decoder"):
        for layer in model[stack].layers if stack in model else ():
            layer.__class__ = _checkpointing(type(layer))


@cache
def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    class Checkpointing(kind):
        def __call__(self, *inputs: Any) -> mx.array:
            return checkpointed(self, super().__call__, *inputs) if self.training else super().__call__(*inputs)

    return Checkpointing


def checkpointed(layer: nn.Module, call: Any, *inputs: Any) -> mx.array:
    """call(*inputs), a method of the layer. Arrays that need a gradient must be among the inputs or the layer's
    parameters."""
    key = mx.random.randint(0, 2**31 - 1, (2,), dtype=mx.uint32)

    def run(parameters: Any, *inputs: Any) -> mx.array:
        layer.update(parameters)
        with drawing_from(key):  # no input: of those a gradient is asked for
            return call(*inputs)

    return mx.checkpoint(run)(layer.trainable_parameters(), *inputs)
