"""Quantised layers: linear maps and embeddings stored as integers, with a scale and a bias per group.

Modules keep their names. A quantised module has the parameters `weight` (integers packed in uint32), `scales` and
`biases` (`core/quantization.py`). Quantised weights are frozen, never trained.

Shapes: V outputs of a linear map, or entries of an embedding; D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from mlx_transformer.core.quantization import GROUP_SIZES, Packed, Quantization, Scheme
from mlx_transformer.device import tuning
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.tensors import number_type, some_rows

OF_A_ROW = ("weight", "scales", "biases", "bias", "lora_b", "magnitude", "_gain")
"""Parameters of a layer whose first axis is its outputs, or the entries of an embedding."""

Quantized = nn.QuantizedLinear | nn.QuantizedEmbedding
L = TypeVar("L", bound=nn.Module)


def use_quantized_layers(model: nn.Module, quantization: Quantization, dtype: mx.Dtype = mx.float32) -> None:
    """Replace each layer whose weight is in `quantization` by MLX's quantised layer, its values rounded.

    Those that MLX can't run stay as they are. dtype: of the vectors of short floats.
    """

    def scheme_of(path: str, module: nn.Module) -> bool | dict[str, object]:
        scheme = quantization.get(f"{path}.weight")
        return False if scheme is None or not scheme.runs_in_mlx else asdict(scheme)

    nn.quantize(model, class_predicate=scheme_of)
    layers: dict[str, nn.Module] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear):
            layers[path] = recast(layer, Integers)
        elif isinstance(layer, nn.QuantizedEmbedding):
            layers[path] = recast(layer, ShortFloats if layer.biases is None else IntegerTable)
            layers[path].dtype = dtype
    put_layers(model, layers)


class Integers(nn.QuantizedLinear):
    """A quantised linear map that dequantises its weight for a product with many rows, where that is faster."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        y = product(self, x)
        return y + self.bias if "bias" in self else y


class IntegerTable(nn.QuantizedEmbedding):
    """A quantised embedding; as a tied classifier it is such a map too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return product(self, x)


class ShortFloats(IntegerTable):
    """An embedding of short floats with vectors of type `dtype`. MLX's own has bfloat16, and its trace can't be
    exported."""

    dtype: mx.Dtype

    def __call__(self, ids: mx.array) -> mx.array:
        values, scales = map(mx.array, scheme_of(self).levels)
        octets = mx.view(self.weight[ids], mx.uint8)
        q = octets if self.bits == 8 else mx.flatten(mx.stack([octets & 15, octets >> 4], axis=-1), -2)
        grouped = mx.unflatten(values[q], -1, (-1, self.group_size))  # (..., G, group_size)
        return mx.flatten(grouped * scales[self.scales[ids]][..., None], -2).astype(self.dtype)


def quantization_of(model: nn.Module) -> dict[str, Scheme]:
    """{parameter: scheme} of the quantised layers, e.g. {"encoder.layers.0.feed_forward.up_proj.weight": ...}."""
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}
    return {f"{path}.weight": scheme_of(m) for path, m in sorted(layers.items())}


def scheme_of(layer: Quantized) -> Scheme:
    return Scheme(layer.group_size, layer.bits, layer.mode)


def check_runs(scheme: Scheme) -> None:
    """Raise `UserError` for groups that MLX can't quantise."""
    if not scheme.runs_in_mlx:
        choices = ", ".join(map(str, GROUP_SIZES))
        raise UserError("quantization: {}: choose one of {}", Name("group_size", str(scheme.group_size)), choices)


def quantized(weight: NDArray | mx.array, scheme: Scheme) -> Packed:
    """A matrix (O, D), rounded by MLX from float32, some rows at a time. Raises `UserError` as `check_runs` does."""
    check_runs(scheme)
    some = (mx.array(weight[rows]).astype(mx.float32) for rows in some_rows(weight.shape))
    parts = [[*map(as_numpy, mx.quantize(rows, **asdict(scheme)))] for rows in some]
    return Packed.of(map(np.concatenate, zip(*parts, strict=True)), scheme)


def matrix(layer: nn.Module, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Weight (V, D) of a linear map or an embedding, quantised or not, dequantised on this device.

    dtype: of short floats; other matrices have that of their numbers. The last bit may differ between devices: a GPU's
    fused multiply-add rounds integer * scale + bias once, `values` and the ONNX graphs round twice.
    """
    if not isinstance(layer, Quantized):
        return cast(mx.array, layer.weight)
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.biases,
        **asdict(scheme_of(layer)),
        dtype=dtype if layer.biases is None else None,
    )


def product(layer: Any, x: mx.array) -> mx.array:
    """x W^T, (..., D) -> (..., O), without bias; for many rows W is dequantised first where that is faster."""
    packed = isinstance(layer, Quantized)
    if not packed and layer.weight.dtype == x.dtype:
        return x @ layer.weight.T
    many = x.size >= tuning().unpack_from * x.shape[-1]
    if not packed or (many and (layer.training or layer.biases is not None)):  # no graph has MLX's FromFP8
        return _widened_product(layer)(x)
    how: Any = {"transpose": True, **asdict(scheme_of(layer))}
    return cast(mx.array, mx.quantized_matmul(x, layer.weight, layer.scales, layer.biases, **how))


def _widened_product(layer: Any) -> Callable[[mx.array], mx.array]:
    """x -> x W^T, for W in 16 bits or integers: widened for this product, and again for the gradient, not stored.

    `mx.depends` delays that until x, or the gradient, is there: MLX would begin with all matrices of the network.
    """

    def wide(ready: mx.array) -> mx.array:
        late = copy(layer)
        [late.weight] = mx.depends([layer.weight], [ready])
        return matrix(late, ready.dtype).astype(ready.dtype)

    def product(x: mx.array) -> mx.array:
        return x @ wide(x).T

    if not layer.training:  # a custom function can't be written as a graph
        return product
    trained = mx.custom_function(product)

    @trained.vjp
    def gradient(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
        return dy @ wide(dy)

    return cast(Callable[[mx.array], mx.array], trained)


def values(layer: Quantized) -> NDArray[Any]:
    """Weight (V, D) of a quantised layer, dequantised by NumPy in the type of affine scales, else in float32: the same
    on every device."""
    tensors = {f".{name}": as_numpy(layer[name]) for name in ("weight", "scales", "biases") if name in layer}
    return scheme_of(layer).packed(".weight", tensors).dequantised()


def as_numpy(array: mx.array) -> NDArray:
    """The same numbers in NumPy; bfloat16 is ml_dtypes' type."""
    if array.dtype != mx.bfloat16:
        return np.array(array)
    return np.array(array.view(mx.uint16)).view(number_type("bfloat16"))


def as_mlx(array: NDArray) -> mx.array:
    """The same numbers in MLX, which takes ml_dtypes' bfloat16 by itself only in newer versions."""
    if array.dtype.name != "bfloat16":
        return mx.array(array)
    return mx.array(array.view(np.uint16)).view(mx.bfloat16)


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
