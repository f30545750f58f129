"""What a file with a search says of itself, by the keys of its metadata, and the domain of its text operators."""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.system.errors import UserError

CONFIG = "mlx_transformer.config"
"""Key in the file's metadata: the model's TransformerConfig as JSON."""
PRECISION = "mlx_transformer.precision"
"""Likewise: one of `precision.PRECISIONS`."""
ACTIVATIONS = "mlx_transformer.activations"
"""Likewise: one of `precision.ACTIVATIONS`, where the precision leaves the choice."""
SCALES = "mlx_transformer.int8_scales"
"""Likewise: the text of int8_scales.json, where int8 has fixed scales."""
TOKENIZER = "mlx_transformer.tokenizer"
"""Likewise: the tokenizer.json of a model that has one, by which whoever runs the file handles text and long lines."""
GENERATION = "mlx_transformer.generation"
"""Likewise: how the model generates unless told otherwise, where it says so: fields of `Options` as JSON."""
ATTENTION = "mlx_transformer.cross_attention"
"""Likewise: the decoder layer whose cross-attention is an output, where one is."""
SOURCE = "mlx_transformer.source"
"""Likewise: SHA-256 of the checkpoint's weights."""


def check_file(file: Path, precision: str | None) -> None:
    """`UserError` if a file by this name is no model, or if it is asked for one of several precisions."""
    if file.suffix != ".onnx":
        raise UserError(f"{file}: is a file; a model is a folder, or one .onnx file that `export --search` wrote")
    if precision is not None:
        raise UserError(f"{file}: is of one precision; leave out --precision")


TEXT_DOMAIN = "ai.onnx.contrib"
"""The domain of `onnxruntime-extensions`' operators."""
