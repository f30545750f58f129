"""Read and write `torch.save` files, e.g. pytorch_model.bin, without PyTorch and without running code from them.

A file is a zip archive. data.pkl lists the tensors (`torch_pickle.py`), and data/KEY holds the raw numbers of one
storage; several tensors may share a storage.

PyTorch before version 1.6 wrote a row of pickles instead, followed by the storages. The pickles are a magic number, a
version, the machine's byte order and sizes, the state dict, and the storages' keys in file order. Each storage is its
count (int64) and its raw numbers. There is no checksum.

The archive's directory is checked against the file before anything is read, as sizes in a damaged or malicious file may
be wrong.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import UserError, error_line, shortened
from .files import open_file
from .tensors import Stored, check_finite, checksum_of, read_piece
from .torch_pickle import LARGEST_PICKLE, STORAGES, Cut, Machine, Refused, Storage, View, views

LARGEST_DIRECTORY = 16 << 20
"""Bytes of the directory at the end of an archive; for 100,000 tensors it takes half of this."""
MOST_EXPANSION = 16
"""Largest ratio of unpacked to packed bytes of an archive. Trained weights hardly compress to a half."""
FREE_EXPANSION = 16 << 20
"""Unpacked bytes allowed beyond this ratio."""
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OverflowError, TypeError)
DAMAGE += (NotImplementedError, RuntimeError)
"""Exceptions that `zipfile` and the code reading its entries raise for a damaged archive."""


class _Bounded:
    """A file that refuses to read more than `LARGEST_DIRECTORY` bytes at once for `zipfile`."""

    def __init__(self, file: io.BufferedReader):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"its list of entries has {size} bytes")
        return self._file.read(size if size >= 0 else LARGEST_DIRECTORY)


def open_archive(file: io.BufferedReader) -> zipfile.ZipFile:
    """Open a zip archive whose entries are stored or deflated.

    Raises one of `DAMAGE` if it is damaged, or if its entries overlap, lie outside the file or unpack to far more than
    the file's size.
    """
    archive = zipfile.ZipFile(_Bounded(file))  # type: ignore[arg-type]
    entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
    packed, unpacked = (sum(getattr(entry, name) for entry in entries) for name in ("compress_size", "file_size"))
    if packed > size or any(entry.header_offset >= size for entry in entries):
        raise zipfile.BadZipFile(f"its entries have {packed} bytes, in a file of {size}")
    if unpacked > MOST_EXPANSION * packed + FREE_EXPANSION:
        raise zipfile.BadZipFile(f"its {packed} bytes would become {unpacked}")
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise zipfile.BadZipFile("its entries are compressed by another method than deflate")
    return archive


MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
BEGIN = b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
"""Start of every old file, after the pickle's protocol number."""
COUNT = 8
"""Bytes of the count before a storage's numbers."""


def is_legacy(file: io.BufferedReader) -> bool:
    """Whether PyTorch before 1.6 wrote the file, told by its first pickle."""
    file.seek(0)
    return BEGIN in file.read(len(BEGIN) + 11)


def legacy_views(file: io.BufferedReader) -> tuple[dict[str, View], dict[str, int]]:
    """Read an old file: {name: tensor} and {key: first byte of the storage}. Raises `Refused`."""
    file.seek(0)
    machine = Machine(file.read(LARGEST_PICKLE), id_size=6)
    size = os.fstat(file.fileno()).st_size
    try:
        if (machine.run(), machine.run()) != (MAGIC, VERSION):
            raise Refused(f"has another version than {VERSION}, the only one of PyTorch's older form")
        system = machine.run()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise Refused("is of a big-endian machine, or doesn't say: save it as safetensors there")
        tensors, keys = views(machine), machine.run()
    except Cut:
        if size <= LARGEST_PICKLE:
            raise
        raise Refused(
            f"its pickles have over {LARGEST_PICKLE / 1e6:,.1f} MB, more than names of tensors take"
        ) from None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _damaged("has no list of its storages")
    if len(keys) != len(machine.storages) or {*keys} != {*machine.storages}:
        raise _damaged("lists other storages than its tensors are in")
    return tensors, _begins(file, [machine.storages[key] for key in keys], machine.at, size)


