"""The parameters of a network by name, and their initial values."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import BARRED, added_table_names, embedding_names, target_embedding_name
from mlx_transformer.system.tensors import Stored, number_type

from .lora import delta_of
from .quantize import Quantized, as_numpy, values


def initialise(model: nn.Module, config: TransformerConfig) -> None:
    """Draw the initial values from MLX's random state.

    Embeddings come from N(0, 1/d_model): multiplied by sqrt(d_model) they have unit variance. Other matrices are Xavier
    uniform (Glorot and Bengio 2010), biases 0. Norms have set their weight to 1 and their bias to 0 already.
    If a decoder's start token is padding, its embedding is zeros, as in Marian, and its output bias forbids it.
    """
    normal, xavier = nn.init.normal(std=config.d_model**-0.5), nn.init.glorot_uniform()
    tables, fresh = embedding_names(config) | added_table_names(config), []
    for name, value in named_parameters(model):
        if value.ndim == 2:
            fresh.append((name, normal(value) if name in tables else xavier(value, 1.0)))
        elif name.endswith("_proj.bias"):
            fresh.append((name, mx.zeros_like(value)))
    if config.has_decoder and config.bos_id == config.pad_id:
        start = {target_embedding_name(config): 0.0, "output_proj.bias": BARRED}
        for name, value in fresh:
            if name in start:
                value[config.bos_id] = start[name]
    model.load_weights(fresh, strict=False)


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """(name, array) of every parameter, in the order of the modules."""
    return named_arrays(model.parameters())


def named_arrays(tree: Any) -> list[tuple[str, mx.array]]:
    """(name, array) of a tree of arrays, such as gradients or an optimizer's state."""
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def stored_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter by name as a NumPy array of its own type. A quantised matrix has three entries: weight (packed
    integers), scales and biases."""
    return {name: as_numpy(value) for name, value in named_parameters(model)}


def dense_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Every parameter by name, with quantised matrices dequantised to float32 and their adapters merged."""
    return {name: np.asarray(array) for name, array in dense_parameters(model).items()}


def dense_parameters(model: nn.Module) -> dict[str, Stored]:
    """Like `dense_weights`, but each is computed when it is read."""
    quantized = {path: m for path, m in model.named_modules() if isinstance(m, Quantized)}

    def dense(layer: Quantized) -> np.ndarray:
        weight, change = values(layer).astype(np.float32), delta_of(layer)
        return weight if change is None else change.of(weight).astype(np.float32)

    weights = {}
    for name, array in named_parameters(model):
        path, _, part = name.rpartition(".")
        if path not in quantized or part == "bias":
            kind = number_type(str(array.dtype).removeprefix("mlx.core."))
            weights[name] = Stored(array.shape, kind, partial(as_numpy, array))
        elif part == "weight":
            shape = array.shape[0], array.shape[1] * 32 // quantized[path].bits
            weights[name] = Stored(shape, np.dtype(np.float32), partial(dense, quantized[path]))
    return weights
