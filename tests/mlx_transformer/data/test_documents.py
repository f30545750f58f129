"""Plain text from files, folders and patterns."""

import gzip
import json

import pytest
import zstandard

from mlx_transformer.data.documents import Documents, read_documents
from mlx_transformer.system.errors import UserError


def test_lines_files_folders_and_patterns(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo\xe2\x80\xa8three\n")
    (tmp_path / "deep" / "b.txt").write_text("four\nfive\n", encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    one = str(tmp_path / "a.txt")
    text, dropped = read_documents(one)
    assert (text.texts, text.prompts, dropped) == (["one", "two\u2028three"], ["", ""], 2)
    whole = ["one\r\n\n  \ntwo\u2028three\n", "four\nfive\n"]
    assert read_documents(one, "file")[0].texts == whole[:1]
    assert read_documents(str(tmp_path))[0].texts == whole
    assert read_documents(str(tmp_path / "**" / "*.txt"))[0].texts == whole
    assert read_documents(str(tmp_path), "line")[0].texts == ["one", "two\u2028three", "four", "five"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files_are_read_as_plain_ones(ending, tmp_path):
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    for name, text in (("a.txt", "one\r\ntwo\n"), ("b.jsonl", '{"prompt": "2 +", "completion": " 3"}\n')):
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / f"{name}{ending}").write_bytes(pack(text.encode()))
        for cut in ("line", "file"):
            assert read_documents(str(tmp_path / f"{name}{ending}"), cut) == read_documents(str(tmp_path / name), cut)
    (tmp_path / f"c.txt{ending}").write_bytes(b"no packed text")
    with pytest.raises(UserError, match=rf"c\.txt\{ending}: damaged, or no"):
        read_documents(str(tmp_path / f"c.txt{ending}"))


def test_a_whole_file_names_the_line_that_is_no_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x\nab\xff\n")
    with pytest.raises(UserError, match=r"a\.txt, line 2, byte 3: not UTF-8"):
        read_documents(str(tmp_path / "a.txt"), "file")


def test_lines_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"prompt": "2 +", "completion": " 3"}\n', encoding="utf-8")
    text, _ = read_documents(str(path))
    assert (text.texts, text.prompts) == (["one", " 3"], ["", "2 +"])
    assert list(text.lines) == ["2 +", "one", " 3"]
    assert text.digests != Documents(text.texts, ["", ""]).digests
    assert text.select([1]).prompts == ["2 +"]


def test_lines_of_conversations(tmp_path):
    path, turns = tmp_path / "a.jsonl", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text('{"text": "one"}\n' + json.dumps({"messages": turns, "tools": []}), encoding="utf-8")
    text, _ = read_documents(str(path), chats=True)
    assert [entry and entry["messages"] for entry in text.chats] == [None, turns]
    assert text.select([1]).chats == [text.chats[1]]
    assert text.select([0]).digests != text.select([1]).digests
    with pytest.raises(
        UserError, match=r'line 2: needs \{"text": \.\.\.\} or \{"prompt": \.\.\., "completion": \.\.\.\}$'
    ):
        read_documents(str(path))
    for wrong in (turns[:1], {"role": "assistant"}, [*turns, "Hi"]):
        path.write_text(json.dumps({"messages": wrong}), encoding="utf-8")
        with pytest.raises(
            UserError, match="line 1: messages is no list of objects with a role, one of them the assis"
        ):
            read_documents(str(path), chats=True)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": 3}', r'a\.jsonl, line 1: needs \{"text": \.\.\.\} or \{"prompt"'),
        ("a.jsonl", b'{"text": "x"}\n[1]', r"a\.jsonl, line 2: needs"),
        ("a.jsonl", b"\nx", r"a\.jsonl, line 2: not JSON \(.*\); each line must be an object"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.txt", b"x\nab\xff", r"a\.txt, line 2, byte 3: not UTF-8 \(0xff\)"),
        ("a.txt", b" \n\n", r"a\.txt: holds no text"),
        ("b.txt", b"x", r"a\.txt: cannot be read \(no such file\)"),
    ],
)
def test_refused(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_documents(str(tmp_path / name.replace("b.", "a.")))


def test_a_pattern_of_nothing(tmp_path):
    with pytest.raises(UserError, match=r"\*\.py: no file is there; give a file, a folder or a pattern"):
        read_documents(str(tmp_path / "*.py"))
    with pytest.raises(UserError, match="no file is there"):
        read_documents(str(tmp_path))
