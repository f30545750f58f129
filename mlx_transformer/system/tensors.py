"""Arrays of safetensors files, strictly parsed: damage is a `UserError` that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .errors import UserError
from .files import open_file
from .stored import BFLOAT16, Kind, Stored, read_piece

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
