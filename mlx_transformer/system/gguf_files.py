"""Read and write GGUF files, llama.cpp's format: pairs of a key and a value, and tensors, which are read on demand.

All counts, lengths and offsets are checked against the file's size before anything is read or allocated, as a damaged
or malicious file may lie. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Quantised tensors are blocks of small integers, with a scale and perhaps an offset per group: a weight is
scale * (integer - zero) + offset. Scales and offsets are products of the file's numbers, exact in float32, so that only
the last addition rounds, and the values equal llama.cpp's bit for bit. Layouts: its `ggml-common.h`.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import UserError, shortened
from .files import MAX_FILE_BYTES, open_file
from .tensors import TYPES as DTYPES
from .tensors import Stored, check_finite, number_type, read_piece

Blocks = NDArray[Any]
"""uint8 (N, bytes of a block)"""
Integers = NDArray[Any]
"""uint8"""
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A type of block: `weights` neighbours in a row, stored in `size` bytes."""

    name: str
    weights: int
    size: int
    bits: int
    """Bits per integer."""
    zero: int
    group: int
    """Weights that share a scale: 16 or 32."""
    integers: Callable[[Blocks], Integers]
    """(N, size) to (N, weights)"""
    scales: Callable[[Blocks], Numbers]
    """(N, size) to (N, weights / group)"""
    offsets: Callable[[Blocks], Numbers] | None = None
    """(N, size) to (N, weights / group); None: offsets are zero."""

    @property
    def halves(self) -> bool:
        """Whether scales and offsets are float16 numbers of the file, not products."""
        return self.weights == self.group

    def dequantised(self, blocks: Blocks) -> Numbers:
        """The weights (N, weights)."""
        scales = self.scales(blocks)
        weights = self.integers(blocks).astype(np.float32).reshape(*scales.shape, self.group)
        weights -= np.float32(self.zero)  # so that a negative scale keeps the sign of its zeros
        weights *= scales[..., None]
        if self.offsets is not None:
            weights += self.offsets(blocks)[..., None]
        return weights.reshape(len(blocks), self.weights)

    def biases(self, blocks: Blocks) -> Numbers:
        """MLX's biases (N, weights / group), added to scale * integer. They are exact: without offsets, the scale times
        a power of two."""
        return self.scales(blocks) * np.float32(-self.zero) if self.offsets is None else self.offsets(blocks)


def _half(blocks: Blocks, at: int) -> Numbers:
    """The float16 numbers (N, 1) at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks, run: int) -> Integers:
    """4-bit integers, (N, B) to (N, 2 B): in each run of `run` bytes first the low halves, then the high halves."""
    pairs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(packed), -1)


def _pairs(packed: Blocks) -> Integers:
    """2-bit integers, (N, B) to (N, 4 B): in each run of 32 bytes first the lowest two bits, then the next two, etc."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, 32) >> shifts & 3).reshape(len(packed), -1)


