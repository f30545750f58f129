"""Engines: whatever can run a Transformer, behind one protocol (`protocol.py`), opened by name (`registry.py`)."""

from __future__ import annotations

from .protocol import Engine, Node, Placement, Unavailable
from .registry import default_runtimes, open_engine

__all__ = ["Engine", "Node", "Placement", "Unavailable", "default_runtimes", "open_engine"]
