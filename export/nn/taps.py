"""Taps: named points inside a forward pass. In a graph a tap is the name of a value, so it costs nothing.

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.cross_attention  ...                             decoder.norm       logits
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

Tap = Callable[[str, ir.Value], None]


def no_tap(name: str, value: ir.Value) -> None:
    """Observe nothing: the default tap."""


def within(tap: Tap, scope: str) -> Tap:
    """Return a tap whose names start with `scope`; the empty name is the scope itself."""
    if tap is no_tap:
        return no_tap
    return lambda name, value: tap(f"{scope}.{name}" if name else scope, value)
