"""Quantised layers: linear maps and embeddings as integers with a scale and a bias a group (`mlx.nn.quantize`).

The modules keep their names; of each quantised one `weight` (uint32), `scales` and `biases` are stored
(`spec/quantization.py`). Nothing here is trained: quantised weights are frozen.

Shapes: V vocabulary, D model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.spec.checkpoint import WEIGHTS, open_checkpoint, save_checkpoint
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.parameters import parameter_shapes
from mlx_transformer.spec.quantization import Quantization, Scheme, described, quantizable

if TYPE_CHECKING:
    from .model import Transformer

Quantized = nn.QuantizedLinear | nn.QuantizedEmbedding


def quantize(model: Transformer, scheme: Scheme) -> None:
    """Quantise in place every linear map and embedding whose width is a multiple of the group; others stay as they are.

    Raises `UserError` if nothing can be quantised, or something is already.
    """
    if quantization_of(model):
        raise UserError("the model is quantised already; quantise the one that it was made from")
    shapes = quantizable(parameter_shapes(model.config))
    chosen = {name: scheme for name, shape in shapes.items() if scheme.divides(shape)}
    if not chosen:
        widths = ", ".join(map(str, sorted({width for _, width in shapes.values()})))
        raise UserError(f"no matrix (widths {widths}) has groups of {scheme.group_size}: choose a smaller group size")
    use_quantized_layers(model, chosen)


def use_quantized_layers(model: Transformer, quantization: Quantization) -> None:
    """Put MLX's quantised layers in the place of those whose weight is named; they hold the same values, rounded."""

    def wanted(path: str, module: nn.Module) -> bool | dict[str, object]:
        scheme = quantization.get(f"{path}.weight")
        return False if scheme is None else {"group_size": scheme.group_size, "bits": scheme.bits, "mode": "affine"}

    nn.quantize(model, class_predicate=wanted)


def quantization_of(model: nn.Module) -> dict[str, Scheme]:
    """{parameter: scheme} of the quantised layers."""
    found = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}
    return {f"{path}.weight": Scheme(m.group_size, m.bits) for path, m in sorted(found.items())}


def matrix(layer: nn.Module) -> mx.array:
    """The weight (V, D) of a linear map or an embedding, quantised or not."""
    if not isinstance(layer, Quantized):
        return cast(mx.array, layer.weight)
    return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def dense_weights(model: Transformer) -> dict[str, np.ndarray]:
    """As `model.weights()`, with the values of quantised matrices in the table's shapes."""
    quantized = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}
    found = {}
    for name, array in model.weights().items():
        path, _, part = name.rpartition(".")
        if path not in quantized or part == "bias":
            found[name] = array
        elif part == "weight":
            found[name] = np.array(matrix(quantized[path]).astype(mx.float32))
    return found


def quantize_checkpoint(folder: str | Path, out: str | Path, scheme: Scheme) -> str:
    """Write a checkpoint's quantised copy, tokenizer included; returns what was done in words.

    Raises `UserError` for a damaged or already quantised checkpoint, or if `out` is the checkpoint itself.
    """
    from .model import Transformer

    checkpoint = open_checkpoint(folder)
    if Path(out).exists() and Path(out).samefile(checkpoint.folder):
        raise UserError(f"{out}: is the checkpoint itself, whose weights would be lost; give another folder")
    if checkpoint.quantization:
        raise UserError(f"{folder}: is quantised already; quantise the checkpoint that it was made from")
    model = Transformer.load(checkpoint.folder)
    model.set_dtype(mx.float32)  # from lower precisions -bias / scale isn't whole, and fast kernels want zero points
    quantize(model, scheme)
    quantization = quantization_of(model)
    text = checkpoint.tokenizer_path.read_text(encoding="utf-8") if checkpoint.tokenizer_path else None
    save_checkpoint(out, model.config, model.weights(), text, quantization=quantization)
    sizes = [(path / WEIGHTS).stat().st_size / 1e6 for path in (checkpoint.folder, Path(out))]
    return f"{described(quantization, parameter_shapes(model.config))}; {sizes[0]:.1f} MB became {sizes[1]:.1f} MB"