def _begins(file: io.BufferedReader, storages: list[Storage], at: int, size: int) -> dict[str, int]:
    """Find the first byte of each storage. They must fill the file from `at` to its end, with the pickle's counts."""
    begins = {}
    for storage in storages:
        label = repr(shortened(storage.key))
        file.seek(at)
        head = file.read(COUNT)
        count = int.from_bytes(head, "little", signed=True)
        if len(head) == COUNT and count != storage.count:
            raise _damaged(f"its storage {label} has {count} numbers, its pickle says {storage.count}")
        begins[storage.key] = at + COUNT
        at += COUNT + storage.count * storage.dtype.itemsize
        if at > size:
            raise _damaged(f"ends within its storage {label}")
    if at < size:
        raise _damaged(f"has {size - at} bytes after its last storage")
    return begins


def _damaged(what: str) -> Refused:
    return Refused(f"{what}: damaged; restore it from a copy")


LOCAL_HEADER = 30
"""Bytes of a zip entry's own header, before its name."""
LARGEST_EMPTY = 1 << 31
"""Limit for the product of the nonzero sizes of an empty tensor, e.g. (0, 512); NumPy has a limit too."""


@dataclass
class Entry:
    """Place of a storage's numbers in the file. checksum: the CRC-32, until it has been checked; None: nothing to
    check."""

    begin: int
    size: int
    checksum: int | None = None

    def check(self, path: Path, name: str, numbers: NDArray | None) -> None:
        """Check the CRC-32 once, when a tensor of the storage is first read. Raises `UserError` if it differs.

        numbers: the whole storage if it has just been read; None to read it again.
        """
        if self.checksum is None:
            return
        found = checksum_of(path, self.begin, self.size) if numbers is None else zlib.crc32(numbers.view(np.uint8).data)
        if found != self.checksum:
            raise UserError(f"{path}: {shortened(name)!r} differs from its checksum: damaged; restore it from a copy")
        self.checksum = None


def stored_torch_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of a file, not yet read, in the file's own types.

    Raises `UserError` if the file is damaged or holds anything but tensors. Reading a tensor raises it for a wrong
    checksum and for numbers that aren't finite.
    """
    with open_file(path) as file:
        archive = None if is_legacy(file) else _archive(path, file)
        try:
            tensors, entries = _in_a_row(file) if archive is None else _in_archive(file, archive)
            return {name: _stored(path, name, view, entries[view.storage.key]) for name, view in tensors.items()}
        except Refused as error:
            raise UserError(f"{path}: {error}") from error
        except UserError:
            raise
        except DAMAGE as error:
            raise UserError(f"{path}: damaged ({error_line(error)}); restore it from a copy") from error


def _in_a_row(file: io.BufferedReader) -> tuple[dict[str, View], dict[str, Entry]]:
    tensors, begins = legacy_views(file)
    return tensors, {key: Entry(begin, 0) for key, begin in begins.items()}


def _in_archive(file: io.BufferedReader, archive: zipfile.ZipFile) -> tuple[dict[str, View], dict[str, Entry]]:
    program, folder = _pickle(archive)
    tensors = views(Machine(program))
    storages = {view.storage.key: view.storage for view in tensors.values()}
    return tensors, {key: _entry(file, archive, folder, storage) for key, storage in storages.items()}


def _archive(path: Path, file: io.BufferedReader) -> zipfile.ZipFile:
    """Open the file as an archive. Raises `UserError`, with advice for tar archives and Git LFS pointers."""
    try:
        return open_archive(file)
    except DAMAGE as error:
        file.seek(0)
        begin = file.read(512)
        if begin[257:].startswith(b"ustar"):
            save = f"torch.save(torch.load({path.name!r}, weights_only=False), {path.name!r})"
            how = f'if you trust it, for this runs what is in it, convert it: python -c "import torch; {save}"'
            raise UserError(f"{path}: is a tar archive, as PyTorch wrote in its first versions; {how}") from error
        if begin.startswith(b"version https://git-lfs"):
            raise UserError(f"{path}: stands for a file of Git LFS; fetch it: git lfs pull") from error
        raise UserError(
            f"{path}: no file of torch.save, or damaged ({error_line(error)}); restore it from a copy"
        ) from error


def _pickle(archive: zipfile.ZipFile) -> tuple[bytes, str]:
    """The bytes of data.pkl and its folder in the archive, e.g. "archive/"."""
    programs = [entry for entry in archive.infolist() if entry.filename.rpartition("/")[2] == "data.pkl"]
    if len(programs) != 1:
        raise Refused(f"holds {len(programs)} files data.pkl in place of one: it is no file of torch.save")
    (entry,) = programs
    if entry.file_size > LARGEST_PICKLE:
        raise Refused(f"its data.pkl has {entry.file_size / 1e6:,.1f} MB, more than names of tensors take")
    _check_stored(entry)
    folder = entry.filename.removesuffix("data.pkl")
    order = archive.NameToInfo.get(f"{folder}byteorder")
    if order is not None and order.file_size == 3 and archive.read(order) == b"big":
        raise Refused("is of a big-endian machine: save it as safetensors there")
    return archive.read(entry), folder


def _entry(file: io.BufferedReader, archive: zipfile.ZipFile, folder: str, storage: Storage) -> Entry:
    """Find a storage in the archive. Raises `Refused` if its size differs from the pickle's."""
    name = f"{folder}data/{storage.key}"
    label, size = repr(shortened(name)), storage.count * storage.dtype.itemsize
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise Refused(f"has no {label}, which its pickle asks for: damaged; restore it from a copy") from None
    _check_stored(info)
    if info.file_size != size:
        raise Refused(
            f"its {label} has {info.file_size} bytes, its pickle says {size}: damaged; restore it from a copy"
        )
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or not header.startswith(b"PK\3\4"):
        raise Refused(f"its {label} is not where its list says: damaged; restore it from a copy")
    begin = info.header_offset + LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    if begin + size > os.fstat(file.fileno()).st_size:
        raise Refused(f"ends within its {label}: damaged; restore it from a copy")
    return Entry(begin, size, info.CRC)


