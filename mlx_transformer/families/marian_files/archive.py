"""Marian's `.npz`: a zip archive of plain float32 arrays, and the options as an array of bytes."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.lib import format as npy

from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import open_file
from mlx_transformer.system.machine import check_memory
from mlx_transformer.system.tensors import is_finite

from .items import ALIGNED, FLOAT16, FLOAT32, INT8, OPTIONS, Item, float_item, options_item

KINDS = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8, "uint8": INT8}
PIECE = 1 << 20
"""Bytes that are read together."""
OPTIMIZER = ("adam_", "adagrad_", "exp_smoothing")
"""The mark of Marian's files of an optimizer's state, such as model.npz.optimizer.npz."""
DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError, RuntimeError, TypeError)


def read_npz(path: str | Path) -> list[Item]:
    """Return all tensors of a file, the options as the last, without pickles; their numbers stay in it until they are
    asked for. `UserError` with everything that is wrong."""
    with open_file(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                check_memory(sum(entry.file_size for entry in entries), str(path), "use a machine with more")
                if any(entry.filename.startswith(OPTIMIZER) for entry in entries):
                    raise UserError(f"{path}: holds the state of an optimizer; give the model that it belongs to")
                arrays = [_read(path, archive, entry) for entry in entries]
        except DAMAGE as error:
            if isinstance(error, UserError):
                raise
            text = " ".join(str(error).split())
            raise UserError(f"{path}: damaged, or no .npz file ({text:.200}); restore it from a copy") from error
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
    """Return one tensor, or what is wrong with it."""
    name = entry.filename.removesuffix(".npy")
    with archive.open(entry) as file:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
        if read is None:
            return f"{name} is of another version of .npy"
        shape, columns_first, dtype = read(file)
        if dtype.name not in KINDS or dtype.byteorder == ">" or columns_first:
            return (
                f"{name} is of {dtype}, in the order of {'columns' if columns_first else 'rows'}, not float32 in rows"
            )
        length = math.prod(shape) * dtype.itemsize
        if entry.file_size - file.tell() != length:
            return f"{name} {shape} needs {length} bytes and has {entry.file_size - file.tell()}"
        data = _rest(file, length)
        values = np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)
    if name == OPTIONS:
        return options_item(values.tobytes().rstrip(b"\0").decode())
    if dtype.itemsize == 1:
        return f"{name} is of {dtype}, not float32"
    if not is_finite(values):
        return f"{name} is not finite"
    if dtype != np.float32:
        return float_item(name, values.astype(np.float32))
    return Item(name, FLOAT32, shape, lambda: _again(path, entry.filename, length))


def _again(path: str | Path, name: str, length: int) -> bytearray:
    """Return the allocation of a tensor of float32 that was read before."""
    with open_file(path) as file, zipfile.ZipFile(file) as archive, archive.open(name) as entry:
        {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(entry)](entry)
        return _rest(entry, length)


def _rest(file: IO[bytes], length: int) -> bytearray:
    """Return what is left of a file, in the allocation that a `.bin` has of it, read piece by piece into one place."""
    data = bytearray(length + -length % ALIGNED)
    view, at = memoryview(data), 0
    while piece := file.read(PIECE):
        view[at : at + len(piece)] = piece
        at += len(piece)
    return data
