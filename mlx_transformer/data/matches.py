"""Matching texts for contrastive learning, e.g. questions and their answers: read them and cut them into batches.

Each row has a source, its target, and perhaps a hard negative: a text that looks like the target but doesn't match.

    .tsv      source, tab, target; or source, tab, target, tab, negative
    .jsonl    {"source": ..., "target": ..., "negative": ...}; "negative" in every line or in none

Files may be packed (.gz, .zst). Two files of lines, for source and target, are read as well.

Each batch has B pairs drawn at random, since the other targets of the batch are a source's negatives. Batches of
similar lengths, as in translation, would make them too easy to tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of

from .corpus import PairFiles, read_parallel
from .epochs import BatchesByEpoch, StepArrays
from .line_files import json_blocks, line_blocks, unpacked_suffix
from .ragged import Ragged, padded, ragged

NEGATIVE = "negative"


@dataclass(frozen=True)
class Matches:
    """Columns of texts: sources, targets, and perhaps negatives, all equally long. digests: SHA-256, for run.json."""

    columns: list[list[str]]

    @cached_property
    def digests(self) -> dict[str, str]:
        columns = ("".join(f"{text}\0" for text in column) + "\n" for column in self.columns)
        return {"matches": digest_of(column.encode(errors="surrogatepass") for column in columns)}

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def lines(self) -> Iterator[str]:
        """All text, for a vocabulary."""
        return (text for column in self.columns for text in column)

    def select(self, indices: Sequence[int]) -> Matches:
        return Matches([[column[i] for i in indices] for column in self.columns])


def read_matches(files: PairFiles) -> tuple[Matches, int]:
    """Read (the rows without an empty text, the number of other rows).

    Raises UserError with file and line, e.g. if lines differ in their number of columns, and if no row is usable.
    """
    if files.pairs is None:
        text = read_parallel(str(files.source), str(files.target))
        rows = list(zip(text.source, text.target, strict=True))
    else:
        rows = list(_rows(Path(files.pairs), files.columns))
    usable = [row for row in rows if all(text.strip() for text in row)]
    if not usable:
        raise UserError(f"{files.name}: no pairs with text on both sides in it")
    return Matches([list(column) for column in zip(*usable, strict=True)]), len(rows) - len(usable)


def _rows(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    readers = {".tsv": _tsv, ".jsonl": _jsonl, ".ndjson": _jsonl}
    if (kind := unpacked_suffix(path)) not in readers:
        raise UserError(f"{path}: texts that belong together are read from .tsv and .jsonl, also as .gz or .zst")
    width = 0
    for where, row in readers[kind](path, columns):
        width = width or len(row)
        if len(row) != width or not 2 <= width <= 3:
            expected = "2, or 3 with a negative" if width in (0, len(row)) else f"{width} as in the first line"
            raise UserError(f"{where}: {len(row)} columns; there must be {expected}")
        yield row


def _tsv(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, line in enumerate(chain.from_iterable(line_blocks(path)), 1):
        yield f"{path}, line {number}", tuple(line.split("\t"))


def _jsonl(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for where, _, row in chain.from_iterable(json_blocks(path)):
        yield where, _from_json(where, row, columns)


def _from_json(where: str, row: Any, columns: tuple[str, str]) -> tuple[str, ...]:
    if not isinstance(row, dict) or any(name not in row for name in columns):
        raise UserError(f'{where}: has no "{columns[0]}" and "{columns[1]}"; languages names other columns')
    values = [row[name] for name in (*columns, *([NEGATIVE] if NEGATIVE in row else []))]
    for name, value in zip((*columns, NEGATIVE), values, strict=False):
        if not isinstance(value, str):
            raise UserError(f"{where}: {name} is {value!r:.60}, no text")
    return tuple(values)


@dataclass(frozen=True)
class MatchBatch:
    """A step's texts: B sources, then B targets, then perhaps B negatives. tokens: B."""

    rows: list[NDArray]
    numbers: NDArray  # (2 or 3, B) int32: equal texts have equal numbers
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        ids = padded(self.rows, len(self.rows), max(map(len, self.rows)), pad_id)
        return self.numbers, None, ids, ids != pad_id


class MatchBatches(BatchesByEpoch[MatchBatch]):
    """Batches of `pairs` random pairs each (or of all pairs, if there are fewer).

    An epoch leaves out the remainder, chosen at random. columns: sources, targets, and perhaps negatives, as lists of
    token ids.
    """

    unit = "pairs"

    def __init__(self, columns: Sequence[Sequence[Sequence[int]]], pairs: int, seed: int = 1):
        super().__init__(seed)
        self.columns: list[Ragged] = [ragged(column) for column in columns]
        texts = [tuple(ids) for column in columns for ids in column]
        known: dict[tuple[int, ...], int] = {}
        numbers = np.array([known.setdefault(ids, len(known)) for ids in texts], np.int32)
        self._numbers = numbers.reshape(len(columns), -1)
        self.count = len(columns[0])
        self.pairs = min(pairs, self.count)
        self.dropped = 0
        self.batch_tokens = self.pairs

    def __len__(self) -> int:
        return self.count // self.pairs

    def plan(self, random: np.random.RandomState) -> list[NDArray]:
        order = random.permutation(self.count)[: len(self) * self.pairs]
        return list(order.reshape(len(self), self.pairs))

    def build(self, part: NDArray, epoch: int, index: int) -> MatchBatch:
        rows = [column[i] for column in self.columns for i in part]
        return MatchBatch(rows, self._numbers[:, part], len(part))
