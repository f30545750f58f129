"""The one place that reads files: what is no file, what is too large, what is no text and no JSON."""

from __future__ import annotations

import os
import select
import threading

import pytest
from waiting import until

from export import OnnxTransformer
from mlx_transformer import load
from mlx_transformer.core.folders import Place
from mlx_transformer.data import line_files
from mlx_transformer.data.corpus import read_lines
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import (
    DEEPEST,
    MAX_FILE_BYTES,
    open_regular,
    parse_json,
    read_json,
    read_protobuf,
    read_text,
)
from mlx_transformer.system.manifest import sha256
from mlx_transformer.system.tensors import read_tensors
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.recipe import load_recipe

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
READERS = {
    "text": read_text,
    "JSON": read_json,
    "tokenizer": Tokenizer.load,
    "tensors": read_tensors,
    "digest": sha256,
    "recipe": lambda path: load_recipe(str(path), {}),
    "lines": read_lines,
    "graph": read_protobuf,
}


@needs_pipes
@pytest.mark.parametrize("reader", READERS)
def test_pipes_and_devices_are_never_waited_for(reader, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "zero", "loop", "nothing"):
        with pytest.raises(UserError, match=f"{name}: (is no|is a pipe that nobody writes to|cannot be read|no such)"):
            READERS[reader](tmp_path / name)


@pytest.mark.parametrize("reader", [name for name in READERS if name != "digest"])
def test_files_as_large_as_a_disk_are_refused_unread(reader, tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        UserError, match=r"sparse(: 1,099,511\.6 MB, more than|: damaged, or no safetensors|, line 1: more than)"
    ):
        READERS[reader](tmp_path / "sparse")
    assert MAX_FILE_BYTES < 1 << 30


def test_text_and_names_that_are_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"a\xe9")
    with pytest.raises(UserError, match=r"latin: cannot be read \(not UTF-8 at byte 2\)"):
        read_text(tmp_path / "latin")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)|no regular file"):
        read_text(tmp_path)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(UserError, match="cannot be read"):
            read_lines(name)


@pytest.mark.parametrize("name", ["a" * 5000, f"{'b/' * 3000}c", "a\0b"])
@pytest.mark.parametrize("reader", [load, OnnxTransformer, Place.of, READERS["tokenizer"], READERS["recipe"]])
def test_names_that_the_system_does_not_take(name, reader):
    with pytest.raises(UserError, match=r"cannot be read \(") as error:
        reader(name)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("reader", [load, OnnxTransformer, Place.of])
@pytest.mark.parametrize(("name", "found"), [("", "nothing"), (None, "NoneType"), (0, "int"), (b"model", "bytes")])
def test_what_is_no_name(name, found, reader):
    with pytest.raises(UserError, match=f"expected a path or a name, found {found}"):
        reader(name)


def test_a_name_that_is_no_text_can_be_printed():
    with pytest.raises(UserError) as error:
        load("a\ud800")
    assert str(error.value).encode().startswith(rb"a\ud800: cannot be read")


def test_json_that_is_none_or_has_no_end(tmp_path):
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(UserError, match="deep: damaged, or not JSON"):
        read_json(tmp_path / "deep")
    whole = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(whole, "x", "y")
    for text in (f"[[{whole}]]", '{"a":' * 900 + "1" + "}" * 900):
        with pytest.raises(UserError, match=rf"^x \(more than {DEEPEST} brackets deep\); y$"):
            parse_json(text, "x", "y")
    with pytest.raises(UserError, match="integer string conversion"):
        parse_json("9" * 5000, "x", "y")


@needs_pipes
def test_text_may_come_from_a_pipe_that_somebody_writes_to(tmp_path):
    """As the shell's <(command) makes them."""
    os.mkfifo(tmp_path / "pipe")
    keeper = os.open(tmp_path / "pipe", os.O_RDWR)  # else the reader may come before anybody writes

    def write():
        os.write(keeper, b"one\ntwo\n")
        until(lambda: not select.select([keeper], [], [], 0)[0])  # all is read; else it would be lost with the pipe
        os.close(keeper)

    writer = threading.Timer(0.2, write)
    writer.start()
    assert read_lines(tmp_path / "pipe") == ["one", "two"]
    writer.join()
    keeper = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(keeper, b"three\nfour")
    with open_regular(tmp_path / "pipe", pipes=True) as file:
        os.close(keeper)
        assert (file.readline(), file.read(), file.read()) == (b"three\n", b"four", b"")


def test_a_line_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(line_files, "LONGEST_LINE", 8)
    (tmp_path / "text").write_bytes(b"1234567\n1234\n")
    assert read_lines(tmp_path / "text") == ["1234567", "1234"]
    for data in (b"123456789", b"1\n123456789\n", b"1234567\n12345678901\n"):
        (tmp_path / "text").write_bytes(data)
        with pytest.raises(UserError, match=rf"text, line {1 + (data[1:8].count(10))}: more than 16 MB in one line"):
            read_lines(tmp_path / "text")


def test_a_hole_is_no_protobuf(tmp_path):
    with (tmp_path / "hole").open("wb") as file:
        file.truncate((1 << 31) - 1)
    with pytest.raises(UserError, match="hole: damaged, or no ONNX model"):
        read_protobuf(tmp_path / "hole")
    (tmp_path / "whole").write_bytes(b"\x08\x0a")
    assert read_protobuf(tmp_path / "whole") == b"\x08\x0a"
