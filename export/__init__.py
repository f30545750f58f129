"""The ONNX side: NumPy, onnxscript and onnx_ir, never MLX.

export_onnx(checkpoint, out)      write a checkpoint as ONNX models for ONNX Runtime, Optimum and transformers.js
export_search(checkpoint, file)   write it as one file that holds the search too, and if wanted the tokenizer
OnnxTransformer(folder)           run them: .generate(list_of_id_lists), .translate(list_of_strings)
SearchModel(file)                 the same for the one file
"""

from __future__ import annotations

import os

from .graph.deferred import defer

# ONNX Runtime's wheels for Linux (from 1.31 on) tell their maker of each session, unless they are told not to before
# they are imported, and warn where there is no home to keep an identifier in. Who wants that sets 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
defer()

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from typing import Any

    from .package import export_onnx
    from .runtime import OnnxTransformer
    from .search import SearchModel, export_search

# Loaded on first use: building needs no ONNX Runtime, running no onnx.
_HOMES = {
    "export_onnx": "package",
    "export_search": "search",
    "OnnxTransformer": "runtime",
    "SearchModel": "search",
}
__all__ = ["export_onnx", "export_search", "OnnxTransformer", "SearchModel"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
