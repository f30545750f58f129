"""The passes of an encoder over a list of texts, a part of them each, and how many run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")
W = TypeVar("W")

BATCH_TOKENS = 4096
"""Tokens computed at the same time, padding included; a longer row is computed alone."""


class Passes:
    """One after the other, as a runtime computes them that has no better way."""

    at_once = 1
    """How many run at the same time."""

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Run `compute` on all work, in any order."""
        return map(compute, work)


ONE_AT_A_TIME = Passes()


def of_one_length(lengths: ArrayLike, tokens: int = BATCH_TOKENS) -> list[NDArray[np.intp]]:
    """Return which rows of these lengths (N,) are computed together: of one length, at most so many tokens, the longest
    first."""
    counts = np.asarray(lengths, np.int64)
    order = np.argsort(-counts, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(counts[order])) + 1) if len(order) else []
    sizes = [max(1, tokens // int(counts[group[0]])) for group in groups]
    return [group[i : i + size] for group, size in zip(groups, sizes, strict=True) for i in range(0, len(group), size)]
