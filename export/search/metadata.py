"""The facts that a file with a search states about itself, by the keys of its metadata, the domain of its text
operators, and what its inputs are for the options of a search. Nothing here needs onnx: files are run where it isn't
installed.

The one file that `export_search` wrote, opened: a translator's, or that of an encoder of texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.interface import SETTINGS
from export.runtime.sessions import CPU, SLOW_FUSIONS, Session, session_options
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales
from mlx_transformer.decoding.options import PENALTY_OFFSETS, aligned_right
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.manifest import verify_file

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
VECTOR = "mlx_transformer.embedding"
"""Likewise: how a text's vector is made, as in embedding.json, in a file that takes text and gives vectors."""
SOURCE = "mlx_transformer.source"
"""Likewise: SHA-256 of the checkpoint's weights."""
GIVEN = "mlx_transformer.shortlist"
"""Likewise: the digest of a shortlist that the export was given, as JSON, or "none"; without it the model's own."""


def check_file(file: Path, precision: str | None) -> None:
    """Raise `UserError` if a file by this name is no model, or if it is asked for one of several precisions."""
    if file.suffix != ".onnx":
        raise UserError(f"{file}: is a file; a model is a folder, or one .onnx file that `export --search` wrote")
    if precision is not None:
        raise UserError(f"{file}: is of one precision; leave out --precision")


TEXT_DOMAIN = "ai.onnx.contrib"
"""The domain of `onnxruntime-extensions`' operators."""


HOSTS = ("max_new_tokens", "rows", "seed", "prefix", "candidates", "penalty_offset", "banned_sequences", "start_id")
"""Inputs that are not simply an option's value."""


def inputs_of(settings: Mapping[str, Any]) -> dict[str, NDArray]:
    """Return inputs by name for fields of `Options`; those that nothing is said of keep their default."""
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
    """Return what int8 has fixed and what it leaves in float32; None of a file that says nothing. `UserError` for a
    damaged one."""
    if SCALES not in metadata:
        return None
    where, hint = f"{path}: {INT8_SCALES}", "write it again with export --search"
    return Int8Scales.parse(parse_json(metadata[SCALES], f"{where}: not JSON", hint), config, where)


EXTENSIONS = "onnxruntime_extensions"


@dataclass(frozen=True)
class OneFile:
    """A file that `export_search` wrote, opened for ONNX Runtime."""

    path: Path
    session: Session
    metadata: dict[str, str]
    config: TransformerConfig

    @classmethod
    def open(cls, path: str | Path, threads: int | None, providers: Sequence[str] | None, verify: bool) -> OneFile:
        """Open it; `UserError` if it is none, or damaged."""
        path = Path(path)
        if verify:
            verify_file(path)
        session = opened(path, threads, providers)
        metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        if CONFIG not in metadata:
            raise UserError(f"{path}: isn't a search graph of this project: write one with export --search")
        try:
            return cls(path, session, metadata, TransformerConfig.from_json(metadata[CONFIG]))
        except UserError as error:
            raise UserError(f"{path}: {error}; write it again with export --search") from error


def opened(path: Path, threads: int | None, providers: Sequence[str] | None, activations: str | None = None) -> Session:
    """Return a session of the file; `UserError` if ONNX Runtime can't open it."""
    options = session_options(threads or None, activations=activations)
    if find_spec(EXTENSIONS):
        options.register_custom_ops_library(import_module(EXTENSIONS).get_library_path())
    arguments: dict[str, Any] = {"providers": providers or [CPU], "disabled_optimizers": SLOW_FUSIONS}
    try:
        return Session(path, options, **arguments)
    except Exception as error:  # onnxruntime's exceptions have no common base
        reason = str(error).splitlines()[0]
        if TEXT_DOMAIN in str(error) and not find_spec(EXTENSIONS):
            reason = f"its text operators need: {needs('text')}"
        raise UserError(f"{path}: ONNX Runtime can't open it ({reason})") from None
