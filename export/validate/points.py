"""Names of the points that the reference shows, in the order of the data's way through the network.

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.self_attention   decoder.layers.0.cross_attention   ...   decoder.norm   logits

These are the taps; the points inside the sub-layers are named in `inside.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes


def tap_names(config: TransformerConfig) -> list[str]:
    return list(_points(config, inner_points=False))


def inner_names(config: TransformerConfig) -> list[str]:
    """Taps and the points inside the sub-layers, of a full pass; the memory's keys and values come first."""
    return list(_points(config, inner_points=True))


@cache
def _points(config: TransformerConfig, inner_points: bool) -> tuple[str, ...]:
    """Names that the reference passes to its tap, for an empty batch and weights that take no memory."""
    weights = {name: np.broadcast_to(0.0, shape) for name, shape in parameter_shapes(config).items()}
    ids = np.zeros((0, 1), np.int64)
    names: list[str] = []
    reference = Reference(config, weights, inner_points=inner_points)
    reference(
        ids, ids if config.architecture == "encoder-decoder" else None, tap=lambda name, value: names.append(name)
    )
    return tuple(names)


def natural_order(taps: Iterable[str]) -> list[str]:
    """Each tap once, in the order of the data, whatever paths they were seen on: that of their first appearance."""
    return list(dict.fromkeys(taps))
