"""Open a file of `export_search`, of a translator or of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export.runtime.transformer import passes_of

from .metadata import VECTOR
from .opening import OneFile
from .runtime import SearchModel

if TYPE_CHECKING:
    from .vector_model import VectorModel


def open_file(
    path: str | Path,
    *,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
    verify: bool = True,
) -> SearchModel | VectorModel:
    """Open a file of either kind, a translator's or an encoder's; arguments as for `SearchModel`."""
    file = OneFile.open(path, threads, providers, verify)
    if VECTOR in file.metadata:
        from .vector_model import VectorModel  # lazy: imports the tokenizer, 7 MB

        return VectorModel(file.path, file.session, file.metadata, file.config, passes_of(threads, providers))
    return SearchModel(path, threads=threads, providers=providers, file=file)
