"""Archives that claim more than they have, and files with holes: refused before memory is taken for them."""

from __future__ import annotations

import io
import os
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlx_transformer.families.marian_files.items import read_bin, read_npz
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import LARGEST_HOLE, check_written, read_protobuf
from mlx_transformer.system.tensors import read_tensors
from mlx_transformer.system.torch_files import stored_torch_tensors

HUGE = 3_400_000_000
MOST = 100 << 20
"""Bytes that reading one of these may take."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a hole is written")


def hole(path: Path) -> None:
    """Its end says that all before it is a list of entries."""
    with path.open("wb") as file:
        file.seek(HUGE)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, HUGE, 0, 0))


def zip64(path: Path) -> None:
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 1 << 62, 0)
    locator, last = struct.pack("<4sLQL", b"PK\6\7", 0, 104, 1), struct.pack("<4s4H2LH", b"PK\5\6", *[0] * 7)
    path.write_bytes(b"PK\3\4" + bytes(100) + end + locator + last)


def deflated(path: Path) -> None:
    """60 MB of zeros in 60 kB."""
    header = io.BytesIO()
    form = {"descr": "<f4", "fortran_order": False, "shape": (15_000_000, 1)}
    np.lib.format.write_array_header_1_0(header, form)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\2}.")
        with archive.open("Wemb.npy", "w") as file:
            file.write(header.getvalue())
            for _ in range(60):
                file.write(bytes(1_000_000))


def overlapping(path: Path) -> None:
    """Fifty names of one entry."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\2}.")
        archive.writestr("0.npy", bytes(100_000))
        for i in range(1, 50):
            copy = zipfile.ZipInfo(f"{i}.npy")
            copy.CRC, copy.file_size, copy.compress_size = archive.filelist[1].CRC, 100_000, 100_000
            copy.header_offset = archive.filelist[1].header_offset
            archive.filelist.append(copy)


def by_another_method(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a/data.pkl", b"\x80\2}.")


def torch(path: Path) -> None:
    for stored in stored_torch_tensors(path).values():
        np.asarray(stored)


def bounded(read: Callable[[Path], object], path: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as error:
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_npz, torch])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hole, "its list of entries has 3400000000 bytes"),
        (zip64, "damaged"),
        (deflated, "bytes would become"),
        (overlapping, "its entries have"),
        (by_another_method, "another method than deflate"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_archive_that_claims_more(read, make, message, tmp_path):
    make(tmp_path / "x.npz")
    bounded(read, tmp_path / "x.npz", message)


@linux
def test_tensors_that_were_never_written(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[850000000],"data_offsets":[0,3400000000]}}'
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + HUGE)
    bounded(
        read_tensors, tmp_path / "x.safetensors", "of 3,400.0 MB from byte 79 on 0.0 MB were ever written; fetch it"
    )
    with (tmp_path / "x.onnx").open("wb") as file:
        file.write(b"\x08\x07")
        file.truncate((1 << 31) - 1)
    bounded(read_protobuf, tmp_path / "x.onnx", "were ever written")


def test_a_count_that_a_hole_would_hold(tmp_path):
    with (tmp_path / "model.bin").open("wb") as file:
        file.write(struct.pack("<2Q", 1, 1 << 26))
        file.truncate(1 << 33)
    bounded(read_bin, tmp_path / "model.bin", "it says that it holds 67108864 tensors")


@linux
def test_a_file_with_a_hole_among_its_numbers_is_sound(tmp_path):
    """Zeros take no place in some file systems: a part is refused only if hardly anything of it was written."""
    path, piece = tmp_path / "x", bytes([1]) * (4 << 20)
    with path.open("wb") as file:
        for i in range(4):
            file.seek(i * LARGEST_HOLE)
            file.write(piece)
    size = path.stat().st_size
    check_written(path, 0, size)
    check_written(path, 1 << 24, LARGEST_HOLE)  # short parts may be zeros
    os.truncate(path, size + LARGEST_HOLE)
    with pytest.raises(UserError, match="were ever written"):
        check_written(path, size - 1, size + LARGEST_HOLE)