def _check_stored(info: zipfile.ZipInfo) -> None:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise Refused(f"its {shortened(info.filename)!r} is compressed or encrypted, which torch.save never does")


def _stored(path: Path, name: str, view: View, entry: Entry) -> Stored:
    storage, shape = view.storage, view.shape
    extent = math.prod(max(size, 1) for size in shape)
    strides = [stride if size > 1 else 0 for size, stride in zip(shape, view.strides, strict=True)]
    end = view.offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride)
    empty = 0 in shape
    if extent >= LARGEST_EMPTY if empty else max(extent, end) > storage.size:
        raise Refused(f"its {shortened(name)!r} is larger than its storage: damaged; restore it from a copy")

    def read() -> NDArray:
        if empty:
            return np.zeros(shape, storage.dtype)
        begin = entry.begin + (storage.first + view.offset) * storage.dtype.itemsize
        numbers = read_piece(path, begin, end - view.offset, storage.dtype)
        entry.check(path, name, numbers if len(numbers) == storage.count else None)
        array = np.lib.stride_tricks.as_strided(numbers, shape, [stride * numbers.itemsize for stride in strides])
        check_finite(path, name, array)
        return array

    return Stored(shape, storage.dtype, read)


BEGINNING, END = b"\x80\x02", b"."
ORDERED_DICT, FALSE = b"ccollections\nOrderedDict\n)R", b"\x89"


def write_torch_tensors(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write a state dict of float32, float16 and bfloat16 tensors as `torch.save` would. The same arrays give the same
    bytes.

    The pickle is assembled by hand: {name: _rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())}.
    Raises `OSError`.
    """
    stored = [np.ascontiguousarray(array) for array in arrays.values()]
    pairs = zip(map(_text, arrays), map(_tensor, map(str, range(len(stored))), stored), strict=True)
    program = BEGINNING + b"}(" + b"".join(name + tensor for name, tensor in pairs) + b"u" + END
    entries = {"data.pkl": program, "byteorder": b"little"}
    entries |= {f"data/{i}": array.tobytes() for i, array in enumerate(stored)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in {**entries, "version": b"3\n"}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), contents)


def _tensor(key: str, array: NDArray) -> bytes:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    kind = next(kind for kind, dtype in STORAGES.items() if dtype == array.dtype.name)
    storage = (
        _tuple(_text("storage"), f"ctorch\n{kind}\n".encode(), _text(key), _text("cpu"), _number(array.size)) + b"Q"
    )
    places = [_tuple(*map(_number, values)) for values in (array.shape, strides)]
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _tuple(storage, _number(0), *places, FALSE, ORDERED_DICT) + b"R"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"
