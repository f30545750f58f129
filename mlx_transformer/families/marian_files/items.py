"""Read and write Marian's model files, `.bin` and `.npz`: named tensors, the last of which is the model's options.

`.bin`, little-endian:

    u64 version = 1 · u64 n · n x {u64 bytes of the name, u64 type, u64 rank, u64 bytes of the data}
    names, each ended by NUL · shapes, i32 · u64 pad · pad zero bytes · data, from a multiple of 256 on

The bytes of a tensor are padded to a multiple of 256. The padding has no meaning, but is kept, so that reading and
writing a file gives the same bytes. Integers q (intgemm8, intgemm16) are followed by a multiplier m, and stand for
q * (1/m) in float32. They are stored transposed, as (N, K) where the shape says (K, N), except for embeddings.

`.npz`: a zip archive of plain float32 arrays; the options are an array of bytes.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError, error_line, first_of
from mlx_transformer.system.files import check_written, open_file
from mlx_transformer.system.machine import check_memory
from mlx_transformer.system.tensors import PIECE, Stored, is_finite
from mlx_transformer.system.torch_files import DAMAGE, open_archive

INT8, FLOAT16, FLOAT32, INTGEMM8, INTGEMM16 = 0x101, 0x402, 0x404, 0x4101, 0x4102
TYPES = {INT8: np.int8, FLOAT16: np.float16, FLOAT32: np.float32, INTGEMM8: np.int8, INTGEMM16: np.int16}
QUANTIZED = (INTGEMM8, INTGEMM16)
PACKED = {0x802: "packed16", 0x1801: "packed8avx2", 0x2801: "packed8avx512"}
"""FBGEMM's types, whose layout depends on the processor; they can't be read."""
OPTIONS = "special:model.yml"
ALIGNED = 256
Bytes = bytes | bytearray
MAX_MODEL_BYTES = 1 << 34
"""Most bytes of a model file."""
HIGHEST_RANK, LONGEST_NAME, MOST_TENSORS = 8, 1000, 100_000
SLACK = 1 << 12
"""Most bytes of padding after a tensor's values; the next tensor begins at a multiple of `ALIGNED`."""


@dataclass(frozen=True, eq=False)
class Item:
    """A tensor as stored in a file."""

    name: str
    type: int
    shape: tuple[int, ...]
    allocation: Bytes | Callable[[], Bytes]
    """Its bytes including padding, or a function that reads them from the file at each call."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Item):
            return NotImplemented
        ours, theirs = ((each.name, each.type, each.shape, bytes(each.data)) for each in (self, other))
        return ours == theirs

    @property
    def data(self) -> Bytes:
        """Its bytes including multiplier and padding."""
        return self.allocation() if callable(self.allocation) else self.allocation

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplier(self) -> np.float32:
        """The factor m of a quantised tensor: integers = round(values * m); 1 for floats."""
        if self.type not in QUANTIZED:
            return np.float32(1)
        return np.frombuffer(self.data, "<f4", 1, self.count * np.dtype(TYPES[self.type]).itemsize)[0]

    def stored(self) -> NDArray:
        """Its integers or floats, in its shape."""
        values = np.frombuffer(self.data, np.dtype(TYPES[self.type]).newbyteorder("<"), self.count)
        transposed = self.type in QUANTIZED and len(self.shape) == 2 and lies_transposed(self.name)
        return values.reshape(self.shape[::-1]).T if transposed else values.reshape(self.shape)

    def numbers(self) -> NDArray[np.float32]:
        """Its values in float32. Integers are multiplied by 1/m, as in Marian, which may round differently from / m."""
        values = self.stored().astype(np.float32, copy=False)
        if self.type in QUANTIZED:
            values *= np.float32(1) / self.multiplier
        return values

    def text(self) -> str:
        """The text of the options."""
        return self.data.rstrip(b"\0").decode()


def lies_transposed(name: str) -> bool:
    """Whether a quantised matrix of this name is stored transposed."""
    return "Wemb" not in name


def is_quantized(name: str) -> bool:
    """Whether Marian quantises a tensor of this name: an embedding, or a name ending in _W and at most one more letter.

    E.g. "decoder_l1_self_Wq", "Wemb".
    """
    return "Wemb" in name or len(name) - name.find("_W") in (2, 3)


def read_bin(path: str | Path) -> list[Item]:
    """All tensors of a `.bin`, the options last; values are read when they are needed. Raises `UserError` with all
    problems of the file."""
    return parse_bin(_File(path), str(path))


class _File:
    """A file that can be sliced like bytes; each slice is read when it is taken."""

    def __init__(self, path: str | Path):
        self.path = path
        with open_file(path, MAX_MODEL_BYTES) as file:
            self.size = file.seek(0, os.SEEK_END)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.size)
        check_written(self.path, begin, end)
        with open_file(self.path) as file:
            file.seek(begin)
            return file.read(max(0, end - begin))


def parse_bin(data: bytes | _File, origin: str = "model.bin") -> list[Item]:
    """The tensors in the bytes of a `.bin`; errors as for `read_bin`, with `origin` as the file's name."""
    items, problems = _parse(data)
    if problems:
        raise UserError(f"{origin}: no Marian model that can be read: {first_of(problems)}")
    return items


