"""SentencePiece's files, read and written without its package: pieces, and the table of replacements.

The table (`precompiled_charsmap`) replaces strings before a text is split. As in SentencePiece, the longest match at
each place counts. The Precompiled normalizer of `tokenizers` differs: it takes the shortest match, of at most five
bytes, so that "e" with two combining marks loses the second, and decomposed Hangul and kana are not composed.

    bytes          part of the table
    4              size of the trie in bytes
    size           the trie: 32-bit units (Yata et al. 2007, darts-clone)
    the rest       the replacements, UTF-8, each ended by NUL

    bits of a unit
    0 to 7         the label: a byte of the key
    8              it has a value
    9              the offset counts 256-fold
    10 to 30       offset: a child's place is this unit's place XOR the offset XOR the child's label
    31             it is a value: bits 0 to 30 are the place of a replacement

A model's file (`.spm`, `spiece.model`, `sentencepiece.bpe.model`) is a protobuf message, ModelProto of
sentencepiece_model.proto. Only fields that affect the pieces of a text are read:

    1 pieces       1 piece, 2 score, 3 type
    2 trainer      3 model type, 24 whitespace as suffix, 35 byte fallback, 40 to 43 ids of unk, bos, eos and pad
    3 normalizer   1 name, 2 precompiled charsmap, 3 dummy prefix, 4 remove extra whitespace, 5 escape whitespace
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.protobuf import FLOAT, Value, field, fields, tag

LONGEST_KEY, MOST_NODES = 64, 1 << 20
"""Limits on a key's bytes and on visited nodes, several times those of published tables: a damaged trie may have a
loop, as equal endings are stored once."""


class Charsmap:
    """A table of replacements. `table` must be whole (`is_whole`)."""

    def __init__(self, table: bytes) -> None:
        pairs = replacements(table)
        self._single = str.maketrans({key: value for key, value in pairs.items() if len(key) == 1})
        self._several = {key: value for key, value in pairs.items() if len(key) > 1}
        self._longest: dict[str, int] = {}
        for key in self._several:
            self._longest[key[0]] = max(len(key), self._longest.get(key[0], 0))
        seconds = sorted(map(re.escape, {key[1] for key in self._several}))
        self._maybe = re.compile(f"[{''.join(seconds)}]" if seconds else r"(?!)")

    def normalized(self, text: str) -> str:
        """Replace all matches in a text."""
        if not self._maybe.search(text, 1):
            return text.translate(self._single)
        return "".join(replacement for _, _, replacement in self._parts(text))

    def places(self, text: str) -> list[tuple[int, int]]:
        """(start, end) in the text of each character of the normalised text."""
        return [(start, end) for start, end, replacement in self._parts(text) for _ in replacement]

    def _parts(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, replacement) of parts that cover the text."""
        at = 0
        while at < len(text):
            length = min(self._longest.get(text[at], 1), len(text) - at)
            while length > 1 and text[at : at + length] not in self._several:
                length -= 1
            part = text[at : at + length]
            yield at, at + length, self._several[part] if length > 1 else part.translate(self._single)
            at += length


@lru_cache(maxsize=8)
def read_charsmap(table: bytes) -> Charsmap:
    """Read a table, with a cache: most published tokenizers share a table of 200,000 replacements."""
    return Charsmap(table)


