"""What a validation found: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import EXIT_EQUAL, EXIT_MISMATCH
    from .report import Report

# Loaded on first use.
_HOMES = {"Report": "report", "EXIT_EQUAL": "data", "EXIT_MISMATCH": "data"}
__all__ = ["Report", "EXIT_EQUAL", "EXIT_MISMATCH"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
