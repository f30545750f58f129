"""Small models with random weights, written as a checkpoint folder and exported, for comparisons."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from export.package import export_onnx
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.text_embedding import TextEmbedding


def random_weights(config: TransformerConfig, seed: int) -> dict[str, np.ndarray]:
    """Every parameter random, norms and biases too, at scales that keep activations of order one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            values = 0.1 * values + (1 if name.endswith("norm.weight") else 0)
        elif "embedding" in name or "positions" in name:
            values *= config.d_model**-0.5
        else:
            values *= shape[1] ** -0.5
        weights[name] = values.astype(np.float32)
    return weights


def write_model(
    config: TransformerConfig,
    folder: Path,
    seed: int = 0,
    scheme: Scheme | None = None,
    embedding: TextEmbedding | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> tuple[Path, Path]:
    """(checkpoint folder, ONNX folder); `scheme`: the checkpoint is quantised by MLX; `embedding`: how it makes a
    text's vector; `texts`: further files of it; options: of `export_onnx`."""
    checkpoint = folder / "model"
    own = ({}, {}) if embedding is None else (embedding.texts(), embedding.tensors())
    made = {**own[0], **texts}
    save_checkpoint(checkpoint, config, random_weights(config, seed), texts=made, tensors=own[1], force=True)
    if scheme is not None:
        from mlx_transformer.convert.quantize import quantize_checkpoint  # not at the top: most models need no MLX

        quantize_checkpoint(checkpoint, folder / "quantised", scheme)
        checkpoint = folder / "quantised"
    return checkpoint, export_onnx(checkpoint, folder / "onnx", **options, force=True)
