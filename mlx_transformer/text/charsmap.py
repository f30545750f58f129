"""SentencePiece's table of replacements, applied as SentencePiece does it: at each place its longest string.

The Precompiled normaliser of `tokenizers` reads the same table and takes the shortest, of at most five bytes: "e" with
two marks loses the second one, and Hangul and kana that are written in parts stay in parts.

The table: four bytes, the size of a trie; the trie, an array of 32-bit units (Yata et al. 2007, darts-clone); then the
replacements, UTF-8, each ended by NUL. A unit has its letter in bits 0 to 7, bit 8 if a value hangs below it, and from
bit 10 on the distance to its children (bit 9: times 256), which stand at that place XOR their letters. A value is the
place of a replacement; bit 31 tells values from letters.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

LONGEST_KEY, MOST_NODES = 64, 1 << 20
"""Bytes and nodes, several times those of any published table: equal endings are stored once, so that a damaged trie
may be endless."""


class Charsmap:
    """A table that has been read. `table` is whole, as `is_whole` says."""

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
        """Return the text with everything replaced that the table has."""
        if not self._maybe.search(text, 1):
            return text.translate(self._single)
        return "".join(replacement for _, _, replacement in self._parts(text))

    def places(self, text: str) -> list[tuple[int, int]]:
        """For each character of the normalised text, which characters of the text it stands for: first and last + 1."""
        return [(start, end) for start, end, replacement in self._parts(text) for _ in replacement]

    def _parts(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, what takes its place) from the text's first character to its last."""
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
    """Read a table, once: most published tokenizers have the same one, of 200,000 replacements."""
    return Charsmap(table)


def is_whole(table: Any) -> bool:
    """Return whether what a tokenizer.json has, in base64, holds all of a table."""
    try:
        data = base64.b64decode(table, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except (TypeError, ValueError, binascii.Error):
        return False
    return size > 0 and size % 4 == 0 and len(data) >= 4 + size


def replacements(table: bytes) -> dict[str, str]:
    """Return {string: what takes its place} of a whole table; of one that is damaged inside, those that can be
    reached."""
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
        # A child without a letter is NUL's only where it isn't the value.
        waiting += [(child, key + bytes([child ^ base])) for child in children.get(base, ()) if child != base]
    return texts
