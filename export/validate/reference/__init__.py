"""The Transformer and its search in NumPy, float64: the third opinion in every comparison."""

from __future__ import annotations

from .network import Cache, Parameters, Reference, Tap

__all__ = ["Cache", "Parameters", "Reference", "Tap"]
