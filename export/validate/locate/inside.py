"""The points inside the sub-layers, the same names on all sides, and the operation that each one is the result of.

attention       query_proj key_proj value_proj queries keys values scores weights context, then the tap itself
feed-forward    up_proj gate_proj inner, then the tap itself
around each     X.residual (the sum), X_norm (the norm of sub-layer X)
embedding       rows scaled, then the tap itself

A point is judged on the reference's own inputs: all points before it are replaced by the reference's values, so what is
wrong at a point was done wrong there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.spec.config import TransformerConfig

Array = NDArray

ATTENTION = {
    "query_proj": "query projection",
    "key_proj": "key projection",
    "value_proj": "value projection",
    "queries": "queries: heads split, rotary positions",
    "keys": "keys: heads split, rotary positions, earlier keys from the cache",
    "values": "values: heads split, earlier values from the cache",
    "scores": "scores: Q K^T / sqrt(d_k)",
    "weights": "mask and softmax",
    "context": "weights times values, heads merged",
    "residual": "residual connection",
}
FEED_FORWARD = {
    "up_proj": "up projection",
    "gate_proj": "gate projection",
    "inner": "activation",
    "residual": "residual connection",
}
EMBEDDING = {"rows": "embedding row", "scaled": "embedding scale"}
HEADS_FIRST = ("queries", "keys", "values", "scores", "weights")


def operation(point: str, config: TransformerConfig) -> str:
    """In words, what makes this point out of those before it."""
    place, _, last = point.rpartition(".")
    norm = "layer norm" if config.norm == "layernorm" else "RMS norm"
    if point == "logits":
        return "classifier"
    if last.endswith("norm"):
        return f"{norm} after the stack" if last == "norm" else norm
    if last in ("self_attention", "cross_attention"):
        return "output projection"
    if last == "feed_forward":
        return "down projection"
    if last == "embedding":
        return "positions" if config.positions in ("sinusoidal", "sinusoidal_concat", "learned") else "embedding"
    if last.isdigit():
        return norm if config.norm_placement == "post" else "residual connection"
    table = EMBEDDING if place.endswith("embedding") else FEED_FORWARD if "feed_forward" in place else ATTENTION
    return table[last]


def positions_first(point: str, value: Array) -> Array:
    """(B,H,L,d) -> (B,L,H,d) where heads come first."""
    return value.swapaxes(1, 2) if point.rpartition(".")[2] in HEADS_FIRST and value.ndim == 4 else value


def valid_at(point: str, case: Case, part: slice | None, length: int) -> NDArray[np.bool_]:
    """(B,L): the positions of a point that count. `part`: the decoder's positions in this pass, if not all."""
    of_keys = point.rpartition(".")[2] in ("keys", "values", "key_proj", "value_proj")
    if point.startswith("encoder.") or ("cross_attention" in point and of_keys):
        return case.source_real
    real = case.valid("logits")
    if part is None:
        return real
    return real[:, part.stop - length : part.stop]
