"""Linear maps with an adapter beside their weight, float or quantised: LoRA (Hu et al. 2021), DoRA (Liu et al. 2024).

    LoRA    y = x W^T + f (x A^T) B^T + b
    DoRA    y = m / ||W + f B A|| (x W^T + f (x A^T) B^T) + b        norms of rows; equation 5

f = alpha / R. The weight keeps its values, its name, and its integers if it is quantised. A trained adapter is merged
into a float weight (`core/adapter.py`), and can be kept beside a quantised weight.

Shapes: O outputs, D inputs, R rank; A (R, D), B (O, R), m (O,).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.adapter import MAGNITUDE, SMALLEST_NORM, A, AdapterConfig, B, WeightDelta
from mlx_transformer.core.checkpoint import Checkpoint

from .dropout import Dropout
from .quantize import Integers, matrix, product, put_layers, recast


def add_adapter(model: nn.Module, config: AdapterConfig) -> None:
    """Freeze the model and add a trainable adapter to the modules in `config.targets`; outputs don't change yet.

    B is zero; A is drawn uniformly from +-D^-0.5 by MLX's random state (as in LoRA's code; the paper draws from a
    Gaussian). For DoRA, m starts as the norms of the rows of W.
    """
    model.freeze()
    modules: dict[str, Any] = dict(model.named_modules())
    layers = {path: recast(m, FROZEN[type(m)]) for path, m in modules.items() if _is_narrow(m)}
    modules |= layers
    for path in config.targets:
        plain = modules[path]
        layer = recast(plain, {"lora": _lora, "dora": _dora}[config.kind](type(plain)))
        rows, width = matrix(layer).shape
        bound = 1 / math.sqrt(width)
        layer.lora_a = mx.random.uniform(-bound, bound, (config.rank, width))
        layer.lora_b = mx.zeros((rows, config.rank))
        layer.lora_factor = config.factor
        layer.lora_dropout = Dropout(config.dropout)
        if config.kind == "dora":
            layer.magnitude = row_norms(layer)
        layers[path] = layer
    put_layers(model, layers)


def keep_adapter(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Add the checkpoint's adapter to the model's quantised matrices, for inference."""
    modules, adapter, layers = dict(model.named_modules()), checkpoint.adapter, dict[str, nn.Module]()
    for name in checkpoint.adapted_integers:
        path = name.removesuffix(".weight")
        change = None if adapter is None else adapter.delta(name)
        assert change is not None
        gain = change.gain(checkpoint.packed(name).dequantised())
        layer = recast(modules[path], (_lora if gain is None else _dora)(type(modules[path])))
        layer.lora_a, layer.lora_b, layer.lora_factor = mx.array(change.a), mx.array(change.b), change.factor
        layer.lora_dropout = Dropout(0.0)
        if change.magnitude is not None and gain is not None:
            layer.magnitude, layer._gain = mx.array(change.magnitude), mx.array(gain.astype(np.float32))
        layers[path] = layer
    put_layers(model, layers)


def delta_of(layer: Any) -> WeightDelta | None:
    """The layer's adapter as a change of its weight; None for a layer without an adapter."""
    if "lora_a" not in layer:
        return None
    parts = (np.array(layer[part].astype(mx.float32)) for part in (A, B, MAGNITUDE) if part in layer)
    return WeightDelta(layer.lora_factor, *parts)


def row_norms(layer: Any) -> mx.array:
    """||W + f B A|| of each row (O,), in float32; exactly ||W|| while B = 0."""
    update = layer.lora_b.astype(mx.float32) @ layer.lora_a.astype(mx.float32)
    changed = matrix(layer).astype(mx.float32) + layer.lora_factor * update
    return mx.sqrt(mx.sum(changed * changed, axis=1))


class SixteenBits(nn.Linear):
    """A linear map whose weight of 16 bits is widened for each product."""

    __call__ = Integers.__call__


FROZEN: dict[type[nn.Module], type[nn.Module]] = {nn.QuantizedLinear: Integers, nn.Linear: SixteenBits}
"""{class of a frozen linear map of fewer than 32 bits: the class that takes its place in training}"""


def _is_narrow(module: Any) -> bool:
    return type(module) in FROZEN and module.weight.dtype != mx.float32


@cache
def _lora(kind: type[nn.Module]) -> type[nn.Module]:
    class LoRA(kind):
        def __call__(self, x: mx.array) -> mx.array:
            y = super().__call__(x)
            return y + _update(self, x).astype(y.dtype)

    return LoRA


@cache
def _dora(kind: type[nn.Module]) -> type[nn.Module]:
    class DoRA(kind):
        def __call__(self: Any, x: mx.array) -> mx.array:
            y = product(self, x)
            y = _gain(self).astype(y.dtype) * (y + _update(self, x).astype(y.dtype))
            return y + self.bias if "bias" in self else y

    return DoRA


def _gain(layer: Any) -> mx.array:
    """m / ||W + f B A|| (O,); computed when the model was loaded if the adapter isn't trained."""
    if "_gain" in layer:
        return layer._gain
    # Section 4.3: no gradient goes through the norm, which saves memory and costs no accuracy.
    return layer.magnitude / mx.stop_gradient(mx.maximum(row_norms(layer), SMALLEST_NORM))


def _update(layer: Any, x: mx.array) -> mx.array:
    return (layer.lora_factor * (layer.lora_dropout(x) @ layer.lora_a.T)) @ layer.lora_b.T  # (..., O)
