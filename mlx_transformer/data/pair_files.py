"""The files of one corpus of pairs: two files of lines, or one file of pairs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_transformer.system.errors import UserError

from .corpus import unequal
from .line_files import PACKED, line_blocks
from .table_files import Columns, Part, files_of, pair_parts

UNPACKED = 4  # times as large as a packed file, or Parquet, at least


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """`source` and `target`, or `pairs`. `languages`: names of the columns of `pairs`, such as "en-de"; unset: source
    and target. `tag`: put before every source."""

    source: str | None = None
    target: str | None = None
    pairs: str | None = None
    languages: str | None = None
    tag: str = ""

    @property
    def name(self) -> str:
        return self.pairs or f"{self.source} and {self.target}"

    @property
    def files(self) -> list[Path]:
        return [Path(str(self.source)), Path(str(self.target))] if self.pairs is None else files_of(Path(self.pairs))

    @property
    def is_plain(self) -> bool:
        """Whether these are two files of lines, or pipes, that are read at once."""
        return self.pairs is None and not self.tag and all(path.suffix not in PACKED for path in self.files)

    @property
    def columns(self) -> Columns:
        return ("source", "target") if self.languages is None else language_pair(self.languages)

    def size(self) -> int:
        """Estimate the bytes of the text; 0 for what is no file, such as a pipe."""
        packed = (*PACKED, ".parquet")
        sizes = {file: file.stat().st_size for file in self.files if file.is_file()}
        return sum(size * (UNPACKED if file.suffix in packed else 1) for file, size in sizes.items())

    def parts(self) -> Generator[Part, None, None]:
        """Read all sources and targets, some at a time, without the tag.

        `UserError`, naming file and line, for what isn't as it must be; when all have been read also for no pairs, or
        other numbers of sources and targets.
        """
        empty = True
        for part in self._side_by_side() if self.pairs is None else pair_parts(Path(self.pairs), self.columns):
            empty = empty and not part[0]
            yield part
        if empty:
            raise UserError(f"{self.name}: no pairs in it; give files with one sentence or pair a line")

    def check_beginning(self) -> None:
        """Raise `UserError` if the first pairs can't be read, before a large file is read for its digest."""
        parts = self.parts()
        next(parts, None)
        parts.close()

    def usable_parts(self) -> Iterator[tuple[list[str], list[str], int]]:
        """Read, for training, tagged sources and targets that hold more than white space, and the number of others."""
        for source, target in self.parts():
            pairs = [(s, t) for s, t in zip(source, target, strict=True) if s.strip() and t.strip()]
            yield [self.tag + s for s, _ in pairs], [t for _, t in pairs], len(source) - len(pairs)

    def _side_by_side(self) -> Iterator[Part]:
        sides = [line_blocks(str(path)) for path in (self.source, self.target)]
        waiting: list[list[str]] = [[], []]
        ended = [False, False]
        while not all(ended) or all(waiting):
            for i, side in enumerate(sides):
                while not waiting[i] and not ended[i]:
                    lines = next(side, None)
                    ended[i] = lines is None
                    waiting[i] = lines or []
            count = min(map(len, waiting))
            if not count and any(waiting):
                self._refuse_counts()
            yield waiting[0][:count], waiting[1][:count]
            waiting = [lines[count:] for lines in waiting]

    def _refuse_counts(self) -> None:
        """Raise `UserError` with both numbers of lines. Files are read again: lengths needn't be kept before."""
        names = (str(self.source), str(self.target))
        lengths = [
            np.fromiter((len(line) for lines in line_blocks(name) for line in lines), dtype=np.int32) for name in names
        ]
        raise unequal(*names, *lengths)


def language_pair(text: str) -> Columns:
    """Split "en-de" into two names; also "zh-CN,en". `UserError` for anything else."""
    parts = [part.strip() for part in text.split("," if "," in text else "-")]
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise UserError(f'languages = {text!r}: give two names, such as "en-de" or "zh-CN,en"')
    return parts[0], parts[1]
