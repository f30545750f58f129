"""Lines of plain and packed files, a block at a time: the same whatever the blocks, and what is refused."""

from __future__ import annotations

import builtins
import gzip

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mlx_transformer.data import line_files
from mlx_transformer.data.corpus import read_lines
from mlx_transformer.data.line_files import line_blocks
from mlx_transformer.system.errors import UserError

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def lines_of(path) -> list[str]:
    return [line for block in line_blocks(path) for line in block]


def written(folder, data: bytes, ending: str = ""):
    path = folder / f"text{ending}"
    path.write_bytes(PACK[ending](data))
    return path


@given(
    st.lists(st.text(st.sampled_from("aß\r\n\0\u2028\u0085\x0c 𝄞\ufeff"), max_size=12), max_size=8), st.integers(1, 9)
)
def test_lines_are_those_of_a_file_read_whole(tmp_path_factory, pieces, block):
    """Whatever the blocks: one may end inside a character or between \\r and \\n."""
    folder, data = tmp_path_factory.mktemp("lines"), "".join(pieces).encode()
    expected = read_lines(written(folder, data))
    for ending in PACK:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line_files, "BLOCK", block)
            patch.setattr(line_files, "ZSTANDARD_BLOCK", block)
            assert lines_of(written(folder, data, ending)) == expected


def test_several_members_are_one_text(tmp_path):
    for ending, pack in PACK.items():
        path = tmp_path / f"two{ending}"
        path.write_bytes(pack(b"one\ntw") + pack(b"o\n") + pack(b"three"))
        assert lines_of(path) == ["one", "two", "three"]


@pytest.mark.parametrize("ending", PACK)
def test_no_utf8_is_refused_with_line_and_byte(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(line_files, "BLOCK", 4)
    with pytest.raises(UserError, match=r"line 3, byte 3: not UTF-8 \(0xef\); convert the file"):
        lines_of(written(tmp_path, b"fine\nfine\nna\xefve\n", ending))
    with pytest.raises(UserError, match="is UTF-16; convert it"):
        lines_of(written(tmp_path, "a\nb\n".encode("utf-16"), ending))


@pytest.mark.parametrize("ending", PACK)
def test_a_line_without_end_is_refused_before_it_is_read(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(line_files, "LONGEST_LINE", 3000)
    monkeypatch.setattr(line_files, "BLOCK", 1000)
    for data in (b"a\nb\n" + b"x" * 4000, b"a\nb\n" + b"\0" * 3500 + b"\nc\n"):
        with pytest.raises(UserError, match=r"line 3: more than .* MB in one line; is it text"):
            lines_of(written(tmp_path, data, ending))
    assert lines_of(written(tmp_path, b"a\n" + b"x" * 2500 + b"\nc", ending)) == ["a", "x" * 2500, "c"]


@pytest.mark.parametrize(("ending", "kind"), [(".gz", "gzip"), (".zst", "zstd")])
def test_damaged_packed_files_are_refused(tmp_path, ending, kind):
    path = written(tmp_path, b"".join(b"line %d\n" % (i * i) for i in range(5000)), ending)
    whole = path.read_bytes()
    damaged = [
        b"no packed text\n",
        whole[: len(whole) // 2],
        whole[:-1],
        whole[:3],
        whole + b"and more",
        whole + whole[:40],
    ]
    damaged.append(whole[:200] + bytes([whole[200] ^ 255, whole[201] ^ 255]) + whole[202:])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"text{ending}: damaged, or no {kind} file \(") as caught:
            lines_of(path)
        assert "\n" not in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path):
    for name in ("none", "none.gz", "none.zst"):
        with pytest.raises(UserError, match="no such file"):
            lines_of(tmp_path / name)
    with pytest.raises(UserError, match="cannot be read"):
        lines_of(tmp_path)


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch):
    path = written(tmp_path, b"a\n", ".zst")
    imported = builtins.__import__

    def without(name, *others, **more):
        if name == "zstandard":
            raise ImportError(name)
        return imported(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"text.zst: a .zst file needs zstandard: pip install .*\[data\]"):
        lines_of(path)
