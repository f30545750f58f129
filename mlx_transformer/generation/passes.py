"""Split a list of texts into forward passes of an encoder, and run these one by one or several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")
W = TypeVar("W")

BATCH_TOKENS = 4096
"""Tokens of one forward pass, padding included; a longer row has a pass to itself."""


class Passes:
    """Run passes one after the other. A runtime with threads to spare has its own subclass."""

    at_once = 1
    """How many passes run at the same time."""

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Call `compute` on each item of `work`; results may come in any order."""
        return map(compute, work)


ONE_AT_A_TIME = Passes()


def of_one_length(lengths: ArrayLike, tokens: int = BATCH_TOKENS) -> list[NDArray[np.intp]]:
    """Group rows by length: return lists of row indices, longest first, each with at most `tokens` tokens.

    >>> of_one_length([3, 5, 3])
    [array([1]), array([0, 2])]
    """
    counts = np.asarray(lengths, np.int64)
    order = np.argsort(-counts, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(counts[order])) + 1) if len(order) else []
    sizes = [max(1, tokens // int(counts[group[0]])) for group in groups]
    return [group[i : i + size] for group, size in zip(groups, sizes, strict=True) for i in range(0, len(group), size)]