def write_bin(file: BinaryIO, items: Sequence[Item]) -> None:
    """Write a `.bin` with these tensors, in this order; only one tensor at a time is in memory."""
    names = [item.name.encode() + b"\0" for item in items]
    parts = [struct.pack("<2Q", 1, len(items))]
    for item, name in zip(items, names, strict=True):
        parts.append(struct.pack("<4Q", len(name), item.type, len(item.shape), len(item.data)))
    parts += names
    parts += [struct.pack(f"<{len(item.shape)}i", *item.shape) for item in items]
    pad = _padding(sum(map(len, parts)) + 8)
    file.write(b"".join([*parts, struct.pack("<Q", pad), bytes(pad)]))
    for item in items:
        file.write(item.data)


def float_item(name: str, array: NDArray | Stored) -> Item:
    """A float32 tensor. If the array is in a file (`Stored`), its bytes are read when they are needed."""

    def data() -> Bytes:
        values = np.asarray(array, "<f4")
        allocation = bytearray(values.nbytes + -values.nbytes % ALIGNED)
        np.frombuffer(allocation, "<f4", values.size).reshape(values.shape)[...] = values
        return allocation

    return Item(name, FLOAT32, array.shape, data if isinstance(array, Stored) else data())


def int8_item(name: str, integers: NDArray, multiplier: np.float32) -> Item:
    """A quantised matrix of integers in [-127, 127], given in its logical shape, with its multiplier."""
    values = integers.T if lies_transposed(name) else integers
    data = np.ascontiguousarray(values, np.int8).tobytes() + np.asarray(multiplier, "<f4").tobytes()
    return Item(name, INTGEMM8, integers.shape, data + bytes(-len(data) % ALIGNED))


def options_item(text: str) -> Item:
    """The options as a tensor; its shape is the true length of the text, without padding."""
    data = text.encode() + b"\0"
    return Item(OPTIONS, INT8, (len(data),), data)


