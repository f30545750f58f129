"""Token sequences of different lengths (`Ragged`), in memory or on disk, and `Examples`, from which batches are cut."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_regular

PART = 20_000  # most sequences held as Python lists at a time


@dataclass(frozen=True)
class Ragged:
    """N sequences of token ids, stored one after another. lengths (N,) int32; starts (N,) int64."""

    lengths: NDArray
    starts: NDArray
    read: Callable[[int, int], NDArray]
    """(start, count) -> `count` ids, from id number `start` on."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray:
        return self.read(int(self.starts[index]), int(self.lengths[index]))

    def select(self, indices: NDArray) -> Ragged:
        """The sequences at `indices` in this order, or where a bool mask is True. Doesn't copy the ids."""
        return Ragged(self.lengths[indices], self.starts[indices], self.read)


def ragged(sequences: Iterable[Sequence[int]]) -> Ragged:
    """Store sequences in memory: 4 bytes per token and 12 per sequence.

    An iterator is consumed `PART` sequences at a time.
    """
    lengths, ids, sequences = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], iter(sequences)
    while part := list(itertools.islice(sequences, PART)):
        lengths.append(np.fromiter(map(len, part), np.int32, len(part)))
        ids.append(np.fromiter(itertools.chain.from_iterable(part), np.int32, int(lengths[-1].sum())))
    flat, counts = np.concatenate(ids), np.concatenate(lengths)
    return Ragged(counts, starts_of(counts), lambda start, count: flat[start : start + count])


def starts_of(lengths: NDArray) -> NDArray:
    starts = np.cumsum(lengths, dtype=np.int64)
    starts -= lengths
    return starts


def ragged_files(files: Sequence[tuple[Path, NDArray]], dtype: np.dtype) -> Ragged:
    """Open sequences that stay on disk. files: (file of ids of type `dtype`, lengths of its sequences).

    Files aren't memory-mapped. Pages of a mapped file would count as this process's memory, and a file that has become
    shorter would crash the process; here it raises UserError.
    """
    opened = [_IdFile(path, dtype) for path, _ in files]
    counts = [lengths for _, lengths in files]
    ends = np.cumsum([int(lengths.sum(dtype=np.int64)) for lengths in counts])

    def read(start: int, count: int) -> NDArray:
        place = int(np.searchsorted(ends, start, side="right")) if len(opened) > 1 else 0
        return opened[place].read(start - (int(ends[place - 1]) if place else 0), count)

    lengths = counts[0] if len(counts) == 1 else np.concatenate(counts)
    return Ragged(lengths, starts_of(lengths), read)


class _IdFile:
    """A file of ids, kept open while the object lives."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        with open_regular(path) as file:
            self._handle = os.dup(file.fileno())

    def read(self, start: int, count: int) -> NDArray:
        size = self._dtype.itemsize
        try:
            data = os.pread(self._handle, count * size, start * size)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read ({error.strerror or error})") from error
        if len(data) != count * size:
            raise UserError(f"{self._path}: has become shorter; remove {self._path.parent}, it is made anew")
        return np.frombuffer(data, self._dtype)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


def padded(rows: Sequence[NDArray], height: int, width: int, pad: int) -> NDArray:
    """Pad rows on the right, and add rows of padding: (height, width) int32.

    >>> padded([np.array([5, 6]), np.array([7])], height=3, width=2, pad=0)
    array([[5, 6],
           [7, 0],
           [0, 0]], dtype=int32)
    """
    out = np.full((height, width), pad, dtype=np.int32)
    if rows:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        out[: len(rows)][np.arange(width) < lengths[:, None]] = np.concatenate(rows)
    return out


Rows = list[NDArray]


class Examples:
    """The N examples of an epoch: pairs of sequences, whose tokens may change from epoch to epoch (`rows`).

    source_lengths, target_lengths (N,) int32: upper bounds for all epochs, so that batches are cut the same way in
    each. dropped: the number of pairs that are in no example.
    """

    source_lengths: NDArray
    target_lengths: NDArray
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.source_lengths)

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        """Return (source ids, target ids) of the examples `members` in an epoch; each row ends with eos."""
        raise NotImplementedError


class Pairs(Examples):
    """Examples that are the same in every epoch, each pair once."""

    def __init__(self, source: Ragged | Sequence[Sequence[int]], target: Ragged | Sequence[Sequence[int]]):
        if len(source) != len(target):
            raise UserError(f"{len(source)} sources and {len(target)} targets; batches need pairs")
        self.source = source if isinstance(source, Ragged) else ragged(source)
        self.target = target if isinstance(target, Ragged) else ragged(target)
        self.source_lengths, self.target_lengths = self.source.lengths, self.target.lengths

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        return [self.source[i] for i in members], [self.target[i] for i in members]


def usable(examples: Examples, max_length: int) -> NDArray:
    """Indices of the examples with 1 to `max_length` tokens on each side: (n,) int32, ascending."""
    fits = np.ones(len(examples), dtype=bool)
    for lengths in (examples.source_lengths, examples.target_lengths):
        fits &= (lengths > 0) & (lengths <= max_length)
    return np.flatnonzero(fits).astype(np.int32)


def cells(first: NDArray, second: NDArray) -> tuple[NDArray, NDArray]:
    """Return (the distinct pairs (first[i], second[i]), ascending, (cells, 2) int64; for each i its pair's index).

    Takes linear time if the numbers are small, e.g. lengths.
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
