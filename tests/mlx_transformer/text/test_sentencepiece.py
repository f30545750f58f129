"""The reader and the writer of SentencePiece's file; that the package reads what is written is tested beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest

from mlx_transformer.system.errors import UserError
from mlx_transformer.text.sentencepiece import (
    BYTES,
    CONTROL,
    UNKNOWN,
    Piece,
    SentencePiece,
    parse_sentencepiece,
    read_sentencepiece,
    sentencepiece_bytes,
)

MODEL = SentencePiece(
    pieces=(Piece("</s>", 0.0, CONTROL), Piece("<unk>", 0.0, UNKNOWN), Piece("▁a", -1.5), Piece("日", -2.25)),
    charsmap=b"\0\1\2",
    normalizer="nmt_nfkc",
    special=(1, -1, 0, -1),
)
CHANGES = {
    "as it is": {},
    "spaces": dict(dummy_prefix=False, remove_extra_whitespace=False),
    "BPE": dict(model_type=2),
    "bytes": dict(byte_fallback=True, pieces=(*MODEL.pieces, *(Piece(byte, 0.0, 6) for byte in BYTES))),
    "no table": dict(charsmap=b"", normalizer="identity"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_there_and_back(name: str) -> None:
    model = dataclasses.replace(MODEL, **CHANGES[name])
    assert parse_sentencepiece(sentencepiece_bytes(model)) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type=3), "its kind is word, not unigram or BPE"),
        (dict(model_type=9), "its kind is 9"),
        (dict(pieces=(*MODEL.pieces, Piece("▁a", -3.0))), "duplicate pieces \\(1\\)"),
        (dict(pieces=(*MODEL.pieces, Piece("", -3.0))), "it has an empty piece"),
        (dict(pieces=MODEL.pieces[2:]), "it has no unknown piece, or several"),
        (dict(byte_fallback=True), "lacks some of the 256"),
    ],
)
def test_what_is_no_vocabulary_is_refused(changes: dict, message: str) -> None:
    data = sentencepiece_bytes(dataclasses.replace(MODEL, special=(-1, -1, -1, -1), **changes))
    with pytest.raises(UserError, match=f"here: unsupported SentencePiece model: .*{message}"):
        parse_sentencepiece(data, "here")


@pytest.mark.parametrize(("more", "message"), [(b"\x12\x03\xc0\x01\x01", "suffix"), (b"\x1a\x02\x28\x00", "escape")])
def test_spaces_of_another_kind_are_refused(more: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_sentencepiece(sentencepiece_bytes(MODEL) + more)


def test_every_cut_and_many_changes_are_one_line(tmp_path: Path) -> None:
    """Or another model: a protobuf message has no digest."""
    data, random, messages = sentencepiece_bytes(MODEL), Random(0), []
    damaged = [data[:end] for end in range(len(data))]
    for _ in range(500):
        changed = bytearray(data)
        changed[random.randrange(len(data))] = random.randrange(256)
        damaged.append(bytes(changed))
    for each in damaged:
        (tmp_path / "a.spm").write_bytes(each)
        try:
            read_sentencepiece(tmp_path / "a.spm")
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > len(data) // 2
    assert [m for m in messages if not m.startswith(f"{tmp_path / 'a.spm'}: ") or "\n" in m] == []
