"""Read and write safetensors files, one array at a time; damage is a `UserError` with the file's name.

A `Stored` array stays in its file until NumPy needs its numbers, so a model never has to fit into memory as a whole.
Files aren't memory-mapped, as pages already read would stay in memory.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .errors import UserError
from .files import check_written, open_file


def number_type(name: str) -> np.dtype:
    """NumPy's dtype of this name. NumPy lacks bfloat16: ml_dtypes has it, and is loaded only for files with it."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is one of floating-point numbers, bfloat16 included."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def float_type(arrays: Iterable[NDArray | Stored]) -> np.dtype:
    """The type of most of these floating-point numbers; float32 if there are none."""
    counts = Counter[np.dtype]()
    for array in arrays:
        if is_float(array.dtype):
            counts[array.dtype] += math.prod(array.shape)
    return max(counts, key=counts.__getitem__, default=np.dtype(np.float32))


def to_float32(array: NDArray) -> NDArray:
    """The same numbers, those of 16 bits in float32; exact."""
    return array.astype(np.float32) if is_float(array.dtype) and array.dtype.itemsize == 2 else array


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a file, which is read again each time NumPy needs its numbers. Slices of it are `Stored` too.

    >>> stored = stored_tensors(path)["embedding.weight"]  # nothing is read yet
    >>> stored.shape, np.asarray(stored)[0]  # reads it
    """

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


def some_rows(shape: Sequence[int]) -> Iterator[slice]:
    """All rows of a matrix (O, D), about `PART` numbers at a time."""
    count = max(1, PART // shape[1])
    return (slice(first, first + count) for first in range(0, shape[0], count))


PIECE = 1 << 20
"""Bytes read at a time for a checksum."""


def read_piece(path: Path, begin: int, count: int, dtype: np.dtype) -> NDArray:
    """Read `count` numbers, from byte `begin` of a file on. Raises `UserError` if the file ends too early or has a hole
    there (`check_written`)."""
    check_written(path, begin, begin + count * dtype.itemsize)
    array = np.empty(count, dtype)
    with open_file(path) as file:
        file.seek(begin)
        if file.readinto(array.view(np.uint8).data) != array.nbytes:
            raise UserError(f"{path}: ends too early: damaged; download or copy it again")
    return array


def checksum_of(path: Path, begin: int, size: int) -> int:
    """The CRC-32 of `size` bytes of a file, read in pieces."""
    checksum = 0
    with open_file(path) as file:
        file.seek(begin)
        while size > 0 and (piece := file.read(min(size, PIECE))):
            checksum, size = zlib.crc32(piece, checksum), size - len(piece)
    return checksum


TYPES = {"U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "U32": "uint32", "I32": "int32"}
TYPES |= {"BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "I8": "int8", "U8": "uint8"}
TYPES |= {"BOOL": "bool"}
"""{dtype in a file: NumPy's}, in the order in which safetensors' own writer sorts arrays: widest first, so that each is
aligned."""
NAMES = {kind: name for name, kind in TYPES.items()}

PART = 1 << 20
"""Numbers to check or to convert at a time."""
MOST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors reads."""


def open_tensors(path: Path):
    """Open a safetensors file, to read its arrays one by one. Raises `UserError` for other files."""
    with open_file(path):  # checks for a regular file
        pass
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        if (size := path.stat().st_size) < (whole := _whole_size(path)):
            raise UserError(
                f"{path}: ends after {size:,} of at least {whole:,} bytes; download or copy it again"
            ) from error
        raise UserError(f"{path}: damaged, or no safetensors file ({error}); download or copy it again") from error


def _whole_size(path: Path) -> int:
    """How many bytes a file's header says it has; 0 if the header itself is damaged."""
    with open_file(path) as file:
        length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if not 2 <= length <= size - 8:
            return 8 + length if 2 <= length <= MOST_HEADER else 0
        try:
            ends = [each["data_offsets"][1] for name, each in json.loads(file.read(length)).items() if name[:2] != "__"]
            return 8 + length + int(max(ends, default=0))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return 0


def read_tensors(path: Path) -> dict[str, NDArray]:
    """Read all arrays of a file. Raises `UserError` if the file is damaged or a number isn't finite."""
    return {name: np.asarray(stored) for name, stored in stored_tensors(path).items()}


def stored_tensors(path: Path) -> dict[str, Stored]:
    """All arrays of a file, not yet read, in the file's own types.

    Raises `UserError` if the file is damaged or has an unknown type; reading an array raises it if a number
    isn't finite.
    """
    with open_tensors(path), open_file(path) as file:  # open_tensors checks the header
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in TYPES:
            raise UserError(f"{path}: {name} cannot be read (NumPy has no {entry['dtype']})")

    def stored(name: str, shape: tuple[int, ...], dtype: np.dtype, begin: int, end: int) -> Stored:
        def read() -> NDArray:
            array = read_piece(path, begin, (end - begin) // dtype.itemsize, dtype).reshape(shape)
            check_finite(path, name, array)
            return array

        return Stored(shape, dtype, read)

    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        (begin, end), dtype = entry["data_offsets"], number_type(TYPES[entry["dtype"]])
        tensors[name] = stored(name, tuple(entry["shape"]), dtype, start + begin, start + end)
    return tensors


def check_finite(path: Path, name: str, array: NDArray) -> None:
    if array.dtype.kind not in "iub" and not is_finite(array):
        raise UserError(f"{path}: {name} is not finite: damaged; restore it from a copy")


def is_finite(array: NDArray) -> bool:
    """Whether all numbers are finite. Checked in parts: `np.isfinite` needs a quarter of a float32 array's memory."""
    numbers = array.reshape(-1)
    return all(bool(np.isfinite(numbers[i : i + PART]).all()) for i in range(0, len(numbers), PART))


def write_tensors(path: Path, arrays: Mapping[str, NDArray | Stored], metadata: dict[str, str] | None = None) -> None:
    """Write a file one array at a time. The bytes equal those of safetensors' own writer, which needs all at once."""
    with open(path, "wb") as file:
        for part in _parts(arrays, metadata):
            file.write(part)


def tensor_bytes(arrays: Mapping[str, NDArray | Stored], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes that `write_tensors` would write."""
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
        # np.ascontiguousarray would turn a scalar, e.g. Adam's step, into a vector.
        array = np.asarray(arrays[name], order="C")
        yield array.reshape(-1).view(np.uint8).data
