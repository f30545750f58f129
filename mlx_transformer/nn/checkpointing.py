"""Gradient checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): only a layer's input is
kept for the gradient, and the rest is computed again there. Less memory, for the time of one more forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from .dropout import drawing_from, drawn_key
from .model import Transformer
from .quantize import recast


def checkpoint_layers(model: Transformer) -> None:
    """Give both stacks checkpointing layers, with the parts of those that they have; elsewhere nothing changes."""
    for stack in ("encoder", "decoder"):
        if stack in model:
            model[stack].layers = [recast(layer, _checkpointing(type(layer))) for layer in model[stack].layers]


@cache
def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return such layers that are computed again for their gradient, in training."""

    class Checkpointing(kind):
        def __call__(self, *inputs: Any) -> mx.array:
            return checkpointed(self, super().__call__, *inputs) if self.training else super().__call__(*inputs)

    return Checkpointing


def checkpointed(layer: nn.Module, call: Callable[..., mx.array], *inputs: Any) -> mx.array:
    """Call `call`, a method of the layer, so that its gradient computes it again.

    Arrays that need a gradient must be parameters of the layer or among the inputs, alone or in tuples. `mx.checkpoint`
    leaves the order to MLX, which computes all layers again before it takes the first gradient.
    """
    key = drawn_key()
    parameters, flat_inputs = _flat(layer.trainable_parameters()), _flat(list(inputs))
    arrays = [(name, value) for name, value in flat_inputs if isinstance(value, mx.array)]
    others = [(name, value) for name, value in flat_inputs if not isinstance(value, mx.array)]

    def run(*values: mx.array) -> mx.array:
        names = [name for name, _ in (*parameters, *arrays)]
        named, count = list(zip(names, values, strict=True)), len(parameters)
        if count:
            layer.update(cast(Any, tree_unflatten(named[:count])))
        with drawing_from(key):  # which is no input: for those a gradient is asked
            return call(*tree_unflatten([*named[count:], *others]))

    @mx.custom_function
    def function(*values: mx.array) -> mx.array:
        return run(*values)

    @function.vjp
    def again(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        # Not before the gradient has come down to here, and it goes on when nothing of this layer is needed any more.
        values = [primals] if isinstance(primals, mx.array) else list(primals)
        gradients = mx.vjp(run, mx.depends(values, [cotangent]), [cotangent])[1]
        return tuple(mx.depends(gradients, gradients))

    return cast(mx.array, function(*(value for _, value in (*parameters, *arrays))))


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return cast(list[tuple[str, Any]], tree_flatten(tree))
