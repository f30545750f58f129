"""Names of the points that the reference shows, in the order of the data's way through the network.

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.self_attention   decoder.layers.0.cross_attention   ...   decoder.norm   logits

These are the taps; the points inside the sub-layers are named in `inside.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from export.reference import Reference
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.parameters import parameter_shapes


def tap_names(config: TransformerConfig) -> list[str]:
    return list(_points(config, inside=False))


def inside_names(config: TransformerConfig) -> list[str]:
    """With the points inside the sub-layers, of a full pass; those of the memory's keys and values come first there."""
    return list(_points(config, inside=True))


@cache
def _points(config: TransformerConfig, inside: bool) -> tuple[str, ...]:
    """Of a batch without rows and of weights that take no room: nothing is computed."""
    weights = {name: np.broadcast_to(0.0, shape) for name, shape in parameter_shapes(config).items()}
    ids = np.zeros((0, 1), np.int64)
    found: list[str] = []
    reference = Reference(config, weights, inside=inside)
    reference(
        ids, ids if config.architecture == "encoder-decoder" else None, tap=lambda name, value: found.append(name)
    )
    return tuple(found)


def natural_order(taps: Iterable[str]) -> list[str]:
    """Each tap once, in the order of the data, whatever paths they were seen on: that of their first appearance."""
    return list(dict.fromkeys(taps))
