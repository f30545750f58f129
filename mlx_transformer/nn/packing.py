"""Several documents in one row, each by itself: what a decoder is trained on. No exported model needs it.

Shapes: B batch, L positions. `segments` (B, L) integers: equal numbers side by side are one document.
"""

from __future__ import annotations

import mlx.core as mx

from .positions import PositionIds


def document_mask(segments: mx.array) -> mx.array:
    """No query sees a later key or another document: (B, 1, L, L). Every query sees itself."""
    length = segments.shape[1]
    causal = mx.arange(length)[None, :] <= mx.arange(length)[:, None]
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


def positions_in_documents(segments: mx.array) -> PositionIds:
    """0, 1, 2, ... from the start of each document."""
    length = segments.shape[1]
    places = mx.arange(length)[None, :]
    begins = mx.concatenate([mx.ones((segments.shape[0], 1), mx.bool_), segments[:, 1:] != segments[:, :-1]], axis=1)
    return PositionIds(places - mx.cummax(mx.where(begins, places, 0), axis=1), length)
