"""Sequences of unequal length, one after another: in memory, or in files that stay on disk."""

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

PART = 20_000  # sequences that are lists of Python's at one time


@dataclass(frozen=True)
class Ragged:
    """N sequences of token ids. `lengths` (N,) int32; `starts` (N,) int64, where each begins in `read`'s numbering."""

    lengths: NDArray
    starts: NDArray
    read: Callable[[int, int], NDArray]
    """(start, count) -> that many ids."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray:
        return self.read(int(self.starts[index]), int(self.lengths[index]))

    def select(self, indices: NDArray) -> Ragged:
        """Return the sequences at `indices`, in that order, or where a mask is True; only their places are copied."""
        return Ragged(self.lengths[indices], self.starts[indices], self.read)


def ragged(sequences: Iterable[Sequence[int]]) -> Ragged:
    """Hold sequences in memory, 4 bytes a token and 12 a sequence; only a part of an iterator is ever a list."""
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
    """Open sequences in files of ids of this type, each with the lengths of its sequences.

    Files are read, not mapped: pages of a mapped file count as this process's memory, and one that has become shorter
    ends the process. Here that is a `UserError`.
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
    """A file of ids that is open as long as somebody may read it."""

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
    """Return the rows, then rows of padding: (height, width) int32."""
    out = np.full((height, width), pad, dtype=np.int32)
    if rows:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        out[: len(rows)][np.arange(width) < lengths[:, None]] = np.concatenate(rows)
    return out
