"""Marian's lexical shortlists (`lex.*.bin`): for each source piece, the target pieces that may translate it.

A search limited to a sentence's candidates computes fewer logits (`decoding/candidates.py`). The file, little-endian:

    6 x u64 {magic, checksum, first, best, V + 1 offsets, entries} · u64 offsets · u32 ids, ascending in each list
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_bytes

MAGIC = 0xF11A48D5013417F5
HEADER = struct.Struct("<6Q")
MAX_SHORTLIST_BYTES = 1 << 30
MULTIPLE = 8
"""The number of a sentence's candidates is a multiple of this."""


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Target pieces by source piece: `ids[offsets[s]:offsets[s + 1]]` belong to source piece s."""

    first: int
    """Target ids below this are candidates for every sentence."""
    best: int
    """Length limit of the lists when the file was built."""
    offsets: NDArray[np.uint64]
    ids: NDArray[np.uint32]

    def candidates(self, source: Sequence[int], vocab_size: int, shared: bool) -> NDArray[np.int64]:
        """The target ids that a sentence's translation may contain, ascending, (C,) with C a multiple of `MULTIPLE`.

        These are the ids below `first`, the lists of the source pieces, and the source ids themselves if both languages
        share a vocabulary (`shared`). The lowest unused ids fill up to the multiple.
        """
        chosen = np.zeros(vocab_size, bool)
        chosen[: self.first] = True
        if shared:
            chosen[list(source)] = True
        begins = self.offsets
        for id in {*source}:
            if id < len(begins) - 1:  # padding has no list
                chosen[self.ids[int(begins[id]) : int(begins[id + 1])]] = True
        ids = np.flatnonzero(chosen)
        if (missing := -len(ids) % MULTIPLE) == 0:
            return ids
        near = chosen[self.first : len(ids) + missing]  # has `missing` unused ids, if there are so many
        chosen[self.first + np.flatnonzero(~near)[:missing]] = True
        return np.flatnonzero(chosen)


def shares_ids(config: TransformerConfig, separate: bool) -> bool:
    """Whether source ids are valid target ids, so that tokens can be copied to the translation.

    separate: the tokenizer has a vocabulary for each side (`Tokenizer.separate`).
    """
    return (config.one_embedding or not separate) and config.source_vocab_size == config.vocab_size


def open_shortlist(path: str | Path, config: TransformerConfig) -> Shortlist:
    """Read a shortlist for a model. Raises `UserError` as `read_shortlist` does, and if its vocabularies differ."""
    if config.architecture != "encoder-decoder":
        raise UserError(f"{path}: a shortlist is for an encoder-decoder, not architecture={config.architecture!r}")
    shortlist, sizes = read_shortlist(path), (config.source_vocab_size, config.vocab_size)
    # Embeddings of imported models have more rows than pieces: one for padding, and more in the smaller vocabulary.
    lists, largest = len(shortlist.offsets) - 1, int(shortlist.ids.max(initial=0))
    few = config.one_embedding and lists < sizes[0] - 1
    if few or lists > sizes[0] or max(largest, shortlist.first - 1) >= sizes[1]:
        raise UserError(
            f"{path}: is of other vocabularies: {lists} source pieces, and target pieces up to {largest}; the model has"
            f" {sizes[0]} and {sizes[1]}"
        )
    return shortlist


def read_shortlist(path: str | Path) -> Shortlist:
    """Read a shortlist file. Raises `UserError` with all problems if it is damaged, e.g. "its checksum differs"."""
    data = read_bytes(path, MAX_SHORTLIST_BYTES)
    if len(data) < HEADER.size or HEADER.unpack_from(data)[0] != MAGIC:
        raise UserError(f"{path}: no shortlist of Marian's binary kind")
    _, checksum, first, best, words, entries = HEADER.unpack_from(data)
    size = HEADER.size + 8 * words + 4 * entries
    if size != len(data) or not words:
        raise UserError(f"{path}: damaged: {words} offsets and {entries} entries need {size} bytes, it has {len(data)}")
    offsets = np.frombuffer(data, "<u8", words, HEADER.size)
    ids = np.frombuffer(data, "<u4", entries, HEADER.size + 8 * words)
    problems = [] if checksum == checksum_of(data[16:]) else ["its checksum differs"]
    if offsets[0] != 0 or offsets[-1] != entries or (offsets[1:] < offsets[:-1]).any():
        problems.append("its offsets don't ascend from 0 to the number of entries")
    begins = np.zeros(entries + 1, bool)
    if not problems:
        begins[offsets.astype(np.int64)] = True
        if ((ids[1:] <= ids[:-1]) & ~begins[1:-1]).any():
            problems.append("the pieces of a list don't ascend")
    if first > words - 1:
        problems.append(f"its first {first} pieces are more than all {words - 1}")
    if problems:
        raise UserError(f"{path}: damaged: {first_of(problems)}; restore it from a copy")
    return Shortlist(first, best, offsets, ids)


def shortlist_bytes(shortlist: Shortlist) -> bytes:
    """The bytes of a shortlist file."""
    offsets, ids = (np.ascontiguousarray(shortlist.offsets, "<u8"), np.ascontiguousarray(shortlist.ids, "<u4"))
    sizes = (shortlist.first, shortlist.best, len(offsets), len(ids))
    body = struct.pack("<4Q", *sizes) + offsets.tobytes() + ids.tobytes()
    return struct.pack("<2Q", MAGIC, checksum_of(body)) + body


def checksum_of(body: bytes) -> int:
    """Marian's checksum of the bytes after the checksum field, in words of 8 bytes; a shorter rest is ignored."""
    seed, mask = 0, (1 << 64) - 1
    for word in np.frombuffer(body, "<u8", len(body) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & mask
        seed &= mask
    return seed
