"""Examples, from which batches are cut: pairs of sequences, with bounds on their lengths that hold in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

from .ragged import Ragged, ragged

Rows = list[NDArray]


class Examples:
    """N examples of an epoch. `source_lengths`, `target_lengths` (N,) int32: no example is longer in any epoch, so
    that the batches of all epochs are cut alike. `rows` gives their tokens. `dropped`: pairs that are in none."""

    source_lengths: NDArray
    target_lengths: NDArray
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.source_lengths)

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        """Return source and target ids of the examples `members` in an epoch; each ends with eos."""
        raise NotImplementedError


class Pairs(Examples):
    """Each pair once, the same in every epoch."""

    def __init__(self, source: Ragged | Sequence[Sequence[int]], target: Ragged | Sequence[Sequence[int]]):
        if len(source) != len(target):
            raise UserError(f"{len(source)} sources and {len(target)} targets; batches need pairs")
        self.source = source if isinstance(source, Ragged) else ragged(source)
        self.target = target if isinstance(target, Ragged) else ragged(target)
        self.source_lengths, self.target_lengths = self.source.lengths, self.target.lengths

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        return [self.source[i] for i in members], [self.target[i] for i in members]


def usable(examples: Examples, max_length: int) -> NDArray:
    """Return the indices of those with 1 to `max_length` tokens on each side: (n,) int32, ascending."""
    fits = np.ones(len(examples), dtype=bool)
    for lengths in (examples.source_lengths, examples.target_lengths):
        fits &= (lengths > 0) & (lengths <= max_length)
    return np.flatnonzero(fits).astype(np.int32)


def cells(first: NDArray, second: NDArray) -> tuple[NDArray, NDArray]:
    """Return the distinct pairs (first[i], second[i]), ascending, as (cells, 2) int64, and for each i its pair's index.

    Linear in time where the numbers are small, as lengths are.
    """
    width = int(second.max()) + 1
    code = first.astype(np.int64) * width + second
    if int(first.max() + 1) * width <= 1 << 24:
        codes = np.flatnonzero(np.bincount(code))
        number = np.zeros(int(codes[-1]) + 1, np.uint16 if len(codes) <= 1 << 16 else np.int32)
        number[codes] = np.arange(len(codes))
        cell_of = number[code]
    else:
        codes, cell_of = np.unique(code, return_inverse=True)
    return np.stack(np.divmod(codes, width), axis=1), cell_of.ravel()
