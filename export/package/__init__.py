"""The folder that is written: weights, files for its consumers, the quality gate. `export_onnx` writes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .write import export_onnx

__all__ = ["export_onnx"]


def __getattr__(name: str) -> Any:
    """Loaded on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.write"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
