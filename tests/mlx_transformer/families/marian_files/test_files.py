"""Marian's files: read and written back byte for byte, and every damage told in one line."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from marian_models import STUDENT, bin_bytes, model_items, npz_bytes, shortlist

from mlx_transformer.core.shortlist import read_shortlist, shortlist_bytes
from mlx_transformer.families.marian_files.items import (
    INTGEMM8,
    OPTIONS,
    Item,
    int8_item,
    is_quantized,
    parse_bin,
    read_npz,
)
from mlx_transformer.system.errors import UserError

SMALL = {**STUDENT, "dim-emb": 4, "enc-depth": 1, "dec-depth": 1, "transformer-heads": 2, "transformer-dim-ffn": 4}
SMALL["dim-vocabs"] = [8, 8]
ITEMS = model_items(SMALL, integers=True)
DATA = bin_bytes(ITEMS)


def test_a_file_of_integers_comes_back_byte_for_byte():
    assert parse_bin(DATA) == ITEMS
    assert bin_bytes(parse_bin(DATA)) == DATA
    begin = DATA.index(ITEMS[0].data[:20])
    assert begin % 256 == 0
    assert {len(item.data) % 256 for item in ITEMS[:-1]} == {0}


def test_integers_stand_for_products_with_the_reciprocal():
    """A quotient by the multiplier has other last bits."""
    q = np.arange(-127, 128).reshape(15, 17)
    item = int8_item("encoder_l1_ffn_W1", q, np.float32(190.3))
    expected = q.astype(np.float32) * (np.float32(1) / np.float32(190.3))
    assert np.array_equal(item.numbers(), expected)
    assert not np.array_equal(item.numbers(), q.astype(np.float32) / np.float32(190.3))


def test_matrices_lie_transposed_but_embeddings_do_not():
    q = np.arange(6).reshape(2, 3)
    matrix, table = int8_item("decoder_l1_rnn_Wf", q, np.float32(1)), int8_item("encoder_Wemb", q, np.float32(1))
    assert [*matrix.data[:6]] == [0, 3, 1, 4, 2, 5]
    assert [*table.data[:6]] == [0, 1, 2, 3, 4, 5]
    for item in (matrix, table):
        assert np.array_equal(item.stored(), q)
        assert np.array_equal(parse_bin(bin_bytes([item, ITEMS[-1]]))[0].stored(), q)


def test_the_scale_of_the_output_is_a_matrix_by_its_name():
    items = {item.name: item for item in ITEMS}
    scale = items["Wemb_QuantMultA"]
    assert (scale.type, scale.stored().item()) == (INTGEMM8, 127)
    np.testing.assert_allclose(scale.numbers(), items["none_QuantMultA"].numbers(), rtol=1e-6)
    assert {item.name for item in ITEMS if item.type == INTGEMM8} == {i.name for i in ITEMS if is_quantized(i.name)}


def changed(at: int, layout: str, value: int) -> bytes:
    data = bytearray(DATA)
    struct.pack_into(layout, data, at, value)
    return bytes(data)


HEADERS, COUNT = 16, len(ITEMS)
NAMES = HEADERS + 32 * COUNT
SHAPES = NAMES + sum(len(item.name) + 1 for item in ITEMS)
PAD = SHAPES + sum(4 * len(item.shape) for item in ITEMS)
FLOAT = next(i for i, item in enumerate(ITEMS) if item.name == "decoder_ff_logit_out_b")
DATA_OF_FLOAT = DATA.index(ITEMS[FLOAT].data)
DAMAGE = {
    "version": (changed(0, "<Q", 2), "its version is 2, not 1"),
    "count": (changed(8, "<Q", 1 << 60), f"it says that it holds {1 << 60} tensors"),
    "none": (changed(8, "<Q", 0), "it says that it holds 0 tensors"),
    "length of a name": (changed(HEADERS, "<Q", 1 << 50), f"tensor 0 has a name of {1 << 50} bytes"),
    "rank": (changed(HEADERS + 16, "<Q", 1 << 40), f"and rank {1 << 40}"),
    "unknown type": (changed(HEADERS + 8, "<Q", 0x5101), "Wemb is of the unknown type 0x5101"),
    "FBGEMM": (changed(HEADERS + 8, "<Q", 0x1801), "Wemb is of FBGEMM's type packed8avx2: convert"),
    "more data": (changed(HEADERS + 24, "<Q", 1 << 62), "its tensors end at byte"),
    "shape": (changed(SHAPES, "<i", 1 << 20), r"Wemb \(1048576, 4\) needs 4194308 bytes and has 256"),
    "negative": (changed(SHAPES, "<i", -8), r"Wemb has the shape \(-8, 4\)"),
    "pad": (changed(PAD, "<Q", 1 << 55), "bytes before the data, which are not"),
    "a name": (changed(NAMES, "<B", 0xFF), "is no name"),
    "two alike": (DATA.replace(b"none_QuantMultA", b"Wemb_QuantMultA", 1), "Wemb_QuantMultA is there twice"),
    "not finite": (changed(DATA_OF_FLOAT, "<f", float("nan")), "decoder_ff_logit_out_b is not finite"),
    "no multiplier": (DATA.replace(struct.pack("<f", ITEMS[0].multiplier), bytes(4), 1), "Wemb has the multiplier 0"),
    "no options": (bin_bytes(ITEMS[:-1]), f"{OPTIONS} is not the last"),
    "options first": (bin_bytes(ITEMS[::-1]), f"{OPTIONS} is not the last"),
    "options in another code": (DATA[:-9] + b"\xff" * 8 + b"\0", f"{OPTIONS} is no text"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(name: str) -> None:
    data, message = DAMAGE[name]
    with pytest.raises(UserError, match=message) as caught:
        parse_bin(data, "here.bin")
    assert str(caught.value).startswith("here.bin: no Marian model that can be read: ")
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once():
    data = bytearray(changed(HEADERS + 8, "<Q", 0x802))
    struct.pack_into("<Q", data, HEADERS + 32 + 8, 0x77)
    with pytest.raises(UserError, match=r"packed16.*; .*unknown type 0x77"):
        parse_bin(bytes(data))


def test_every_cut_is_refused():
    ends = [*range(0, PAD + 300, 7), *range(PAD + 300, len(DATA), 257), len(DATA) - 1]
    found = []
    for end in ends:
        with pytest.raises(UserError) as caught:
            parse_bin(DATA[:end])
        found.append(str(caught.value))
    assert [message for message in found if "\n" in message] == []
    assert len(found) == len(ends)


def test_an_archive_comes_back(tmp_path: Path) -> None:
    items = model_items(SMALL, garbage=False)
    (tmp_path / "model.npz").write_bytes(npz_bytes(items))
    assert read_npz(tmp_path / "model.npz") == items
    assert npz_bytes(read_npz(tmp_path / "model.npz")) == npz_bytes(items)
    loaded = np.load(tmp_path / "model.npz", allow_pickle=False)
    assert {item.name for item in items} == set(loaded)
    assert np.array_equal(loaded["Wemb"], items[0].stored())
    np.savez(tmp_path / "by_numpy.npz", **{name: loaded[name] for name in loaded})
    assert read_npz(tmp_path / "by_numpy.npz") == items


def archive(change: Callable[[dict[str, np.ndarray]], None], compressed: bool = False) -> bytes:
    arrays = {item.name: item.stored() for item in model_items(SMALL, garbage=False)}
    change(arrays)
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def put(name: str, array: np.ndarray) -> bytes:
    return archive(lambda arrays: arrays.update({name: array}))


def lying() -> bytes:
    """The header of one array speaks of more numbers than there are."""
    data = put("Wemb", np.zeros((8, 4), np.float32))
    return data.replace(b"(8, 4)", b"(9, 4)")


ARCHIVES = {
    "pickle": (put("Wemb", np.array([{"a": 1}], object)), "Wemb is of object"),
    "text": (put("Wemb", np.array(["a"])), "Wemb is of <U1"),
    "double": (put("Wemb", np.zeros((8, 4))), "Wemb is of float64"),
    "columns": (put("Wemb", np.zeros((8, 4), np.float32, "F")), "in the order of columns"),
    "whole numbers": (put("Wemb", np.zeros((8, 4), np.int8)), "Wemb is of int8, not float32"),
    "not finite": (put("Wemb", np.full((8, 4), np.inf, np.float32)), "Wemb is not finite"),
    "no options": (archive(lambda arrays: arrays.pop(OPTIONS)), f"{OPTIONS} is missing"),
    "optimizer": (put("adam_mt", np.zeros((1, 9), np.float32)), "holds the state of an optimizer"),
    "no archive": (b"PK\3\4" + bytes(99), "damaged, or no .npz file"),
    "a text": (b"hello", "damaged, or no .npz file"),
    "lying": (lying(), r"damaged|needs 144 bytes and has 128"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_wrong_archive_is_one_line(name: str, tmp_path: Path) -> None:
    data, message = ARCHIVES[name]
    (tmp_path / "model.npz").write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_npz(tmp_path / "model.npz")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "model.npz") in str(caught.value)


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(npz_bytes(model_items(SMALL)))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("Wemb.npy", archive.read("Wemb.npy"))
    with pytest.raises(UserError, match="Wemb is there twice"):
        read_npz(path)


def test_an_archive_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(archive(lambda arrays: None, compressed=True))
    assert read_npz(tmp_path / "model.npz") == model_items(SMALL, garbage=False)


def test_shortlists_come_back_and_choose(tmp_path: Path) -> None:
    path, given = tmp_path / "lex.bin", shortlist(29, 29)
    path.write_bytes(shortlist_bytes(given))
    read = read_shortlist(path)
    assert shortlist_bytes(read) == path.read_bytes()
    source = [5, 7, 9, 0]
    expected = {*range(3), *source}
    for id in source:
        expected |= {*given.ids[int(given.offsets[id]) : int(given.offsets[id + 1])].tolist()}
    free = (id for id in range(3, 29) if id not in expected)
    expected |= {next(free) for _ in range(-len(expected) % 8)}
    assert read.candidates(source, 29, shared=True).tolist() == sorted(expected)
    alone = read.candidates([28], 29, shared=False)
    assert len(alone) == 8
    assert len(read.candidates(range(29), 29, shared=True)) == 29  # no more are free


@pytest.mark.parametrize(
    ("at", "layout", "value", "message"),
    [
        (0, "<Q", 1, "no shortlist of Marian's"),
        (8, "<Q", 1, "its checksum differs"),
        (16, "<Q", 1 << 40, "checksum differs; its first"),
        (32, "<Q", 1 << 40, "offsets and"),
        (40, "<Q", 1 << 62, "entries need"),
        (48, "<Q", 7, "its offsets don't ascend"),
    ],
)
def test_a_damaged_shortlist_is_one_line(at: int, layout: str, value: int, message: str, tmp_path: Path) -> None:
    data = bytearray(shortlist_bytes(shortlist(29, 29)))
    struct.pack_into(layout, data, at, value)
    (tmp_path / "lex.bin").write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_shortlist(tmp_path / "lex.bin")


def test_lists_ascend(tmp_path: Path) -> None:
    given = shortlist(29, 29)
    begin = next(int(a) for a, b in zip(given.offsets, given.offsets[1:], strict=False) if b - a > 1)
    given.ids[begin : begin + 2] = given.ids[begin : begin + 2][::-1].copy()
    (tmp_path / "lex.bin").write_bytes(shortlist_bytes(given))
    with pytest.raises(UserError, match="the pieces of a list don't ascend"):
        read_shortlist(tmp_path / "lex.bin")


def test_items_of_two_multipliers_are_unlike():
    item = int8_item("Wemb", np.ones((2, 2)), np.float32(2))
    assert item != Item(item.name, item.type, item.shape, bytes(len(item.data)))
