"""Gradient checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

Only the input of each layer is stored; the backward pass computes its activations again. This trades the time of one
more forward pass for memory.
"""

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
    """Replace the layers of encoder and decoder by checkpointing layers with the same parameters, in place."""
    for stack in ("encoder", "decoder"):
        if stack in model:
            model[stack].layers = [recast(layer, _checkpointing(type(layer))) for layer in model[stack].layers]


@cache
def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    class Checkpointing(kind):
        def __call__(self, *inputs: Any) -> mx.array:
            return checkpointed(self, super().__call__, *inputs) if self.training else super().__call__(*inputs)

    return Checkpointing


def checkpointed(layer: nn.Module, call: Callable[..., mx.array], *inputs: Any) -> mx.array:
    """Call a method of the layer; its backward pass runs the method again instead of storing activations.

    Arrays that need a gradient must be parameters of the layer or among `inputs`, where tuples of arrays are allowed.
    `mx.checkpoint` is no substitute: MLX would recompute all layers before it takes the first gradient.
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
        with drawing_from(key):  # a closure, since the gradient is taken for every input
            return call(*tree_unflatten([*named[count:], *others]))

    @mx.custom_function
    def function(*values: mx.array) -> mx.array:
        return run(*values)

    @function.vjp
    def again(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        # mx.depends fixes the order: recompute only once the gradient has arrived at this layer, and pass it on only
        # when this layer's activations can be freed. Otherwise the activations of several layers are alive at once.
        values = [primals] if isinstance(primals, mx.array) else list(primals)
        gradients = mx.vjp(run, mx.depends(values, [cotangent]), [cotangent])[1]
        return tuple(mx.depends(gradients, gradients))

    return cast(mx.array, function(*(value for _, value in (*parameters, *arrays))))


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return cast(list[tuple[str, Any]], tree_flatten(tree))
