"""Parallel text: two lists of equal length, from memory or from two files with one sentence a line.

Lines are those of `line_files`, and so are packed files (.gz, .zst).

The files of one corpus of pairs: two files of lines, or one file of pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_transformer.core.outputs import Kind, claim, holds_lines
from mlx_transformer.system.durable import Target, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of

from .line_files import PACKED, Columns, Part, files_of, line_blocks, pair_parts, within_memory

TEXT = Kind("text file", holds_lines)
MOST_SET_ASIDE = 1000  # pairs for validation; one in a hundred of a smaller text


@dataclass(frozen=True)
class ParallelText:
    """`source[i]` is translated by `target[i]`; `kinds[i]`, where there is one, says what sort of phrase it is.

    `digests` are SHA-256 of both sides for the record of a run: of the bytes of the files, or of the lines as `write`
    would write them. `UserError` when the sides differ in length.
    """

    source: list[str]
    target: list[str]
    kinds: list[str] | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        _check_counts(self.source, self.target, "source", "target")
        if self.kinds is not None and len(self.kinds) != len(self.source):
            raise UserError(f"{len(self.kinds)} kinds for {len(self.source)} pairs; give one for each pair")
        if not self.digests:
            self.digests.update(source=_digest(self.source), target=_digest(self.target))

    def __len__(self) -> int:
        return len(self.source)

    def parts(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield all sources and targets, as text on disk gives them some at a time (`StoredText.parts`)."""
        yield self.source, self.target

    def select(self, indices: list[int]) -> ParallelText:
        """Return the pairs at `indices`, in that order."""
        kinds = None if self.kinds is None else [self.kinds[i] for i in indices]
        return ParallelText([self.source[i] for i in indices], [self.target[i] for i in indices], kinds)

    def without_empty(self) -> tuple[ParallelText, int]:
        """Return, for training, the pairs whose sides both hold more than white space, and the number of the others.

        Evaluation keeps every pair, so that output and reference stay aligned.
        """
        usable = [i for i, (s, t) in enumerate(zip(self.source, self.target, strict=True)) if s.strip() and t.strip()]
        dropped = len(self) - len(usable)
        return (self.select(usable), dropped) if dropped else (self, 0)

    def write(self, source: Target, target: Target, force: bool = False) -> None:
        """Write both sides as UTF-8 files with `\\n` line ends; `force` replaces earlier text. UserError for a line
        that holds a `\\n` itself."""
        outputs = [claim(path, TEXT, force) for path in (source, target)]
        for output, lines in zip(outputs, (self.source, self.target), strict=True):
            write_lines(output, lines)


@dataclass(frozen=True)
class BuiltInCorpus:
    """`train`, `valid` and `held_out` share no sentence; each pair has its kind."""

    train: ParallelText
    valid: ParallelText
    held_out: ParallelText

    @classmethod
    def of(cls, *parts: Sequence[Sequence[str]]) -> BuiltInCorpus:
        """Make a corpus of the rows (kind, source, target) of each part."""
        columns = (tuple(map(list, zip(*rows, strict=True))) for rows in parts)
        return cls(*(ParallelText(source, target, kinds) for kinds, source, target in columns))


def training_mask(count: int, seed: int, name: str, noun: str = "pairs") -> np.ndarray:
    """Return (count,) bool, True on those that stay for training. `UserError`, with the text's name, for one alone."""
    if count < 2:
        raise UserError(f"{name}: {count} usable {noun}; training needs more, or give validation files")
    order = np.random.default_rng(seed).permutation(count)
    mask = np.ones(count, dtype=bool)
    mask[order[: max(1, min(MOST_SET_ASIDE, count // 100))]] = False
    return mask


def read_parallel(source: str | Path, target: str | Path) -> ParallelText:
    """Read two files of parallel text.

    UserError, naming file and line, for a file that is missing, empty or not UTF-8; for unequal line counts it
    gives both counts and the first line that seems out of step.
    """
    (source_lines, source_digest), (target_lines, target_digest) = read_text_lines(source), read_text_lines(target)
    _check_counts(source_lines, target_lines, str(source), str(target))
    if not source_lines:
        raise UserError(f"{source} and {target} hold no lines; give files with one sentence a line")
    return ParallelText(source_lines, target_lines, digests={"source": source_digest, "target": target_digest})


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of a UTF-8 file. `UserError` as for `read_parallel`."""
    return read_text_lines(path)[0]


def write_lines(path: Target, lines: list[str], force: bool = False) -> None:
    """Write a UTF-8 file with `\\n` line ends; `force` replaces earlier text. `UserError` for a line that would not
    come back as it is."""
    output = claim(path, TEXT, force)
    for number, line in enumerate(lines, start=1):
        if "\n" in line or line.endswith("\r"):
            raise UserError(f"{path}: line {number} holds a line end inside; one sentence a line is the format")
    write_text(output, "".join(f"{line}\n" for line in lines))


def read_text_lines(path: str | Path) -> tuple[list[str], str]:
    """Read the lines and the SHA-256 of their bytes, unpacked. `UserError` as for `read_parallel`."""
    digest, bounded = hashlib.sha256(), within_memory(str(path))

    def watch(block: bytes) -> None:
        digest.update(block)
        bounded(block)

    lines = [line for block in line_blocks(path, watch=watch, pipes=True) for line in block]
    return lines, digest.hexdigest()


def _digest(lines: list[str]) -> str:
    return digest_of(line.encode(errors="surrogatepass") + b"\n" for line in lines)


def _check_counts(source: list[str], target: list[str], source_name: str, target_name: str) -> None:
    if len(source) != len(target):
        lengths = (np.array([len(line) for line in lines], dtype=float) for lines in (source, target))
        raise unequal(source_name, target_name, *lengths)


def unequal(source_name: str, target_name: str, source: np.ndarray, target: np.ndarray) -> UserError:
    """Return the error of two texts of unequal length, whose lines have these lengths in characters."""
    line, more = suspect_line(source, target), source_name if len(source) > len(target) else target_name
    return UserError(
        f"{source_name} has {len(source)} lines, {target_name} has {len(target)}; every line needs its translation. "
        f"First suspect: line {line} (from there on {more} seems to have the extra lines)"
    )


def suspect_line(source: np.ndarray, target: np.ndarray) -> int:
    """Find the line, counted from 1, where two texts of unequal length, whose lines have these lengths in characters,
    most likely fall out of step.

    Lengths of translations are proportional (Gale and Church 1993), so with d lines too many in the longer side
    the best place k minimises sum_{i<k} cost(i, i) + sum_{i>=k} cost(i, i+d), where cost is the deviation
    of the log length ratio from its median.
    """
    short, long = sorted((source, target), key=len)
    extra, count = len(long) - len(short), len(short)
    if count == 0:
        return 1
    straight = np.log1p(long[:count]) - np.log1p(short)
    shifted = np.log1p(long[extra:]) - np.log1p(short)
    typical = np.log1p(np.median(long)) - np.log1p(np.median(short))
    before = np.concatenate(([0.0], np.cumsum(np.abs(straight - typical))))  # (count + 1,): lines 0..k-1 in step
    after = np.concatenate((np.cumsum(np.abs(shifted - typical)[::-1])[::-1], [0.0]))  # lines k.. shifted by extra
    return int(np.argmin(before + after)) + 1


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