def _high(packed: Blocks) -> Integers:
    """(N, 32) to (N, 256): bit g of byte i belongs to weight i of group g."""
    return (packed[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(packed), 256)


def _low(packed: Blocks) -> Integers:
    """(N, 4) to (N, 32): a bit per weight."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _six_bits(blocks: Blocks) -> tuple[Integers, Integers]:
    """Unpack eight 6-bit scales and eight 6-bit offsets from bytes 4 to 15 of Q4_K and Q5_K."""
    a, b, c = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    return scales, np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)


def _scales_k(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * _six_bits(blocks)[0]


def _offsets_k(blocks: Blocks) -> Numbers:
    return -(_half(blocks, 2) * _six_bits(blocks)[1])


def _scales_3(blocks: Blocks) -> Numbers:
    low = _nibbles(blocks[:, 96:104], 8)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 104:108] >> shifts & 3).reshape(len(blocks), 16)
    return _half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)


def _integers_6(blocks: Blocks) -> Integers:
    return _nibbles(blocks[:, :128], 64) | _pairs(blocks[:, 128:192]) << 4


D, M = (lambda blocks: _half(blocks, 0)), (lambda blocks: _half(blocks, 2))

BLOCKS = {
    2: BlockType("Q4_0", 32, 18, 4, 8, 32, lambda b: _nibbles(b[:, 2:], 16), D),
    3: BlockType("Q4_1", 32, 20, 4, 0, 32, lambda b: _nibbles(b[:, 4:], 16), D, M),
    6: BlockType("Q5_0", 32, 22, 5, 16, 32, lambda b: _nibbles(b[:, 6:], 16) | _low(b[:, 2:6]) << 4, D),
    7: BlockType("Q5_1", 32, 24, 5, 0, 32, lambda b: _nibbles(b[:, 8:], 16) | _low(b[:, 4:8]) << 4, D, M),
    8: BlockType("Q8_0", 32, 34, 8, 128, 32, lambda b: b[:, 2:] ^ 128, D),
    10: BlockType(
        *("Q2_K", 256, 84, 2, 0, 16, lambda b: _pairs(b[:, 16:80])),
        lambda b: _half(b, 80) * (b[:, :16] & 15),
        lambda b: -(_half(b, 82) * (b[:, :16] >> 4)),
    ),
    11: BlockType("Q3_K", 256, 110, 3, 4, 16, lambda b: _pairs(b[:, 32:96]) | _high(b[:, :32]) << 2, _scales_3),
    12: BlockType("Q4_K", 256, 144, 4, 0, 32, lambda b: _nibbles(b[:, 16:], 32), _scales_k, _offsets_k),
    13: BlockType(
        *("Q5_K", 256, 176, 5, 0, 32, lambda b: _nibbles(b[:, 48:], 32) | _high(b[:, 16:48]) << 4),
        *(_scales_k, _offsets_k),
    ),
    14: BlockType(
        *("Q6_K", 256, 210, 6, 32, 16, _integers_6),
        lambda b: _half(b, 208) * b[:, 192:208].view(np.int8),
    ),
}
"""{number in a file: type} of supported quantised types."""
FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
"""{number: name in safetensors files}"""
UNREAD = {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
UNREAD |= {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}
UNREAD |= {39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
"""{number in a file: name} of unsupported types, for errors."""
NUMBERS = {each.name: number for number, each in BLOCKS.items()} | {name: number for number, name in FLOATS.items()}


def quantised(name: str, weights: Numbers) -> Blocks:
    """Quantise weights (N, 32) to blocks of Q8_0 or Q4_0, bit for bit as llama.cpp does."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if name == "Q8_0":
            scales = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
            inverse = np.where(scales == 0, np.float32(0), 1 / scales)
            exact = weights * inverse
            size = np.floor(np.abs(exact))
            size += np.floor(2 * (np.abs(exact) - size))  # halves are rounded away from zero
            packed = (np.sign(exact) * size).astype(np.int8).view(np.uint8)
        else:
            largest = np.take_along_axis(weights, np.abs(weights).argmax(axis=1, keepdims=True), axis=1)
            scales = largest / np.float32(-8)
            inverse = np.where(scales == 0, np.float32(0), 1 / scales)
            integers = np.trunc(weights * inverse + np.float32(8.5)).astype(np.uint8).clip(0, 15)
            packed = integers[:, :16] | integers[:, 16:] << 4
        return np.concatenate([scales.astype("<f2").view(np.uint8), packed], axis=1)


MAGIC, VERSIONS = b"GGUF", (2, 3)
TYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "string", "array", "<u8", "<i8", "<f8")
"""The types of values, by number."""
STRING, ARRAY = TYPES.index("string"), TYPES.index("array")
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
DEEPEST = 4
"""Deepest nesting of arrays."""
MOST_SIZES = 4
"""Dimensions of a tensor in llama.cpp."""
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
PART = 1 << 15
"""Blocks quantised at a time."""
DAMAGED = "damaged; restore it from a copy"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file. shape: NumPy's, the reverse of the order in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str | BlockType
    """A value of `FLOATS`, e.g. "F16", or a type of block."""
    begin: int

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.kind, math.prod(self.shape))

    def blocks(self) -> Blocks:
        """Read the tensor's blocks (N, size)."""
        assert isinstance(self.kind, BlockType)
        return read_piece(self.path, self.begin, self.nbytes, np.dtype(np.uint8)).reshape(-1, self.kind.size)

    def stored(self) -> Stored:
        """The tensor's numbers, read on demand: floats in their own type, quantised types in float32. Reading raises
        `UserError` if a number isn't finite."""
        if isinstance(self.kind, BlockType):
            dtype, read = np.dtype(np.float32), lambda: _quietly(self.kind.dequantised, self.blocks())  # type: ignore[union-attr]
        else:
            count, dtype = math.prod(self.shape), number_type(DTYPES[self.kind])
            read = lambda: read_piece(self.path, self.begin, count, dtype)  # noqa: E731
        return self.part(self.shape, dtype, read)

    def part(self, shape: tuple[int, ...], dtype: np.dtype, read: Any) -> Stored:
        """Numbers of this tensor, e.g. its scales, read on demand and checked then."""

        def checked() -> NDArray:
            array = read().reshape(shape)
            check_finite(self.path, shortened(self.name), array)
            return array

        return Stored(shape, dtype, checked)


def _quietly(compute: Any, blocks: Blocks) -> NDArray:
    """Compute without NumPy's warnings: infinite and NaN numbers raise an error later."""
    with np.errstate(all="ignore"):
        return compute(blocks)


