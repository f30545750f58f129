"""An exported folder opened and run with ONNX Runtime: `OnnxTransformer`. Nothing here imports onnx."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transformer import OnnxTransformer

__all__ = ["OnnxTransformer"]


def __getattr__(name: str) -> Any:
    """Loaded on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.transformer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
