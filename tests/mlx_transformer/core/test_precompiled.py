"""The table of a Precompiled normalizer: a damaged one is one line, and nothing before it."""

from __future__ import annotations

import base64
import json

import pytest

from mlx_transformer.families.encoder_text import adopted
from mlx_transformer.families.json_pieces import pieces_json
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

TRIE = b"\0" * 1024
TABLES = {
    "none": b"",
    "short": b"\1\2",
    "larger than the file": b"\xff\xff\xff\x7f" + TRIE,
    "no units": b"\3\4\0\0" + TRIE,
    "no UTF-8": b"\0\4\0\0" + TRIE + b"\xff\0",
}


@pytest.fixture(scope="module")
def specification() -> dict:
    return json.loads(Tokenizer.train(["one two three"], vocab_size=262).to_json())


def precompiled(data: bytes) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_table_is_one_line(specification, name, within, capfd):
    table = precompiled(TABLES[name])
    normalizer = {"type": "Sequence", "normalizers": [table]} if within else table
    with pytest.raises(UserError, match="here: the table of its Precompiled normalizer is damaged; restore it"):
        Tokenizer(json.dumps({**specification, "normalizer": normalizer}), "here")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("read", [lambda path: adopted(path, {}), lambda path: pieces_json(path, "<pad>", 0, [], [])])
def test_a_folder_with_a_damaged_table_is_one_line_too(specification, read, tmp_path, capfd):
    values = {**specification, "normalizer": precompiled(TABLES["short"])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json: the table of its Precompiled normalizer is damaged"):
        read(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_whole_one_is_read(specification):
    normalizer = precompiled(b"\0\4\0\0" + TRIE + b"a\0")
    assert Tokenizer(json.dumps({**specification, "normalizer": normalizer})).encode("one")
