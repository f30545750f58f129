"""The metadata of a file with a search, or of an encoder of texts. Imports neither onnx nor ONNX Runtime: files are
also written, and also run, where one of them isn't installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import SETTINGS
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales
from mlx_transformer.decoding.options import PENALTY_OFFSETS, aligned_right
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.files import parse_json

CONFIG = "mlx_transformer.config"
"""Metadata key: the model's TransformerConfig as JSON."""
PRECISION = "mlx_transformer.precision"
"""Metadata key: the precision, e.g. "int8"; the names are those of `precision.table.PRECISIONS`."""
ACTIVATIONS = "mlx_transformer.activations"
"""Metadata key: the type of activations, if the precision leaves the choice."""
SCALES = "mlx_transformer.int8_scales"
"""Metadata key: the text of int8_scales.json, if int8 has fixed scales or leaves layers in float32."""
TOKENIZER = "mlx_transformer.tokenizer"
"""Metadata key: the model's tokenizer.json, if any; with it the runtime reads text and cuts long lines."""
GENERATION = "mlx_transformer.generation"
"""Metadata key: the model's default generation settings as JSON (fields of `Options`), if it has any."""
ATTENTION = "mlx_transformer.cross_attention"
"""Metadata key: the decoder layer whose cross-attention is an output, if any."""
VECTOR = "mlx_transformer.embedding"
"""Metadata key: how a text's vector is made, as in embedding.json; only in an encoder's file."""
SOURCE = "mlx_transformer.source"
"""Metadata key: SHA-256 of the checkpoint's weights."""
GIVEN = "mlx_transformer.shortlist"
"""Metadata key: the digest of the shortlist given to the export, as JSON, or "none"; if missing, the model's own
applies."""


def check_file(file: Path, precision: str | None) -> None:
    """Raise UserError if this file can't be a model, or if a precision is chosen, of which a file has only one."""
    if file.suffix != ".onnx":
        raise UserError(f"{file}: is a file; a model is a folder, or one .onnx file that `export --search` wrote")
    if precision is not None:
        raise UserError(f"{file}: is of one precision; leave out --precision")


TEXT_DOMAIN = "ai.onnx.contrib"
"""The domain of onnxruntime-extensions' operators."""


HOSTS = ("max_new_tokens", "rows", "seed", "prefix", "candidates", "penalty_offset", "banned_sequences", "start_id")
"""Inputs computed from options, or from the batch."""


def inputs_of(settings: Mapping[str, Any]) -> dict[str, NDArray]:
    """The graph's option inputs by name, from fields of `Options`. Options not in `settings` keep their defaults.

    Raises UserError for those that a graph with the search in it doesn't have."""
    for name in ("min_p", "presence_penalty", "frequency_penalty", "speculate"):
        if settings.get(name):
            raise UserError(
                "{}: no option of a model with the search inside: use its folder", Name(name, str(settings[name]))
            )
    inputs = {n: np.asarray(settings[n], s.dtype) for n, s in SETTINGS.items() if n in settings and n not in HOSTS}
    if settings.get("max_new_tokens") is not None:
        inputs["max_new_tokens"] = np.array([settings["max_new_tokens"]], np.int64)
    if "penalty_form" in settings:
        inputs["penalty_offset"] = np.asarray(PENALTY_OFFSETS[settings["penalty_form"]], np.float32)
    if "banned_sequences" in settings:
        inputs["banned_sequences"] = aligned_right(settings["banned_sequences"])
    if "start_id" in settings:
        inputs["start_id"] = np.asarray(-1 if settings["start_id"] is None else settings["start_id"], np.int64)
    if "seed" in settings:
        inputs["seed"] = np.asarray(settings["seed"], np.uint64).view(np.int64)
    return inputs


def int8_scales_of(metadata: Mapping[str, str], config: TransformerConfig, path: Path) -> Int8Scales | None:
    """The fixed int8 scales and float32 layers in a file's metadata; None if there are none. Raises UserError if
    they are damaged."""
    if SCALES not in metadata:
        return None
    where, hint = f"{path}: {INT8_SCALES}", "write it again with export --search"
    return Int8Scales.parse(parse_json(metadata[SCALES], f"{where}: not JSON", hint), config, where)