def is_whole(table: Any) -> bool:
    """Whether a value of a tokenizer.json is a complete table in base64."""
    try:
        data = base64.b64decode(table, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except (TypeError, ValueError, binascii.Error):
        return False
    return size > 0 and size % 4 == 0 and len(data) >= 4 + size


def replacements(table: bytes) -> dict[str, str]:
    """{string: replacement} of a complete table; if its trie is damaged, those that can be reached."""
    size = int.from_bytes(table[:4], "little")
    units = np.frombuffer(table, "<u4", size // 4, 4)
    ends = table[4 + size :]
    label, offset = units & 0x800000FF, (units >> 10) << ((units & 0x200) >> 6)
    children: dict[int, list[int]] = {}
    for place in np.flatnonzero(label < 256):
        children.setdefault(int(place) ^ int(label[place]), []).append(int(place))
    texts: dict[str, str] = {}
    waiting, visits = [(0, b"")], 0
    while waiting and visits < MOST_NODES:
        place, key = waiting.pop()
        base, visits = place ^ int(offset[place]), visits + 1
        if base >= len(units) or len(key) > LONGEST_KEY:
            continue
        if units[place] & 0x100:
            start = int(units[base] & 0x7FFFFFFF)
            end = ends.find(b"\0", start)
            texts[key.decode("utf-8", "replace")] = ends[start : end if end >= 0 else None].decode("utf-8", "replace")
        # The child at `base` has label 0: it is the value, not the letter NUL.
        waiting += [(child, key + bytes([child ^ base])) for child in children.get(base, ()) if child != base]
    return texts


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""
MOST_PIECES = 1 << 21
UNIGRAM, BPE = 1, 2
MODEL_TYPES = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "char"}


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    """float32. Unigram: log-probability; BPE: minus the rank of its merge."""
    type: int = NORMAL


@dataclass(frozen=True, kw_only=True)
class SentencePiece:
    """A SentencePiece model; a piece's id is its index."""

    pieces: tuple[Piece, ...]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    """Split characters without a piece into pieces of bytes."""
    charsmap: bytes = b""
    """The table of replacements."""
    normalizer: str = ""
    """The normalizer's name, e.g. nmt_nfkc."""
    dummy_prefix: bool = True
    """Put a space before a text."""
    remove_extra_whitespace: bool = True
    """Remove spaces at both ends and repeated spaces."""
    special: tuple[int, int, int, int] = (0, 1, 2, -1)
    """Ids of unk, bos, eos and pad; -1: none."""

    def ids_of(self, type: int) -> list[int]:
        return [id for id, piece in enumerate(self.pieces) if piece.type == type]


def read_sentencepiece(path: str | Path) -> SentencePiece:
    """Read a model's file. Raises `UserError` if it is damaged or of an unsupported kind."""
    return parse_sentencepiece(read_bytes(path), str(path))


def parse_sentencepiece(data: bytes, origin: str = "SentencePiece model") -> SentencePiece:
    """Parse the bytes of a model's file, as `read_sentencepiece` does. origin: the file's name in errors."""
    try:
        pieces, trainer, normalizer = [], {}, {}
        for number, value in fields(data):
            if number == 1:
                pieces.append(_piece(dict(fields(_bytes(value)))))
                if len(pieces) > MOST_PIECES:
                    raise ValueError(f"more than {MOST_PIECES:,} pieces")
            elif number == 2:
                trainer |= dict(fields(_bytes(value)))
            elif number == 3:
                normalizer |= dict(fields(_bytes(value)))
        model = SentencePiece(
            pieces=tuple(pieces),
            model_type=_int(trainer.get(3, UNIGRAM)),
            byte_fallback=bool(_int(trainer.get(35, 0))),
            charsmap=_bytes(normalizer.get(2, b"")),
            normalizer=_bytes(normalizer.get(1, b"")).decode(),
            dummy_prefix=bool(_int(normalizer.get(3, 1))),
            remove_extra_whitespace=bool(_int(normalizer.get(4, 1))),
            special=_special(trainer, pieces),
        )
        suffix, escaped = _int(trainer.get(24, 0)), _int(normalizer.get(5, 1))
    except (ValueError, struct.error, IndexError, TypeError) as error:
        raise UserError(f"{origin}: damaged, or no SentencePiece model ({error}); restore it from a copy") from None
    problems = _unreadable(model)
    problems += ["it puts the space behind each word (treat_whitespace_as_suffix)"] if suffix else []
    problems += ["it leaves spaces as they are (escape_whitespaces is off)"] if not escaped else []
    if problems:
        raise UserError(f"{origin}: unsupported SentencePiece model: {'; '.join(problems)}")
    return model


def sentencepiece_bytes(model: SentencePiece, escaped: bool = True) -> bytes:
    """Encode a model as a file that SentencePiece and `parse_sentencepiece` read. escaped: spaces become "▁" in
    texts."""
    pieces = [
        field(1, piece.text.encode()) + tag(2, FLOAT) + struct.pack("<f", piece.score) + field(3, piece.type)
        for piece in model.pieces
    ]
    trainer = field(3, model.model_type) + field(4, len(model.pieces)) + field(35, int(model.byte_fallback))
    trainer += b"".join(field(40 + i, id) for i, id in enumerate(model.special))
    names = {45 + i: model.pieces[id].text for i, id in enumerate(model.special) if id >= 0}
    trainer += b"".join(field(number, text.encode()) for number, text in names.items())
    normalizer = field(1, model.normalizer.encode()) + field(2, model.charsmap)
    normalizer += (
        field(3, int(model.dummy_prefix)) + field(4, int(model.remove_extra_whitespace)) + field(5, int(escaped))
    )
    return b"".join(field(1, piece) for piece in pieces) + field(2, trainer) + field(3, normalizer)


def _unreadable(model: SentencePiece) -> list[str]:
    """Reasons why this project can't have the vocabulary."""
    if model.model_type not in (UNIGRAM, BPE):
        return [f"its kind is {MODEL_TYPES.get(model.model_type, model.model_type)}, not unigram or BPE"]
    texts = [piece.text for piece in model.pieces]
    twice = len(texts) - len(set(texts))
    problems = [f"it has duplicate pieces ({twice})"] if twice else []
    problems += ["it has an empty piece"] if "" in texts else []
    problems += ["it has no unknown piece, or several"] if len(model.ids_of(UNKNOWN)) != 1 else []
    if model.byte_fallback and [model.pieces[id].text for id in model.ids_of(BYTE)] != BYTES:
        problems.append("its byte fallback lacks some of the 256 bytes")
    return problems


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _piece(fields: dict[int, Value]) -> Piece:
    text, type = _bytes(fields.get(1, b"")).decode(), _int(fields.get(3, NORMAL))
    if type not in range(NORMAL, BYTE + 1):
        raise ValueError(f"a piece of type {type}")
    (score,) = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    if not -1e30 < score < 1e30:
        raise ValueError(f"{text!r:.40} has score {score}")
    return Piece(text, score, type)


def _special(trainer: dict[int, Value], pieces: list[Piece]) -> tuple[int, int, int, int]:
    ids = [_int(trainer.get(40 + i, default)) for i, default in enumerate((0, 1, 2, -1))]
    ids = [id - (1 << 64) if id >= 1 << 63 else id for id in ids]
    # The trainer's settings may name an id that holds an ordinary piece: the role has no id then.
    unk, *others = [id if 0 <= id < len(pieces) and pieces[id].type in (UNKNOWN, CONTROL) else -1 for id in ids]
    return unk, others[0], others[1], others[2]


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise TypeError("a number was expected")
    return value


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("bytes were expected")
    return value
