"""Arrays that stay in their files until their numbers are asked for, so that a model passes through memory piece by
piece. Nothing is mapped into memory, where what was read would stay."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .files import check_written, open_file


class Kind(NamedTuple):
    """The type of a file's numbers, and what they are read as."""

    stored: np.dtype
    read: np.dtype

    @classmethod
    def of(cls, dtype: Any) -> Kind:
        return cls(np.dtype(dtype), np.dtype(dtype))

    def as_read(self, numbers: NDArray) -> NDArray:
        return numbers if self.stored == self.read else (numbers.astype(np.uint32) << 16).view(self.read)


BFLOAT16 = Kind(np.dtype(np.uint16), np.dtype(np.float32))
"""The upper half of a float32 with the same value. NumPy has no such type by itself."""


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a file. NumPy reads it where it needs numbers, each time anew; its parts are arrays like it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], NDArray]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def astype(self, dtype: Any) -> Stored:
        return Stored(self.shape, np.dtype(dtype), lambda: self.read().astype(dtype, copy=False))

    def __getitem__(self, index: Any) -> Stored:
        part = np.broadcast_to(np.zeros((), self.dtype), self.shape)[index]
        return Stored(part.shape, self.dtype, lambda: self.read()[index])


PIECE = 1 << 20
"""Bytes that are read together where nobody keeps them."""


def read_piece(path: Path, begin: int, count: int, dtype: np.dtype) -> NDArray:
    """Read so many numbers (count,) from a byte of a file on; `UserError` for a file that ends before, or that was
    never written there."""
    check_written(path, begin, begin + count * dtype.itemsize)
    array = np.empty(count, dtype)
    with open_file(path) as file:
        file.seek(begin)
        if file.readinto(array.view(np.uint8).data) != array.nbytes:
            raise UserError(f"{path}: ends too early: damaged; restore it from a copy")
    return array


def checksum_of(path: Path, begin: int, size: int) -> int:
    """Return the CRC-32 of a part of a file, read piece by piece."""
    checksum = 0
    with open_file(path) as file:
        file.seek(begin)
        while size > 0 and (piece := file.read(min(size, PIECE))):
            checksum, size = zlib.crc32(piece, checksum), size - len(piece)
    return checksum
