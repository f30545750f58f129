"""Parallel text: what a line is, what is refused, and the first suspect line of unequal files."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transformer.data.corpus import (
    ParallelText,
    read_lines,
    read_parallel,
    suspect_line,
    write_lines,
)
from mlx_transformer.system.errors import UserError


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"\n", [""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\nc", ["a\rb", "c"]),
        (b"a\r\r\n", ["a\r"]),
        (b"a\nb\r", ["a", "b\r"]),  # no newline follows: the CR is text
        ("a\u2028b\u0085c\x0bd\x0ce\x1cf\n".encode(), ["a\u2028b\u0085c\x0bd\x0ce\x1cf"]),
    ],
)
def test_lines_end_at_newline_only(data, lines, tmp_path):
    (tmp_path / "text").write_bytes(data)
    assert read_lines(tmp_path / "text") == lines


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n")).map(lambda s: s.rstrip("\r")))
)
def test_written_lines_come_back(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "text"
    write_lines(path, lines)
    expected = [line.removeprefix("\ufeff") if i == 0 else line for i, line in enumerate(lines)]
    assert read_lines(path) == expected


def test_writing_refuses_a_line_end_inside_a_line(tmp_path):
    for line in ("a\nb", "a\r"):
        with pytest.raises(UserError, match="line 2"):
            write_lines(tmp_path / "text", ["fine", line])


def test_read_parallel_keeps_everything_and_digests_the_bytes(tmp_path):
    (tmp_path / "s").write_bytes("\ufeffeins\n\nd\u2028rei\n".encode())
    (tmp_path / "t").write_bytes(b"one\r\ntwo\r\nthree")
    text = read_parallel(tmp_path / "s", tmp_path / "t")
    assert text.source == ["eins", "", "d\u2028rei"]
    assert text.target == ["one", "two", "three"]
    assert text.digests["target"] == hashlib.sha256(b"one\r\ntwo\r\nthree").hexdigest()
    training, dropped = text.without_empty()
    assert dropped == 1
    assert training.source == ["eins", "d\u2028rei"]
    assert training.target == ["one", "three"]
    assert len(text) == 3
    same, none = training.without_empty()
    assert same is training
    assert none == 0


def test_digest_of_lines_is_that_of_the_written_file(tmp_path):
    text = ParallelText(["a", "ü"], ["b", "c"])
    text.write(tmp_path / "s", tmp_path / "t")
    assert read_parallel(tmp_path / "s", tmp_path / "t").digests == text.digests


def test_invalid_utf8_is_refused_with_file_and_line(tmp_path):
    (tmp_path / "s").write_bytes(b"fine\nna\xefve\n")
    (tmp_path / "t").write_bytes(b"x\ny\n")
    with pytest.raises(UserError, match=r"s, line 2, byte 3: not UTF-8 \(0xef\)"):
        read_parallel(tmp_path / "s", tmp_path / "t")


def test_missing_folder_and_empty_files_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="no such file"):
        read_parallel(tmp_path / "none", tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be read"):
        read_lines(tmp_path)
    with pytest.raises(UserError, match="hold no lines"):
        read_parallel(tmp_path / "empty", tmp_path / "empty")


def suspect(source: list[str], target: list[str]) -> int:
    return suspect_line(*(np.array([len(line) for line in lines], float) for lines in (source, target)))


def test_unequal_counts_name_both_and_the_first_suspect(tmp_path):
    rng = random.Random(5)
    source = ["x" * rng.randint(5, 120) for _ in range(200)]
    target = [line + "y" * (len(line) // 5) for line in source]
    for missing in (0, 37, 150, 199):
        short = target[:missing] + target[missing + 1 :]
        assert abs(suspect(source, short) - (missing + 1)) <= 1
        assert abs(suspect(short, source) - (missing + 1)) <= 1
    write_lines(tmp_path / "s", source)
    write_lines(tmp_path / "t", target[:37] + target[38:])
    with pytest.raises(UserError, match=r"200 lines.* 199.*line 3[789] ") as caught:
        read_parallel(tmp_path / "s", tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_suspect_line_of_extreme_files():
    assert suspect([], ["a"]) == 1
    assert suspect(["a"] * 3, ["a"] * 5) in range(1, 5)
    assert suspect(["", ""], ["", "", ""]) in range(1, 4)


def test_select_and_kinds():
    text = ParallelText(["a", "b"], ["c", "d"], ["k", "l"])
    assert text.select([1]) == ParallelText(["b"], ["d"], ["l"])
    with pytest.raises(UserError, match="1 kinds for 2 pairs"):
        ParallelText(["a", "b"], ["c", "d"], ["k"])
    with pytest.raises(UserError, match="source has 1 lines, target has 2"):
        ParallelText(["a"], ["c", "d"])
