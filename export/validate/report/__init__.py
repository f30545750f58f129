"""What a validation found: as data, in the terminal, as JSON and as a page."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import (
        EXIT_BAD_INPUT,
        EXIT_EQUAL,
        EXIT_MISMATCH,
        EXIT_UNAVAILABLE,
        PLAIN,
        TAPPED,
        Parting,
        Point,
        Report,
        Runtime,
        Tokens,
        Weights,
    )

__all__ = [
    "Report",
    "Point",
    "Tokens",
    "Weights",
    "Runtime",
    "Parting",
    "TAPPED",
    "PLAIN",
    "EXIT_EQUAL",
    "EXIT_MISMATCH",
    "EXIT_BAD_INPUT",
    "EXIT_UNAVAILABLE",
]


def __getattr__(name: str) -> Any:
    """Loaded on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.data"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
