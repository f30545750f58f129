"""Search inside the graph: one ONNX file that takes source ids, or text, and returns the n best translations.

export_search(checkpoint, "model.onnx")      write one
SearchModel("model.onnx")                    run it: .generate(list_of_id_lists), .translate(list_of_strings)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import SearchModel
    from .write import export_search

# Loaded on first use: building needs no ONNX Runtime, running no onnx.
_HOMES = {"export_search": "write", "SearchModel": "runtime"}
__all__ = ["export_search", "SearchModel"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
