"""Quantised layers: linear maps and embeddings as integers with a scale and a bias a group (`mlx.nn.quantize`).

The modules keep their names; of each quantised one `weight` (uint32), `scales` and `biases` are stored
(`core/quantization.py`). Nothing here is trained: quantised weights are frozen.

Shapes: V vocabulary, D model.
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
"""The parts of a layer, quantised or with an adapter, that have a row for each output, or each entry of its table."""

Quantized = nn.QuantizedLinear | nn.QuantizedEmbedding
L = TypeVar("L", bound=nn.Module)


def use_quantized_layers(model: nn.Module, quantization: Quantization) -> None:
    """Put MLX's quantised layers in the place of those whose weight is named; they hold the same values, rounded."""

    def scheme_of(path: str, module: nn.Module) -> bool | dict[str, object]:
        scheme = quantization.get(f"{path}.weight")
        return False if scheme is None else {"group_size": scheme.group_size, "bits": scheme.bits, "mode": "affine"}

    nn.quantize(model, class_predicate=scheme_of)


def quantization_of(model: nn.Module) -> dict[str, Scheme]:
    """Return {parameter: scheme} of the quantised layers."""
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}
    return {f"{path}.weight": Scheme(m.group_size, m.bits) for path, m in sorted(layers.items())}


def matrix(layer: nn.Module) -> mx.array:
    """Return the weight (V, D) of a linear map or an embedding, quantised or not, as this device computes with it: a
    GPU's fused multiply-add rounds integer * scale + bias once, where `values` and the graphs round twice."""
    if not isinstance(layer, Quantized):
        return cast(mx.array, layer.weight)
    return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def values(layer: Quantized) -> NDArray[Any]:
    """Return the weight (V, D) that the layer's integers stand for, in the type of its scales: the same bits on every
    device, for they are read and not computed on it."""
    numbers = cast(tuple[mx.array, mx.array], (layer.scales, layer.biases))  # the mode "affine" has both
    scales, biases = (np.array(part.astype(mx.float32)) for part in numbers)
    kind = str(layer.scales.dtype).removeprefix("mlx.core.")
    if kind == "bfloat16":
        import ml_dtypes  # noqa: F401 - with it NumPy knows the type

    scheme = Scheme(layer.group_size, layer.bits)
    return Packed(np.array(layer.weight), scales.astype(kind), biases.astype(kind), scheme).dequantised()


def recast(layer: nn.Module, kind: type[nn.Module]) -> Any:
    """Return a layer of class `kind` with the parts of this one, under the same names, and what MLX knows of it:
    whether it trains, what is frozen."""
    other = kind.__new__(kind)
    nn.Module.__init__(other)
    dict.update(other, layer)
    vars(other).update(vars(layer))
    return other


def put_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers in the place of those with these paths, such as "encoder.layers.0.feed_forward.up_proj"."""
    model.update_modules(cast(Any, tree_unflatten(list(layers.items()))))


def with_rows(layer: L, ids: mx.array | slice) -> L:
    """Return the same linear map or embedding with the rows `ids` (C,) of its weight alone; integers stay integers."""
    chosen: Any = copy(layer)
    for name in OF_A_ROW:
        if name in chosen:
            chosen[name] = chosen[name][ids]
    return chosen
