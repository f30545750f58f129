"""Marian's `.npz`: a zip archive of plain float32 arrays, and the options as an array of bytes."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mlx_transformer.system.archives import DAMAGE, open_archive
from mlx_transformer.system.errors import UserError, error_line, first_of
from mlx_transformer.system.files import check_written, open_file
from mlx_transformer.system.machine import check_memory
from mlx_transformer.system.stored import PIECE, Stored
from mlx_transformer.system.tensors import is_finite

from .items import ALIGNED, FLOAT16, FLOAT32, INT8, OPTIONS, Item, float_item, options_item

KINDS = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8, "uint8": INT8}
VERSION = (1, 0)
"""Of .npy: later ones are for headers that no plain array has."""
LARGEST_OPTIONS = 1 << 20
OPTIMIZER = ("adam_", "adagrad_", "exp_smoothing")
"""The mark of Marian's files of an optimizer's state, such as model.npz.optimizer.npz."""


def read_npz(path: str | Path) -> list[Item]:
    """Return all tensors of a file, the options as the last, without pickles; their numbers stay in it until they are
    asked for. `UserError` with everything that is wrong."""
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
    """Write the file of these tensors, one by one, as float32. They have the time 1980-01-01: the bytes depend on them
    alone."""
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
    """Return one tensor, or what is wrong with it. Its numbers are looked at piece by piece, and read where they are
    asked for."""
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
    """Return the numbers of a tensor in the allocation that a `.bin` has of them, read piece by piece into one place.
    It was read before, when it was sound."""
    data, at = bytearray(length + -length % ALIGNED), 0
    with open_file(path) as file, open_archive(file) as archive, archive.open(name) as entry:
        npy.read_magic(entry)
        npy.read_array_header_1_0(entry)
        while piece := entry.read(min(PIECE, length - at)):
            data[at : at + len(piece)] = piece
            at += len(piece)
    return data
