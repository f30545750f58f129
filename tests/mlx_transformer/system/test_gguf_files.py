"""GGUF files: numbers and pairs as the package gguf has them, bit for bit; split files; and each lie is one error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.gguf_files import BLOCKS, read_gguf, write_gguf

HERE = Path(__file__).parent
PAIRS = {
    "general.architecture": "llama",
    "a.whole": 4_000_000_000,
    "a.number": 1e-5,
    "a.flag": True,
    "a.text": "naïve ▁",
    "a.texts": ["", "\u0120t", "\U0001f600"],
}
MORE = {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "int32": -(2**31), "uint64": 2**64 - 1}
MORE |= {"int64": -(2**63), "float64": 0.1, "integers": [1, -2, 3], "numbers": [0.5, -0.25], "flags": [True, False]}


@pytest.fixture(scope="module")
def golden():
    with np.load(HERE / "golden_gguf.npz") as file:
        return dict(file)


def test_numbers_are_those_of_the_package_bit_for_bit(golden):
    """By `make_golden_gguf.py`."""
    found = read_gguf(HERE / "golden_blocks.gguf")
    assert [name.removeprefix("of.") for name in found.tensors] == [n for n in golden if n != "rounded"]
    for name, tensor in found.tensors.items():
        numbers = np.asarray(tensor.stored().astype(np.float32))
        np.testing.assert_array_equal(numbers.view(np.uint32), golden[name.removeprefix("of.")].view(np.uint32), name)


def test_pairs_of_every_type():
    pairs = read_gguf(HERE / "golden_blocks.gguf").pairs
    assert [array.tolist() for array in pairs.pop("b.nested")] == [[1, 2], [3]]
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in pairs.items()}
    assert found == PAIRS | {f"b.{name}": value for name, value in MORE.items()}
    assert type(found["a.flag"]) is bool


@pytest.mark.parametrize("kind", BLOCKS.values(), ids=lambda kind: kind.name)
def test_mlxs_formula_gives_the_same_numbers(kind, golden):
    """scale * integer + bias; only the sign of a zero may differ."""
    blocks = read_gguf(HERE / "golden_blocks.gguf").tensors[f"of.{kind.name}"].blocks()
    integers, scales = kind.integers(blocks), kind.scales(blocks)
    assert integers.dtype == np.uint8
    assert integers.max() < 2**kind.bits
    grouped = integers.astype(np.float32).reshape(*scales.shape, kind.group)
    numbers = grouped * scales[..., None] + kind.biases(blocks)[..., None]
    np.testing.assert_array_equal(numbers.reshape(2, -1), golden[kind.name])


def test_a_file_is_that_of_the_package_byte_for_byte(golden, tmp_path):
    """By `make_golden_gguf.py`: header, pairs, alignment, and rounding."""
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
    write_gguf(tmp_path / "x.gguf", PAIRS, {f"of.{kind}": (golden["rounded"], kind) for kind in kinds})
    assert (tmp_path / "x.gguf").read_bytes() == (HERE / "golden_written.gguf").read_bytes()


def split(folder: Path, **changed: dict) -> list[Path]:
    """Two parts; changed: pairs of one of them, "first" or "second"."""
    paths = [folder / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        own = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        own |= changed.get(("first", "second")[number], {})
        write_gguf(path, own, {"ab"[number]: (np.full(3, number, np.float32), "F32")})
    return paths


def test_a_split_file_is_one(tmp_path):
    for path in split(tmp_path):
        tensors = read_gguf(path).tensors
        assert {name: np.asarray(tensor.stored()).tolist() for name, tensor in tensors.items()} == {
            "a": [0, 0, 0],
            "b": [1, 1, 1],
        }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"second": {"split.no": 0}}, "part 2 of 2"),
        ({"second": {"split.count": 3}}, "part 2 of 2"),
        ({"first": {"split.tensors.count": 3}}, "2 tensors"),
        ({"first": {"split.count": 3}}, "name them NAME-00001-of-00003.gguf"),
    ],
)
def test_parts_that_do_not_fit(changed, expected, tmp_path):
    first, _ = split(tmp_path, **changed)
    with pytest.raises(UserError, match=expected):
        read_gguf(first)


def test_a_missing_part(tmp_path):
    first, second = split(tmp_path)
    second.unlink()
    with pytest.raises(UserError, match=r"x-00002-of-00002\.gguf is missing"):
        read_gguf(first)


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def tensor(name: str = "a", sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file(pairs: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    front = b"GGUF" + struct.pack("<IQQ", version, *counts) + pairs + tensors
    return front + bytes(-len(front) % 32) + np.ones(16, np.float32).tobytes()


def pair(key: str, number: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", number) + value


NESTED = struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 4, 0)
LIES = {
    "no such file at all": (b"GGML" + bytes(60), "is no GGUF file"),
    "nothing": (b"", "is no GGUF file"),
    "cut after the magic": (b"GGUF", "behind the file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "version": (file(version=1), "is version 1"),
    "tensors": (file(counts=(2**60, 0)), "1,152,921,504,606,846,976 tensors"),
    "pairs": (file(counts=(0, 2**63)), "more than fit"),
    "a key's length": (file(struct.pack("<Q", 2**62), counts=(0, 1)), "a key would end behind"),
    "a key's letters": (file(pair("k", 0, b"1").replace(b"k", b"\xff"), counts=(0, 1)), "no UTF-8"),
    "a key twice": (file(2 * pair("k", 0, b"1"), counts=(0, 2)), "the key 'k' twice"),
    "a value's type": (file(pair("k", 13, b""), counts=(0, 1)), "k is of type 13"),
    "values' type": (file(pair("k", 9, struct.pack("<IQ", 77, 1)), counts=(0, 1)), "values of type 77"),
    "values": (file(pair("k", 9, struct.pack("<IQ", 4, 2**61)), counts=(0, 1)), "values of k"),
    "texts": (file(pair("k", 9, struct.pack("<IQ", 8, 2**61)), counts=(0, 1)), "values of k"),
    "a text's length": (file(pair("k", 8, struct.pack("<Q", 900)), counts=(0, 1)), "k would end behind"),
    "nesting": (file(pair("k", 9, NESTED), counts=(0, 1)), "arrays 5 deep"),
    "alignment": (file(pair("general.alignment", 4, struct.pack("<I", 48)), counts=(0, 1)), "no power of 2"),
    "no alignment": (file(pair("general.alignment", 4, bytes(4)), counts=(0, 1)), "no power of 2"),
    "a tensor twice": (file(tensors=tensor() + tensor(offset=32), counts=(2, 0)), "the tensor 'a' twice"),
    "no size": (file(tensors=tensor(sizes=()), counts=(1, 0)), "has 0 dimensions"),
    "sizes": (file(tensors=tensor(sizes=(1,) * 5), counts=(1, 0)), "has 5 dimensions"),
    "a size": (file(tensors=tensor(sizes=(2**40, 2**40)), counts=(1, 0)), "a .* would end behind"),
    "a place": (file(tensors=tensor(offset=2**60), counts=(1, 0)), "a .* would end behind"),
    "an odd place": (file(tensors=tensor(offset=4), counts=(1, 0)), "begins at 4"),
    "a place of two": (file(tensors=tensor(sizes=(12,)) + tensor("b", offset=32), counts=(2, 0)), "a and b overlap"),
    "half a block": (file(tensors=tensor(sizes=(40,), kind=2), counts=(1, 0)), "whole blocks of 32"),
    "a type we don't read": (file(tensors=tensor("blk.0", kind=23), counts=(1, 0)), "blk.0 has type IQ4_XS"),
    "a type that is none": (file(tensors=tensor("blk.0", kind=99), counts=(1, 0)), "blk.0 has type number 99"),
}


@pytest.mark.parametrize(("data", "expected"), LIES.values(), ids=LIES)
def test_a_lie_is_one_error(data, expected, tmp_path):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(UserError, match=expected) as error:
        read_gguf(tmp_path / "x.gguf")
    assert str(error.value).startswith(f"{tmp_path / 'x.gguf'}: ")
    assert "\n" not in str(error.value)


def test_a_file_cut_anywhere_is_an_error_before_its_tensors(tmp_path):
    data = (HERE / "golden_blocks.gguf").read_bytes()
    for end in range(0, len(data), 7):
        (tmp_path / "x.gguf").write_bytes(data[:end])
        with pytest.raises(UserError):
            read_gguf(tmp_path / "x.gguf")


def test_a_hole_is_not_read_into_memory(tmp_path):
    """An array of 8 GB that the file's size allows."""
    (tmp_path / "x.gguf").write_bytes(file(pair("k", 9, struct.pack("<IQ", 4, 2**31)), counts=(0, 1)))
    os.truncate(tmp_path / "x.gguf", 2**34)
    with pytest.raises(UserError, match="more than keys and values take"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_numbers_that_are_not_finite(kind, tmp_path):
    data = bytearray((HERE / "golden_blocks.gguf").read_bytes())
    tensor = read_gguf(HERE / "golden_blocks.gguf").tensors[f"of.{kind}"]
    data[tensor.begin : tensor.begin + 4] = {"BF16": b"\x80\x7f\0\0"}.get(kind, b"\0\x7c\x80\x7f")
    (tmp_path / "x.gguf").write_bytes(data)
    stored = read_gguf(tmp_path / "x.gguf").tensors[f"of.{kind}"].stored()
    with pytest.raises(UserError, match=f"of.{kind} is not finite"):
        np.asarray(stored)