def _padding(at: int) -> int:
    """Number of zero bytes before the data, 1 to 256; `at`: where the field with this number ends."""
    return (at // ALIGNED + 1) * ALIGNED - at


def _parse(data: bytes | _File) -> tuple[list[Item], list[str]]:
    """The tensors as far as they can be read, and all problems."""
    size = len(data)
    if size < 16:
        return [], [f"it has {size} bytes"]
    version, count = struct.unpack("<2Q", data[:16])
    if version != 1:
        return [], [f"its version is {version}, not 1"]
    at = 16 + 32 * count
    if not 0 < count <= MOST_TENSORS or at > size:
        return [], [f"it says that it holds {count} tensors, in {size} bytes"]
    headers = list(struct.iter_unpack("<4Q", data[16:at]))
    problems = [
        f"tensor {i} has a name of {length} bytes and rank {rank}"
        for i, (length, _, rank, _) in enumerate(headers)
        if not 1 < length <= LONGEST_NAME or rank > HIGHEST_RANK
    ]
    begin = at + sum(length + 4 * rank for length, _, rank, _ in headers) + 8
    if problems or begin > size:
        return [], problems or [f"names and shapes end at byte {begin}, the file at {size}"]
    names, shapes = [], []
    for length, *_ in headers:
        name = data[at : at + length]
        if name[-1:] != b"\0" or not name[:-1].isascii() or b"\0" in name[:-1]:
            problems.append(f"{name[:40]!r} is no name")
        names.append(name[:-1].decode("ascii", "replace"))
        at += length
    for *_, rank, _ in headers:
        shapes.append(struct.unpack(f"<{rank}i", data[at : at + 4 * rank]))
        at += 4 * rank
    (pad,) = struct.unpack("<Q", data[at : at + 8])
    total = begin + pad + sum(length for *_, length in headers)
    if pad != _padding(begin) or data[begin : begin + min(pad, ALIGNED)].strip(b"\0"):
        problems.append(f"{pad} bytes before the data, which are not the {_padding(begin)} zeros that belong there")
    if total != size:
        problems.append(f"its tensors end at byte {total}, the file at {size}")
    problems += [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    at, items = begin + pad, []
    for name, shape, (_, type, _, length) in zip(names, shapes, headers, strict=True):
        item = Item(name, type, shape, partial(_part, data, at, at + length) if total <= size else b"")
        wrong = list(_problems(item, length))
        problems += wrong or ([] if total > size else list(_values(item)))
        items.append(item)
        at += length
    if names[-1:] != [OPTIONS]:
        problems.append(f"{OPTIONS} is not the last of its tensors")
    return items, problems


def _problems(item: Item, length: int) -> Iterator[str]:
    if item.type in PACKED:
        yield f"{item.name} is of FBGEMM's type {PACKED[item.type]}: convert the model to intgemm8 or float32"
    elif item.type not in TYPES:
        yield f"{item.name} is of the unknown type {item.type:#x}"
    elif any(extent <= 0 for extent in item.shape):
        yield f"{item.name} has the shape {item.shape}"
    else:
        needed = item.count * np.dtype(TYPES[item.type]).itemsize + 4 * (item.type in QUANTIZED)
        if not needed <= length <= needed + SLACK:
            yield f"{item.name} {item.shape} needs {needed} bytes and has {length}"


def _part(data: bytes | _File, begin: int, end: int) -> bytes:
    return data[begin:end]


def is_utf8(data: Bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def _values(item: Item) -> Iterator[str]:
    """Yield problems of the tensor's values."""
    if item.name == OPTIONS:
        if item.type != INT8 or item.data[-1:] != b"\0" or not is_utf8(item.data):
            yield f"{OPTIONS} is no text"
    elif item.type == INT8:
        yield f"{item.name} is of type int8, which has no multiplier"
    elif item.type in QUANTIZED and not 1e-30 < item.multiplier < 1e30:
        yield f"{item.name} has the multiplier {item.multiplier}"
    elif item.type not in QUANTIZED and not is_finite(item.stored()):
        yield f"{item.name} is not finite"


KINDS = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8, "uint8": INT8}
VERSION = (1, 0)
"""Version of .npy; later versions are for headers that plain arrays don't need."""
LARGEST_OPTIONS = 1 << 20
OPTIMIZER = ("adam_", "adagrad_", "exp_smoothing")
"""Names of tensors in Marian's files of an optimizer's state, e.g. model.npz.optimizer.npz, start with these."""


def read_npz(path: str | Path) -> list[Item]:
    """All tensors of a `.npz`, the options last; values are read when they are needed. Pickled arrays are refused.

    Raises `UserError` with all problems of the file.
    """
    with open_file(path) as file:
        try:
            with open_archive(file) as archive:
                entries = archive.infolist()
                check_memory(sum(entry.file_size for entry in entries), str(path), "use a machine with more")
                if any(entry.filename.startswith(OPTIMIZER) for entry in entries):
                    raise UserError(f"{path}: holds the state of an optimizer; give the model that it belongs to")
                arrays = [_read(path, archive, entry) for entry in entries]
        except UserError:
            raise
        except DAMAGE as error:
            raise UserError(
                f"{path}: damaged, or no .npz file ({error_line(error)}); restore it from a copy"
            ) from error
    problems = [each for each in arrays if isinstance(each, str)]
    items = [each for each in arrays if isinstance(each, Item)]
    names = [item.name for item in items]
    problems += [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems += [] if OPTIONS in names or problems else [f"{OPTIONS} is missing"]
    if problems:
        raise UserError(f"{path}: no Marian model that can be read: {first_of(problems)}")
    return sorted(items, key=lambda item: (item.name == OPTIONS, item.name))


def write_npz(file: BinaryIO, items: Sequence[Item]) -> None:
    """Write a `.npz` with these tensors in float32, one at a time. All have the date 1980-01-01, so that the same
    tensors give the same bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for item in items:
            values = np.ascontiguousarray(item.stored() if item.name == OPTIONS else item.numbers())
            header = io.BytesIO()
            npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
            entry = zipfile.ZipInfo(f"{item.name}.npy")
            entry.file_size = len(header.getvalue()) + values.nbytes
            with archive.open(entry, "w") as place:
                place.write(header.getvalue())
                place.write(values.reshape(-1).view(np.uint8).data)


def _read(path: str | Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Item | str:
    """A tensor, or the problem with it. Its values are checked in pieces now, and read again when they are needed."""
    name = entry.filename.removesuffix(".npy")
    with archive.open(entry) as file:
        if npy.read_magic(file) != VERSION:
            return f"{name} is of another version of .npy"
        shape, columns_first, dtype = npy.read_array_header_1_0(file)
        if dtype.name not in KINDS or dtype.byteorder == ">" or columns_first:
            return (
                f"{name} is of {dtype}, in the order of {'columns' if columns_first else 'rows'}, not float32 in rows"
            )
        length = math.prod(shape) * dtype.itemsize
        if entry.file_size - file.tell() != length:
            return f"{name} {shape} needs {length} bytes and has {entry.file_size - file.tell()}"
        if name == OPTIONS:
            if length > LARGEST_OPTIONS:
                return f"{OPTIONS} has {length} bytes, more than options take"
            return options_item(file.read(length).rstrip(b"\0").decode())
        if dtype.itemsize == 1:
            return f"{name} is of {dtype}, not float32"
        check_written(path, entry.header_offset, entry.header_offset + entry.compress_size)
        while piece := file.read(PIECE):
            if not is_finite(np.frombuffer(piece, dtype)):
                return f"{name} is not finite"
    if dtype == np.float32:
        return Item(name, FLOAT32, shape, lambda: _again(path, entry.filename, length))
    return float_item(name, Stored(shape, np.dtype(np.float32), lambda: _widened(path, entry.filename, length, shape)))


def _widened(path: str | Path, name: str, length: int, shape: tuple[int, ...]) -> NDArray:
    numbers = np.frombuffer(_again(path, name, length), "<f2", math.prod(shape))
    return numbers.reshape(shape).astype(np.float32)


def _again(path: str | Path, name: str, length: int) -> bytearray:
    """The values of a tensor that `_read` has checked, padded as in a `.bin`."""
    data, at = bytearray(length + -length % ALIGNED), 0
    with open_file(path) as file, open_archive(file) as archive, archive.open(name) as entry:
        npy.read_magic(entry)
        npy.read_array_header_1_0(entry)
        while piece := entry.read(min(PIECE, length - at)):
            data[at : at + len(piece)] = piece
            at += len(piece)
    return data
