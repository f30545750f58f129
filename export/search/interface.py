"""What a search graph and the code that runs it share; needs none of the packages that build graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlx_transformer.generation.options import Options
from mlx_transformer.system.errors import UserError

CONFIG = "mlx_transformer.config"
"""Key in the file's metadata: the model's TransformerConfig as JSON."""
PRECISION = "mlx_transformer.precision"
"""Likewise: one of `precision.PRECISIONS`."""
ACTIVATIONS = "mlx_transformer.activations"
"""Likewise: one of `precision.ACTIVATIONS`, where the precision leaves the choice."""
TOKENIZER = "mlx_transformer.tokenizer"
"""Likewise: the tokenizer.json of a model that has one, by which whoever runs the file handles text and long lines."""
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


_HOST = Options()
DEFAULTS = {
    "beam": np.asarray(_HOST.beam, np.int64),
    "n_best": np.asarray(_HOST.n_best, np.int64),
    "min_new_tokens": np.asarray(_HOST.min_new_tokens, np.int64),
    "max_new_tokens": np.zeros(1, np.int64),
    "length_penalty": np.asarray(_HOST.length_penalty, np.float32),
    "penalty_offset": np.asarray(_HOST.penalty_offset, np.float32),
    "early_stopping": np.asarray(_HOST.early_stopping, np.bool_),
    "sample": np.asarray(_HOST.sample, np.bool_),
    "temperature": np.asarray(_HOST.temperature, np.float32),
    "top_k": np.asarray(_HOST.top_k, np.int64),
    "top_p": np.asarray(_HOST.top_p, np.float32),
    "seed": np.asarray(_HOST.seed, np.int64),
    "rows": np.full(1, -1, np.int64),
}
"""The inputs that have a default in the file, with their defaults."""

TEXT_DOMAIN = "ai.onnx.contrib"
"""The domain of `onnxruntime-extensions`' operators."""
