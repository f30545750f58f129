"""Weights of cross-attention for pairs of texts, from either runtime: what `translate --alignment` is made of where the
model's graphs don't return them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.generation.alignment import CrossWeights, alignment_layer, cross_weights_by

from .opening import open_model


def cross_weights(
    folder: Path, threads: int | None = None, precision: str | None = None, verify: bool = True
) -> CrossWeights:
    """The weights of the layer that `alignment_layer` chooses, from a model that is opened for it. `UserError` as
    `open_model`."""
    runtime = None if precision is None else f"onnxruntime:cpu:all:{precision}"
    model = open_model(folder, runtime, threads, verify)
    name = f"decoder.layers.{alignment_layer(model.config)}.cross_attention.weights"

    def attention(source: NDArray, real: NDArray, read: NDArray) -> NDArray:
        case = Case("pairs", source, None if real.all() else real, read, 1)
        return np.asarray(model.engine.points(case, [name])[name], np.float32).mean(axis=1)

    return cross_weights_by(attention, model.config)
