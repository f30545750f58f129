"""Files translated: lines kept, checked before the first batch, written whole or not at all, continued."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
from upper_case import TOKENIZER, UpperCase

from mlx_transformer.decoding.options import Hypothesis
from mlx_transformer.generation import line_files, output
from mlx_transformer.generation.files import Layout, translate_stream
from mlx_transformer.generation.line_files import LineReader
from mlx_transformer.generation.output import claim_lines
from mlx_transformer.generation.translate import Translation
from mlx_transformer.system.errors import UserError


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(line_files, "PART_LINES", 3)


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_keeps_its_lines(tmp_path, capsys):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\x85\xffthree\nfour\rfive")
    translate_stream(UpperCase(), source, target)
    assert target.read_bytes() == "ONE\n\nTWO\ufffd\ufffdTHREE\nFOUR\rFIVE\n".encode()
    assert "line 3: not UTF-8" in capsys.readouterr().err
    translate_stream(UpperCase(), source, target, n_best=2, force=True)
    assert target.read_bytes().split(b"\n")[:2] == [b"ONE\tONE!", b"\t"]
    with pytest.raises(UserError, match="is read as well"):
        translate_stream(UpperCase(), source, source)
    with pytest.raises(UserError, match="cannot be read"):
        translate_stream(UpperCase(), tmp_path / "none", tmp_path / "new")
    with pytest.raises(UserError, match="cannot be written"):
        translate_stream(UpperCase(), source, tmp_path / "none" / "out")
    assert names(tmp_path) == {"in", "out"}


def test_standard_streams_and_newlines_in_outputs(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n")))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out, isatty=lambda: False))
    model = UpperCase()
    model.search = lambda rows, **options: [[Hypothesis(TOKENIZER.encode("a\nb")[:-1], 0.0)] for _ in rows]
    translate_stream(model)
    assert out.getvalue() == b"a b\na b\n"
    translate_stream(model, text=["one"])
    assert out.getvalue() == b"a b\n" * 3


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_is_named_with_the_remedy(tmp_path, monkeypatch, encoding):
    data = ("\ufeff" if encoding.endswith("be") else "") + "one\ntwo\n"
    (tmp_path / "in").write_bytes(data.encode(encoding))
    name = encoding[:6].upper()
    with pytest.raises(UserError, match=f"in: is {name}; convert it: iconv -f {name} -t UTF-8"):
        translate_stream(UpperCase(), tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / "in").read_bytes())))
    with pytest.raises(UserError, match=f"standard input: is {name}"):
        translate_stream(UpperCase(), None, tmp_path / "out")
    assert names(tmp_path) == {"in"}


def test_a_bad_line_is_found_before_the_first_batch(tmp_path, small_parts):
    calls, source, target = [], tmp_path / "in", tmp_path / "out"
    source.write_text("one\n" * 7 + "xyz" * 40 + "\n")
    target.write_text("of yesterday")
    with pytest.raises(UserError, match="line 8: "):
        translate_stream(UpperCase(calls=calls), source, target, overlong="error", force=True)
    assert (calls, target.read_text(encoding="utf-8"), names(tmp_path)) == ([], "of yesterday", {"in", "out"})


@pytest.mark.parametrize(("overlong", "done"), [("split", "in pieces"), ("truncate", "as far"), ("skip", "left empty")])
def test_long_lines_are_counted_in_a_last_line(tmp_path, capsys, small_parts, overlong, done):
    (tmp_path / "in").write_text("one\n" * 4 + "xyz " * 40 + "\ntwo\n" + "xyz" * 40 + "\n")
    translate_stream(UpperCase(), tmp_path / "in", tmp_path / "out", overlong=overlong)
    found = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert (len(found), found[4] == "", found[5]) == (8, overlong == "skip", "TWO")
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{tmp_path / 'in'}: 2 of 7 lines, the first of them line 5: longer than the model takes")
    assert done in said


def test_a_stream_is_read_in_parts_of_bounded_size(monkeypatch, tmp_path):
    monkeypatch.setattr(line_files, "PART_BYTES", 8)
    text = [b"a", b"b", b"c", b"a long line", b"d", b"e"]
    reader = LineReader(io.BytesIO(b"\n".join(text)), "text")
    assert list(reader.parts(2)) == [["a", "b"], ["c", "a long line"], ["d", "e"]]
    assert (reader.number, reader.position) == (6, len(b"\n".join(text)))
    assert next(LineReader(io.BytesIO(b"\n".join(text)), "text").parts(9)) == ["a", "b", "c", "a long line"]


def test_layouts():
    found = [Translation("a\tb", -1.5), Translation("c", -2.25)]
    assert Layout().line("x", found) == "a\tb"
    assert Layout(scores=True).line("x", found) == "a b\t-1.5000"
    assert Layout(n_best=3, scores=True).line("x", found) == "a b\t-1.5000\tc\t-2.2500\t\t"
    assert Layout(n_best=3).line("", [Translation("", 0.0)]) == "\t\t"
    read = json.loads(Layout(n_best=2, json=True).line("ü\t", found))
    assert read == {
        "source": "ü\t",
        "translations": [{"text": "a\tb", "score": -1.5}, {"text": "c", "score": -2.25}],
    }


class StoppedError(Exception):
    pass


def stopping(after: int, error: BaseException | None = None):
    """A translator that fails after so many calls."""
    model = UpperCase()
    whole, left = model.search, [after]

    def search(rows, **options):
        left[0] -= 1
        if left[0] < 0:
            raise error or StoppedError
        return whole(rows, **options)

    model.search = search
    return model


TEXT = "".join(f"{word}\n" for word in "one two three four five six one two three four".split())


def test_an_interrupted_file_is_continued_with_the_same_bytes(tmp_path, small_parts, capsys):
    source, target, expected = tmp_path / "in", tmp_path / "out", tmp_path / "expected"
    source.write_text(TEXT + "xyz" * 40 + "\n" + TEXT)
    translate_stream(UpperCase(), source, expected, overlong="split")
    told = capsys.readouterr().err.replace("expected", "out")
    target.write_text("of yesterday")
    for round in range(1, 4):
        with pytest.raises(StoppedError):
            translate_stream(stopping(2), source, target, overlong="split", resume=round > 1, force=True)
        assert target.read_text(encoding="utf-8") == "of yesterday"
        done = (tmp_path / "out.partial").read_bytes()
        assert expected.read_bytes().startswith(done)
        with open(tmp_path / "out.partial", "ab") as file:  # killed in the midst of a write
            file.write(b"half a li")
    translate_stream(stopping(4), source, target, overlong="split", resume=True, force=True)
    assert target.read_bytes() == expected.read_bytes()
    assert names(tmp_path) == {"in", "out", "expected"}
    assert capsys.readouterr().err == told


def test_what_was_interrupted_is_neither_lost_nor_mixed(tmp_path, small_parts):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(TEXT)
    with pytest.raises(UserError, match="weights; 6 lines are done: go on with --resume"):
        translate_stream(stopping(2, UserError("weights")), source, target, n_best=2)
    with pytest.raises(KeyboardInterrupt, match="9 lines are done: go on with --resume"):
        translate_stream(stopping(1, KeyboardInterrupt()), source, target, n_best=2, resume=True)
    kept = (tmp_path / "out.partial").read_bytes(), (tmp_path / "out.partial.json").read_bytes()
    with pytest.raises(UserError, match=r"out\.partial: holds what an interrupted run has done; go on with"):
        translate_stream(UpperCase(), source, target, n_best=2)
    with pytest.raises(UserError, match=r"out\.partial: n_best=2 before, now 3; scores=False before, now True; give"):
        translate_stream(UpperCase(), source, target, n_best=3, scores=True, resume=True)
    facts = {"model": "0" * 64, "onnxruntime": "1.2"}
    with pytest.raises(UserError, match=r"model is another than before; onnxruntime=None before, now 1\.2; give"):
        translate_stream(UpperCase(), source, target, n_best=2, resume=True, model_facts=lambda: facts)
    source.write_text(TEXT + "one\n")
    with pytest.raises(UserError, match="input is another than before"):
        translate_stream(UpperCase(), source, target, n_best=2, resume=True)
    assert kept == ((tmp_path / "out.partial").read_bytes(), (tmp_path / "out.partial.json").read_bytes())
    (tmp_path / "out.partial.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match=r"out\.partial\.json: damaged; remove it"):
        translate_stream(UpperCase(), source, target, n_best=2, resume=True)


def test_resuming_where_nothing_was_begun_or_all_is_done(tmp_path, small_parts):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(TEXT)
    translate_stream(UpperCase(), source, target, resume=True)
    assert target.read_text(encoding="utf-8") == TEXT.upper()
    record = '{"format": 1, "progress": {}, "facts": {}}'
    (tmp_path / "out.partial.json").write_text(record)  # killed between the last two steps
    with pytest.raises(UserError, match="holds another file of translations"):
        translate_stream(UpperCase(), source, target, resume=True)
    translate_stream(UpperCase(), source, target, resume=True, force=True)
    assert (target.read_text(encoding="utf-8"), names(tmp_path)) == (TEXT.upper(), {"in", "out"})
    for wrong, said in (
        ({"stream": True, "output": target}, "stream=True writes bare text"),
        ({"output": None}, "resume=True continues a file"),
        ({"text": ["x"], "output": target}, "text is given twice"),
        ({"output": tmp_path / "fifo"}, "is not a regular file"),
    ):
        if wrong["output"] == tmp_path / "fifo":
            os.mkfifo(tmp_path / "fifo")
        with pytest.raises(UserError, match=said):
            translate_stream(UpperCase(), source, resume=True, force=True, **wrong)


def test_a_disk_that_refuses_is_told_of_and_left_as_it_was(tmp_path, monkeypatch, small_parts):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(TEXT)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(UserError, match=r"out: could not be written \(no room\)"):
            translate_stream(UpperCase(), source, target)
    assert names(tmp_path) == {"in"}
    monkeypatch.setattr(output, "open", lambda handle, *_, **__: _Full(os.fdopen(handle, "r+b")), raising=False)
    with pytest.raises(UserError, match=r"out: cannot be written \(no room\)"):
        translate_stream(UpperCase(), source, target)
    assert names(tmp_path) == {"in"}


class _Full(SimpleNamespace):
    """A file that can be made, and nothing more."""

    def __init__(self, file):
        super().__init__(close=file.close, closed=False)

    def truncate(self, _):
        raise OSError(errno.ENOSPC, "no room")


def test_a_file_named_like_the_partial_one_is_kept(tmp_path):
    """One that isn't text, one that is read, and a record of somebody else's."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(TEXT)
    (tmp_path / "out.partial").write_bytes(b"\0weights")
    with pytest.raises(UserError, match=r"out\.partial: holds no file of translations"):
        translate_stream(UpperCase(), source, target)
    os.replace(source, tmp_path / "out.partial")
    with pytest.raises(UserError, match=r"out\.partial: is read as well"):
        translate_stream(UpperCase(), tmp_path / "out.partial", target)
    os.replace(tmp_path / "out.partial", source)
    (tmp_path / "out.partial.json").write_text("[]")
    translate_stream(UpperCase(), source, target)
    assert (tmp_path / "out.partial.json").read_text() == "[]"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "in").write_text(TEXT)
    (tmp_path / "place").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "place" / "file")
    translate_stream(UpperCase(), tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "place" / "file").read_text(encoding="utf-8") == TEXT.upper()


