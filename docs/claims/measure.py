"""From arrays of MLX to numbers of Python."""

from __future__ import annotations

from typing import cast

import mlx.core as mx


def number(x: mx.array) -> float:
    """The value of an array of one."""
    return cast(float, x.item())


def largest(x: mx.array) -> float:
    """max |x|"""
    return number(mx.abs(x).max())


def how_many(x: mx.array) -> int:
    """Elements that are not zero."""
    return int(number(mx.sum(x != 0)))
