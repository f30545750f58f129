"""The passes of an encoder over a list of texts, a part of them each, and how many run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
W = TypeVar("W")


class Passes:
    """One after the other, as a runtime computes them that has no better way."""

    at_once = 1
    """How many run at the same time."""

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Run `compute` on all work, in any order."""
        return map(compute, work)


ONE_AT_A_TIME = Passes()
