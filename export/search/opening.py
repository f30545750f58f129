"""A file with a search, or an encoder of texts, opened in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from export.runtime.sessions import CPU, SLOW_FUSIONS, Session, session_options
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.manifest import verify_file

from .metadata import CONFIG, TEXT_DOMAIN

EXTENSIONS = "onnxruntime_extensions"


@dataclass(frozen=True)
class OneFile:
    """An open file of `export_search`."""

    path: Path
    session: Session
    metadata: dict[str, str]
    config: TransformerConfig

    @classmethod
    def open(cls, path: str | Path, threads: int | None, providers: Sequence[str] | None, verify: bool) -> OneFile:
        """Open the file. Raises UserError if it is damaged, or if `export_search` didn't write it."""
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
    """Open a session of the file. Raises UserError if ONNX Runtime can't."""
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
