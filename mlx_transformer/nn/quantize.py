"""Quantised layers: linear maps and embeddings stored as integers, with a scale and a bias per group.

Modules keep their names. A quantised module has the parameters `weight` (integers packed in uint32), `scales` and
`biases` (`core/quantization.py`). Quantised weights are frozen, never trained.

Shapes: V outputs of a linear map, or entries of an embedding; D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from mlx_transformer.core.quantization import Packed, Quantization, Scheme

OF_A_ROW = ("weight", "scales", "biases", "bias", "lora_b", "magnitude", "_gain")
"""Parameters of a layer whose first axis is its outputs, or the entries of an embedding."""

Quantized = nn.QuantizedLinear | nn.QuantizedEmbedding
L = TypeVar("L", bound=nn.Module)


def use_quantized_layers(model: nn.Module, quantization: Quantization) -> None:
    """Replace each layer whose weight is in `quantization` by MLX's quantised layer, its values rounded."""

    def scheme_of(path: str, module: nn.Module) -> bool | dict[str, object]:
        scheme = quantization.get(f"{path}.weight")
        return False if scheme is None else {"group_size": scheme.group_size, "bits": scheme.bits, "mode": "affine"}

    nn.quantize(model, class_predicate=scheme_of)


def quantization_of(model: nn.Module) -> dict[str, Scheme]:
    """{parameter: scheme} of the quantised layers, e.g. {"encoder.layers.0.feed_forward.up_proj.weight": ...}."""
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}
    return {f"{path}.weight": Scheme(m.group_size, m.bits) for path, m in sorted(layers.items())}


def matrix(layer: nn.Module) -> mx.array:
    """Weight (V, D) of a linear map or an embedding, quantised or not, dequantised on this device.

    The last bit may differ between devices: a GPU's fused multiply-add rounds integer * scale + bias once, `values` and
    the ONNX graphs round twice.
    """
    if not isinstance(layer, Quantized):
        return cast(mx.array, layer.weight)
    return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def values(layer: Quantized) -> NDArray[Any]:
    """Weight (V, D) of a quantised layer, dequantised by NumPy in the type of its scales: the same on every device."""
    numbers = cast(tuple[mx.array, mx.array], (layer.scales, layer.biases))  # the mode "affine" has both
    scales, biases = (np.array(part.astype(mx.float32)) for part in numbers)
    kind = str(layer.scales.dtype).removeprefix("mlx.core.")
    if kind == "bfloat16":
        import ml_dtypes  # noqa: F401 - gives NumPy the type bfloat16

    scheme = Scheme(layer.group_size, layer.bits)
    return Packed(np.array(layer.weight), scales.astype(kind), biases.astype(kind), scheme).dequantised()


def recast(layer: nn.Module, kind: type[nn.Module]) -> Any:
    """A layer of class `kind` with this layer's parameters and modules, training mode and frozen parameters."""
    other = kind.__new__(kind)
    nn.Module.__init__(other)
    dict.update(other, layer)
    vars(other).update(vars(layer))
    return other


def put_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace layers by their paths, e.g. {"encoder.layers.0.feed_forward.up_proj": layer}."""
    model.update_modules(cast(Any, tree_unflatten(list(layers.items()))))


def with_rows(layer: L, ids: mx.array | slice) -> L:
    """A copy of a linear map or embedding with only the rows `ids` (C,) of its weight, still quantised if it was."""
    chosen: Any = copy(layer)
    for name in OF_A_ROW:
        if name in chosen:
            chosen[name] = chosen[name][ids]
    return chosen
