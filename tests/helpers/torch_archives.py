"""Files as `torch.save` writes them, made without PyTorch, and pickles put together instruction by instruction."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

STORAGES: dict[np.dtype, str] = {
    np.dtype(kind): f"{name}Storage"
    for kind, name in (
        *((np.float64, "Double"), (np.float32, "Float"), (np.float16, "Half"), (ml_dtypes.bfloat16, "BFloat16")),
        *((np.int64, "Long"), (np.int32, "Int"), (np.int16, "Short"), (np.int8, "Char"), (np.uint8, "Byte")),
        (np.bool_, "Bool"),
    )
}
BEGIN, END = b"\x80\x02", b"."


class View(NamedTuple):
    """A tensor: the name of its storage, and where its numbers are in it."""

    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: bool = False


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def several(*parts: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


ORDERED_DICT = named("collections", "OrderedDict") + b")R"


def storage(key: str, kind: str, count: int, *part: bytes) -> bytes:
    """part: `WHOLE` or a `part`, in the older form."""
    return several(text("storage"), named("torch", kind), text(key), text("cpu"), number(count), *part) + b"Q"


WHOLE = b"N"


def part(first: int, count: int) -> bytes:
    """A part of a storage, which PyTorch before version 0.4 had."""
    return several(text("part"), number(first), number(count))


def tensor(view: View, kind: str, count: int, *part: bytes) -> bytes:
    sizes = [several(*map(number, values)) for values in (view.shape, view.strides)]
    arguments = several(storage(view.key, kind, count, *part), number(view.offset), *sizes, b"\x89", ORDERED_DICT)
    made = named("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"
    if not view.parameter:
        return made
    return named("torch._utils", "_rebuild_parameter") + several(made, b"\x88", ORDERED_DICT) + b"R"


def state_dict(entries: Mapping[str, bytes]) -> bytes:
    """With the versions of modules that PyTorch keeps beside the entries."""
    pairs = b"".join(text(name) + value for name, value in entries.items())
    versions = ORDERED_DICT + b"(" + text("") + b"}(" + text("version") + number(1) + b"uu"
    return BEGIN + ORDERED_DICT + b"(" + pairs + b"u}" + text("_metadata") + versions + b"sb" + END


def write_archive(path: Path, program: bytes, storages: Mapping[str, NDArray], **changes: Sequence[bytes]) -> Path:
    """changes: {other file of the archive: its contents}."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", b"little")
        for key, numbers in storages.items():
            archive.writestr(f"archive/data/{key}", numbers.tobytes())
        archive.writestr("archive/version", b"3\n")
    return path


def head(version: int = 1001, little: bytes = b"\x88") -> bytes:
    """What stands before the state dict in the older form."""
    sizes = b"}(" + b"".join(text(name) + number(size) for name, size in (("short", 2), ("int", 4), ("long", 4))) + b"u"
    system = text("protocol_version") + number(1001) + text("little_endian") + little + text("type_sizes") + sizes
    pickles = (number(0x1950A86A20F9469CFC6C), number(version), b"}(" + system + b"u")
    return b"".join(BEGIN + pickle + END for pickle in pickles)


def listed(*keys: str) -> bytes:
    """The pickle of the keys of storages."""
    return BEGIN + b"](" + b"".join(map(text, keys)) + b"e" + END


def counted(numbers: NDArray) -> bytes:
    """A storage of the older form."""
    return struct.pack("<q", numbers.size) + numbers.tobytes()


def write_legacy(path: Path, program: bytes, storages: Mapping[str, NDArray]) -> Path:
    """The form of PyTorch before version 1.6."""
    path.write_bytes(head() + program + listed(*storages) + b"".join(map(counted, storages.values())))
    return path


def save(path: Path, arrays: Mapping[str, NDArray], legacy: bool = False) -> Path:
    """Each array in a storage of its own; those that are the same object share it."""
    keys = {id(array): str(i) for i, array in enumerate(arrays.values())}
    entries, storages = {}, {}
    for name, array in arrays.items():
        key = keys[id(array)]
        strides = tuple(stride // array.itemsize for stride in array.strides)
        storages[key] = np.asarray(array).reshape(-1)
        entries[name] = tensor(View(key, 0, array.shape, strides), STORAGES[array.dtype], array.size, *[WHOLE] * legacy)
    return (write_legacy if legacy else write_archive)(path, state_dict(entries), storages)


def assert_stored(found: Any, array: np.ndarray) -> None:
    """A tensor that was read is the one that was saved."""
    assert (found.shape, found.dtype, found.nbytes) == (array.shape, array.dtype, array.nbytes)
    assert np.asarray(found).tobytes() == array.tobytes()
