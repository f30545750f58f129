"""Dropout (section 5.4) with repeatable draws: gradient checkpointing computes a layer twice with the same mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx import nn

_keys: list[Iterator[mx.array]] = []


class Dropout(nn.Module):
    """In training, set each element to 0 with this probability and divide the others by 1 - probability."""

    def __init__(self, probability: float):
        super().__init__()
        self.keep = 1 - probability

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training or self.keep == 1:
            return x
        mask = mx.random.bernoulli(self.keep, x.shape, key=next(_keys[-1]) if _keys else None)
        return (mask * x) * (1 / self.keep)


def drawn_key() -> mx.array:
    """A random key; `drawing_from(key)` makes the same draws again."""
    return next(_keys[-1]) if _keys else mx.random.randint(0, 2**31 - 1, (2,), dtype=mx.uint32)


@contextmanager
def drawing_from(key: mx.array) -> Iterator[None]:
    """Within this block, draw dropout masks from `key` instead of MLX's random state."""
    _keys.append(_split(key))
    try:
        yield
    finally:
        _keys.pop()


def _split(key: mx.array) -> Iterator[mx.array]:
    while True:
        key, drawn = mx.random.split(key)
        yield drawn