def test_progress_in_a_log(tmp_path, capsys, monkeypatch, small_parts, at_pace):
    """Nothing is said of short work."""
    (tmp_path / "in").write_text(TEXT)
    model = UpperCase()
    whole = model.search

    def search(rows, done, **options):
        done(0.5)
        done(1.0)
        return whole(rows, **options)

    model.search = search
    monkeypatch.setattr(model, "generate", None)
    translate_stream(model, tmp_path / "in", tmp_path / "out")
    assert capsys.readouterr().err == ""
    at_pace(4)
    translate_stream(model, tmp_path / "in", tmp_path / "out", force=True)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "translate 100 %  10 of 10 lines"
    assert 2 <= len(said) < 8
    assert all(line.startswith("translate ") for line in said)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_only_what_has_an_end_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, said in [
        ("pipe", "is a pipe that nobody writes to"),
        ("zero", "is no regular file"),
        ("sparse", "line 1: more than 16 MB in one line; is it text"),
    ]:
        with pytest.raises(UserError, match=f"{name}[:,] {said}"):
            translate_stream(UpperCase(), tmp_path / name, tmp_path / "out")


def test_what_a_kill_left_is_known_by_its_record(tmp_path):
    """Its text may hold anything that a model writes, cut anywhere."""
    (tmp_path / "out.partial").write_bytes(b"a\x01b\xe2")
    with pytest.raises(UserError, match=r"out\.partial: holds no file of translations"):
        claim_lines("translate", tmp_path / "out", False)
    (tmp_path / "out.partial.json").write_text('{"format": 1, "progress": {}, "facts": {}}')
    assert claim_lines("translate", tmp_path / "out", False) is not None
