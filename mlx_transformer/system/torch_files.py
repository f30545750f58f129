"""Tensors of the files that `torch.save` writes, read without PyTorch: nothing that is in them is run.

Such a file is a zip archive of data.pkl, which says what there is (`torch_pickle.py`), and data/KEY for each storage,
its numbers as they lie in memory; or, of PyTorch before version 1.6, the same in a row (`torch_legacy.py`).
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .archives import DAMAGE, open_archive
from .errors import UserError, error_line, shortened
from .files import open_file
from .stored import Stored, checksum_of, read_piece
from .tensors import check_finite
from .torch_legacy import is_legacy, legacy_views
from .torch_pickle import LARGEST_PICKLE, Machine, Refused, Storage, View, views

LOCAL_HEADER = 30
"""Bytes of a zip entry's own header, before its name."""
LARGEST_EMPTY = 1 << 31
"""Product of the other sizes of a tensor without numbers: NumPy has a limit too."""


@dataclass
class Entry:
    """The numbers of one storage: where they are in the file, and the CRC-32 that they still have to be compared with,
    if there is one."""

    begin: int
    size: int
    checksum: int | None = None

    def check(self, path: Path, name: str, numbers: NDArray | None) -> None:
        """Compare the checksum, when the first tensor of the storage is read. numbers: all of them, if they were read
        for it. `UserError` if they differ."""
        if self.checksum is None:
            return
        found = checksum_of(path, self.begin, self.size) if numbers is None else zlib.crc32(numbers.view(np.uint8).data)
        if found != self.checksum:
            raise UserError(f"{path}: {shortened(name)!r} differs from its checksum: damaged; restore it from a copy")
        self.checksum = None


def stored_torch_tensors(path: Path) -> dict[str, Stored]:
    """Return all tensors of one file, none of them read yet, bfloat16 as float32.

    `UserError` for a file that is damaged or holds something other than tensors, and as they are read for damage and
    numbers that are not finite.
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
    """Return the file as an archive; `UserError` that says what else it is."""
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
    """Return the program, and the folder within the archive that it is in."""
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
    """Return where a storage is, which has to have the size that the pickle says. Raises `Refused`."""
    name = f"{folder}data/{storage.key}"
    label, size = repr(shortened(name)), storage.count * storage.kind.stored.itemsize
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
            return np.zeros(shape, storage.kind.read)
        stored = storage.kind.stored
        begin = entry.begin + (storage.first + view.offset) * stored.itemsize
        numbers = read_piece(path, begin, end - view.offset, stored)
        entry.check(path, name, numbers if len(numbers) == storage.count else None)
        numbers = storage.kind.as_read(numbers)
        array = np.lib.stride_tricks.as_strided(numbers, shape, [stride * numbers.itemsize for stride in strides])
        check_finite(path, name, array)
        return array

    return Stored(shape, storage.kind.read, read)
