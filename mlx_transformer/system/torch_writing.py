"""A file as `torch.save` writes it, of float32 alone, without PyTorch; `torch_files.py` says what is in such a file.

Its pickle, put together by hand: {name: _rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict()), ...}. The
same arrays give the same bytes.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BEGINNING, END = b"\x80\x02", b"."
ORDERED_DICT, FALSE = b"ccollections\nOrderedDict\n)R", b"\x89"


def write_torch_tensors(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write arrays as tensors of float32, one for each name. Raises what the disk raises."""
    stored = [np.ascontiguousarray(array, "<f4") for array in arrays.values()]
    pairs = zip(map(_text, arrays), map(_tensor, map(str, range(len(stored))), stored), strict=True)
    program = BEGINNING + b"}(" + b"".join(name + tensor for name, tensor in pairs) + b"u" + END
    entries = {"data.pkl": program, "byteorder": b"little"}
    entries |= {f"data/{i}": array.tobytes() for i, array in enumerate(stored)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in {**entries, "version": b"3\n"}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), contents)


def _tensor(key: str, array: NDArray) -> bytes:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    storage = _tuple(_text("storage"), b"ctorch\nFloatStorage\n", _text(key), _text("cpu"), _number(array.size)) + b"Q"
    places = [_tuple(*map(_number, values)) for values in (array.shape, strides)]
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _tuple(storage, _number(0), *places, FALSE, ORDERED_DICT) + b"R"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"