class GgufFile(NamedTuple):
    """The contents of a file, or of all parts of a split file."""

    path: Path
    pairs: dict[str, Any]
    """{key: value}: bool, int, float, str, a list of strings or arrays, or an array of numbers. float32 numbers are
    the shortest decimals that round to them: 1e-05, not 9.999999747378752e-06."""
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the pairs of a file and list its tensors. path: a file, or any part of a split file.

    Raises `UserError` for a damaged file, and for tensors of an unsupported type.
    """
    first = _read_part(path)
    count = first.pairs.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    match = SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise UserError(
            f"{path}: is one of {count} parts; name them NAME-00001-of-{count:05}.gguf and so on, as before"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise UserError(f"{path}: its part {missing[0]} is missing; put all {count} parts into one folder")
    parts = [first if each == path else _read_part(each) for each in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        if (part.pairs.get("split.no"), part.pairs.get("split.count")) != (number, count):
            raise UserError(f"{part.path}: doesn't say that it is part {number + 1} of {count}: {DAMAGED}")
        if twice := tensors.keys() & part.tensors.keys():
            raise UserError(f"{part.path}: has {shortened(min(twice))!r} like another part: {DAMAGED}")
        tensors |= part.tensors
    if parts[0].pairs.get("split.tensors.count") != len(tensors):
        raise UserError(f"{paths[0]}: its parts have {len(tensors)} tensors, which is not what it says: {DAMAGED}")
    return GgufFile(path, parts[0].pairs, tensors)


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file, given the path of any part; for other files, [path]."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def _read_part(path: Path) -> GgufFile:
    with open_file(path) as file:
        reader = _Reader(path, file)
        tensors, count = reader.begin()
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = reader.string("a key")
            if key in pairs:
                raise reader.wrong(f"has the key {shortened(key)!r} twice")
            pairs[key] = reader.value(reader.number("<u4"), shortened(key))
        alignment = pairs.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
            raise reader.wrong(f"{ALIGNMENT} is {alignment!r:.40}, no power of 2")
        return GgufFile(path, pairs, reader.tensors(tensors, alignment))


class _Reader:
    """Reads the front of a file in order, never beyond its end nor more than `MAX_FILE_BYTES`."""

    def __init__(self, path: Path, file: BufferedReader):
        self._path, self._file, self._at = path, file, 0
        self._size = os.fstat(file.fileno()).st_size

    def wrong(self, what: str, hint: str = DAMAGED) -> UserError:
        return UserError(f"{self._path}: {what}: {hint}")

    def begin(self) -> tuple[int, int]:
        """The numbers of tensors and of pairs."""
        if self._size < 4 or self.take(4, "the first four bytes") != MAGIC:
            raise UserError(f"{self._path}: is no GGUF file (it doesn't begin with GGUF)")
        version = self.number("<u4")
        if version and version & 0xFFFF == 0:
            raise self.wrong("is big-endian", "convert it on the machine it is from, or fetch the usual form")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise self.wrong(f"is version {version} of the format", f"{known} are read; convert it by llama.cpp")
        return self.count(24, "tensors"), self.count(13, "pairs")

    def take(self, size: int, what: str) -> bytes:
        if size > self._size - self._at:
            raise self.wrong(f"{what} would end behind the file")
        if self._at + size > MAX_FILE_BYTES:
            raise self.wrong(f"{what} ends beyond {MAX_FILE_BYTES / 1e6:,.1f} MB, more than keys and values take")
        self._at += size
        data = self._file.read(size)
        if len(data) != size:
            raise self.wrong("ends too early")
        return data

    def number(self, kind: str, what: str = "a number") -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize, what), kind)[0].item()

    def count(self, least: int, what: str) -> int:
        """Read a number of items; raise `UserError` if the rest of the file is too small for items of `least` bytes."""
        count = self.number("<u8", what)
        if count * least > self._size - self._at:
            raise self.wrong(f"says that it has {count:,} {what}, more than fit into its {self._size:,} bytes")
        return count

    def string(self, what: str) -> str:
        data = self.take(self.number("<u8", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is no UTF-8") from None

    def value(self, number: int, key: str, depth: int = 0) -> Any:
        if number == STRING:
            return self.string(key)
        if number == ARRAY:
            return self._array(key, depth + 1)
        if number >= len(TYPES):
            raise self.wrong(f"{key} is of type {number}, which is none of GGUF's")
        value = self.number(TYPES[number], key)
        return float(str(np.float32(value))) if TYPES[number] == "<f4" else value

    def _array(self, key: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise self.wrong(f"{key} has arrays {depth} deep")
        number = self.number("<u4", key)
        if number in (STRING, ARRAY):
            count = self.count(8 if number == STRING else 12, f"values of {key}")
            return [self.value(number, key, depth) for _ in range(count)]
        if number >= len(TYPES):
            raise self.wrong(f"{key} has values of type {number}, which is none of GGUF's")
        kind = np.dtype(TYPES[number])
        data = self.take(self.count(kind.itemsize, f"values of {key}") * kind.itemsize, key)
        return np.frombuffer(data, np.uint8) != 0 if kind == np.bool_ else np.frombuffer(data, kind)

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        listed = [self._tensor(alignment) for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in listed:
            if name in tensors:
                raise self.wrong(f"has the tensor {shortened(name)!r} twice")
            tensors[name] = tensor = GgufTensor(self._path, name, shape, kind, start + offset)
            if tensor.begin + tensor.nbytes > self._size:
                raise self.wrong(f"{shortened(name)} {shape} would end behind the file")
        ordered = sorted((each for each in tensors.values() if each.nbytes), key=lambda each: each.begin)
        for one, other in pairwise(ordered):
            if one.begin + one.nbytes > other.begin:
                raise self.wrong(f"{shortened(one.name)} and {shortened(other.name)} overlap")
        return tensors

    def _tensor(self, alignment: int) -> tuple[str, tuple[int, ...], str | BlockType, int]:
        name = self.string("a tensor's name")
        label = shortened(name)
        if not 0 < (sizes := self.number("<u4", label)) <= MOST_SIZES:
            raise self.wrong(f"{label} has {sizes} dimensions, and GGUF's tensors 1 to {MOST_SIZES}")
        shape = tuple(self.number("<u8", label) for _ in range(sizes))[::-1]
        number, offset = self.number("<u4", label), self.number("<u8", label)
        kind = BLOCKS.get(number) or FLOATS.get(number)
        if kind is None:
            known = UNREAD.get(number, f"number {number}")
            read = ", ".join(NUMBERS)
            raise UserError(
                f"{self._path}: {label} has type {known}; supported: {read}: download the model in one of these"
            )
        if isinstance(kind, BlockType) and shape[-1] % kind.weights:
            raise self.wrong(f"{label} {shape} has no rows of whole blocks of {kind.weights}, as {kind.name} has")
        if offset % alignment:
            raise self.wrong(f"{label} begins at {offset}, no multiple of {alignment}")
        return name, shape, kind, offset


def _bytes_of(kind: str | BlockType, count: int) -> int:
    if isinstance(kind, BlockType):
        return count // kind.weights * kind.size
    return count * number_type(DTYPES[kind]).itemsize


def write_gguf(path: Path, pairs: Mapping[str, Any], tensors: Mapping[str, tuple[NDArray | Stored, str]]) -> None:
    """Write a file of version 3, one tensor at a time.

    pairs: bool, int, float, str, a list of strings or an array of numbers each; ints become uint32, floats float32.
    tensors: {name: (numbers, type)}, with type F32, F16, BF16, Q8_0 or Q4_0; for the last two, rows must have a
    multiple of 32 numbers.
    """
    header = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(pairs))]
    header += [part for key, value in pairs.items() for part in (_text(key), _value(value))]
    at = 0
    for name, (array, kind) in tensors.items():
        shape = array.shape[::-1]
        number = NUMBERS[kind]
        header.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, at))
        at += _padded(_bytes_of(BLOCKS.get(number, kind), math.prod(shape)))
    with open(path, "wb") as file:
        front = np.frombuffer(b"".join(header), np.uint8)
        for data in chain([front], (_data(np.asarray(array), kind) for array, kind in tensors.values())):
            file.write(data.data)
            file.write(bytes(_padded(data.nbytes) - data.nbytes))


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        kind = value.dtype.newbyteorder("<").str if value.dtype != np.bool_ else "?"
        return (
            struct.pack("<IIQ", ARRAY, TYPES.index(kind.replace("|", "<")), value.size) + value.astype(kind).tobytes()
        )
    kind = "?" if isinstance(value, bool) else "<u4" if isinstance(value, int) else "<f4"
    return struct.pack("<I", TYPES.index(kind)) + np.array(value, kind).tobytes()


def _data(array: NDArray, kind: str) -> NDArray[np.uint8]:
    """The bytes of a tensor of a type."""
    if kind in FLOATS.values():
        return np.ascontiguousarray(array, number_type(DTYPES[kind])).reshape(-1).view(np.uint8)
    rows = np.ascontiguousarray(array, np.float32).reshape(-1, 32)
    return np.concatenate([quantised(kind, part).reshape(-1) for part in _in_parts(rows)])


def _in_parts(rows: NDArray) -> Iterable[NDArray]:
    return (rows[i : i + PART] for i in range(0, len(rows), PART))
