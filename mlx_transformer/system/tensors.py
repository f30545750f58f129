"""Arrays that stay in their files until their numbers are asked for, so that a model passes through memory piece by
piece. Nothing is mapped into memory, where what was read would stay.

Arrays of safetensors files, strictly parsed: damage is a `UserError` that names the file.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

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


TYPES = {"U64": np.uint64, "I64": np.int64, "F64": np.float64, "F32": np.float32, "U32": np.uint32, "I32": np.int32}
TYPES |= {"BF16": "bfloat16", "F16": np.float16, "U16": np.uint16, "I16": np.int16, "I8": np.int8}
TYPES |= {"U8": np.uint8, "BOOL": np.bool_}
"""{name in a file: NumPy's type}, in the order in which the format's own writer lays arrays out, the widest first: so
each is aligned."""
NAMES = {kind if isinstance(kind, str) else np.dtype(kind).name: name for name, kind in TYPES.items()}

KINDS = {name: BFLOAT16 if name == "BF16" else Kind.of(kind) for name, kind in TYPES.items()}

PART = 1 << 20
"""Numbers that are looked at together."""


def open_tensors(path: Path):
    """Open a file, whose arrays are read one by one."""
    with open_file(path):  # a regular file
        pass
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def read_tensors(path: Path) -> dict[str, NDArray]:
    """Return all arrays of one file; `UserError` too if one has a number that is not finite."""
    return {name: np.asarray(stored) for name, stored in stored_tensors(path).items()}


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return all arrays of one file, none of them read yet, bfloat16 as float32, which is exact. `UserError` for types
    that NumPy doesn't have, and as they are read for numbers that are not finite."""
    with open_tensors(path), open_file(path) as file:  # the former has checked the header
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in TYPES:
            raise UserError(f"{path}: {name} cannot be read (NumPy has no {entry['dtype']})")

    def stored(name: str, shape: tuple[int, ...], kind: Kind, begin: int, end: int) -> Stored:
        def read() -> NDArray:
            numbers = read_piece(path, begin, (end - begin) // kind.stored.itemsize, kind.stored)
            array = kind.as_read(numbers).reshape(shape)
            check_finite(path, name, array)
            return array

        return Stored(shape, kind.read, read)

    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = stored(name, tuple(entry["shape"]), KINDS[entry["dtype"]], start + begin, start + end)
    return tensors


def check_finite(path: Path, name: str, array: NDArray) -> None:
    if array.dtype.kind not in "iub" and not is_finite(array):
        raise UserError(f"{path}: {name} is not finite: damaged; restore it from a copy")


def is_finite(array: NDArray) -> bool:
    """Return whether all numbers are finite, part by part: what says it of each takes a quarter of their memory."""
    numbers = array.reshape(-1)
    return all(bool(np.isfinite(numbers[i : i + PART]).all()) for i in range(0, len(numbers), PART))


def write_tensors(path: Path, arrays: Mapping[str, NDArray | Stored], metadata: dict[str, str] | None = None) -> None:
    """Write one file, an array at a time: byte by byte what safetensors' own writer makes of all of them at once."""
    with open(path, "wb") as file:
        for part in _parts(arrays, metadata):
            file.write(part)


def tensor_bytes(arrays: Mapping[str, NDArray | Stored], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of the same file."""
    return b"".join(_parts(arrays, metadata))


def _parts(arrays: Mapping[str, NDArray | Stored], metadata: dict[str, str] | None) -> Iterator[bytes | memoryview]:
    kinds = list(NAMES)
    names = sorted(arrays, key=lambda name: (kinds.index(arrays[name].dtype.name), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + arrays[name].nbytes
        kind, shape = NAMES[arrays[name].dtype.name], list(arrays[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        # np.ascontiguousarray would turn a scalar, such as Adam's step, into a vector.
        array = np.asarray(arrays[name], order="C")
        yield array.reshape(-1).view(np.uint8).data
