"""Texts that belong together, for contrastive learning: a source, its target, and in a third column a hard negative, a
text that looks like the target and is none.

    .tsv      source, tab, target; or source, tab, target, tab, negative
    .jsonl    {"source": ..., "target": ..., "negative": ...}, the last in every line or in none

Both may be packed (.gz, .zst); two files of lines, source and target, are read as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of

from .corpus import read_parallel
from .line_files import json_blocks, line_blocks, unpacked_suffix
from .pair_files import PairFiles

NEGATIVE = "negative"


@dataclass(frozen=True)
class Matches:
    """`columns`: sources, targets, and perhaps negatives, of one length each. `digests` are SHA-256, for the record of
    a run."""

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
    """Read (the rows whose texts all hold more than white space, the number of the others).

    `UserError`, naming file and line, for what can't be read, other numbers of columns, and files without a usable row.
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
