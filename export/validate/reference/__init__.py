"""The reference: the Transformer and its search in NumPy with float64, the truth in every comparison."""

from __future__ import annotations

from .network import Cache, Parameters, Reference, Tap

__all__ = ["Cache", "Parameters", "Reference", "Tap"]
