"""The Transformer and its search in NumPy, float64: the third opinion in every comparison."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .network import Cache, Reference, Tap

__all__ = ["Reference", "Cache", "Tap"]


def __getattr__(name: str) -> Any:
    """Loaded on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.network"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
