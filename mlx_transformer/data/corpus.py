"""Parallel text: read and write it, and set a part aside for validation.

A corpus of pairs is either two files with one sentence per line (train.en and train.de), or one file of pairs
(train.tsv). `line_files` reads both, also packed (.gz, .zst), and says where lines end.
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
MOST_SET_ASIDE = 1000  # pairs for validation; in a smaller text one in a hundred


@dataclass(frozen=True)
class ParallelText:
    """Pairs of sentences: `target[i]` translates `source[i]`. kinds: the kind of each phrase in a built-in corpus.

    digests: SHA-256 of both sides, for run.json, either of the files' bytes or of the lines as `write` would write
    them. Raises UserError if the sides differ in length.
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
        """Yield (sources, targets), here all at once; `StoredText.parts` yields blocks."""
        yield self.source, self.target

    def select(self, indices: list[int]) -> ParallelText:
        """The pairs at `indices`, in this order."""
        kinds = None if self.kinds is None else [self.kinds[i] for i in indices]
        return ParallelText([self.source[i] for i in indices], [self.target[i] for i in indices], kinds)

    def without_empty(self) -> tuple[ParallelText, int]:
        """Return (the pairs with text on both sides, the number of other pairs), for training.

        Evaluation keeps all pairs, so that outputs and references stay aligned.
        """
        usable = [i for i, (s, t) in enumerate(zip(self.source, self.target, strict=True)) if s.strip() and t.strip()]
        dropped = len(self) - len(usable)
        return (self.select(usable), dropped) if dropped else (self, 0)

    def write(self, source: Target, target: Target, force: bool = False) -> None:
        """Write both sides with `write_lines`; `force` replaces existing text files. Raises UserError."""
        outputs = [claim(path, TEXT, force) for path in (source, target)]
        for output, lines in zip(outputs, (self.source, self.target), strict=True):
            write_lines(output, lines)


@dataclass(frozen=True)
class BuiltInCorpus:
    """Training, validation and test pairs, without common sentences. Each pair has a kind, e.g. "killing"."""

    train: ParallelText
    valid: ParallelText
    held_out: ParallelText

    @classmethod
    def of(cls, *parts: Sequence[Sequence[str]]) -> BuiltInCorpus:
        """Make a corpus from three lists of rows (kind, source, target): train, valid, held_out."""
        columns = (tuple(map(list, zip(*rows, strict=True))) for rows in parts)
        return cls(*(ParallelText(source, target, kinds) for kinds, source, target in columns))


def training_mask(count: int, seed: int, name: str, noun: str = "pairs") -> np.ndarray:
    """Choose the pairs for training: True in a bool array (count,); the others are for validation.

    One in a hundred, at least 1 and at most 1000, is for validation. name, noun: the text and its unit, for the
    UserError that fewer than two raise.
    """
    if count < 2:
        raise UserError(f"{name}: {count} usable {noun}; training needs more, or give validation files")
    order = np.random.default_rng(seed).permutation(count)
    mask = np.ones(count, dtype=bool)
    mask[order[: max(1, min(MOST_SET_ASIDE, count // 100))]] = False
    return mask


def read_parallel(source: str | Path, target: str | Path) -> ParallelText:
    """Read two files of parallel text.

    Raises UserError with file and line if a file is missing, empty or not UTF-8. If the numbers of lines differ, the
    error gives both and the first line that seems out of step.
    """
    (source_lines, source_digest), (target_lines, target_digest) = read_text_lines(source), read_text_lines(target)
    _check_counts(source_lines, target_lines, str(source), str(target))
    if not source_lines:
        raise UserError(f"{source} and {target} hold no lines; give files with one sentence a line")
    return ParallelText(source_lines, target_lines, digests={"source": source_digest, "target": target_digest})


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of a UTF-8 file. Raises UserError if it is missing or not UTF-8; an empty file gives []."""
    return read_text_lines(path)[0]


def write_lines(path: Target, lines: list[str], force: bool = False) -> None:
    """Write a UTF-8 file with `\\n` line ends; `force` replaces an existing text file.

    Raises UserError for a line that would be read back differently: one with a `\\n` in it or a `\\r` at its end.
    """
    output = claim(path, TEXT, force)
    for number, line in enumerate(lines, start=1):
        if "\n" in line or line.endswith("\r"):
            raise UserError(f"{path}: line {number} holds a line end inside; one sentence a line is the format")
    write_text(output, "".join(f"{line}\n" for line in lines))


def read_text_lines(path: str | Path) -> tuple[list[str], str]:
    """Read (lines, SHA-256 of the unpacked bytes). Raises UserError as `read_lines`."""
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
    """The error for two texts with different numbers of lines. source, target: the lengths of their lines in
    characters."""
    line, more = suspect_line(source, target), source_name if len(source) > len(target) else target_name
    return UserError(
        f"{source_name} has {len(source)} lines, {target_name} has {len(target)}; every line needs its translation. "
        f"First suspect: line {line} (from there on {more} seems to have the extra lines)"
    )


def suspect_line(source: np.ndarray, target: np.ndarray) -> int:
    """Guess the line, counted from 1, where two texts with different numbers of lines fall out of step.

    source, target: the lengths of their lines in characters. Lengths of translations are proportional (Gale and Church
    1993), so cost(i, j) is the deviation of the log length ratio of lines i and j from that of the median lengths. If
    the longer side has d extra lines, the best place k minimises

        sum_{i<k} cost(i, i) + sum_{i>=k} cost(i, i+d)
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


UNPACKED = 4  # text is at least so many times as large as its packed or Parquet file


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """The files of a corpus: `source` and `target`, or `pairs`.

    languages: the columns of `pairs`, e.g. "en-de"; None: "source" and "target". tag: text put before every source.
    """

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
        """Whether these are two unpacked files of lines (or pipes) without a tag, to be read with `read_parallel`."""
        return self.pairs is None and not self.tag and all(path.suffix not in PACKED for path in self.files)

    @property
    def columns(self) -> Columns:
        return ("source", "target") if self.languages is None else language_pair(self.languages)

    def size(self) -> int:
        """Estimated bytes of the text; 0 for a pipe."""
        packed = (*PACKED, ".parquet")
        sizes = {file: file.stat().st_size for file in self.files if file.is_file()}
        return sum(size * (UNPACKED if file.suffix in packed else 1) for file, size in sizes.items())

    def parts(self) -> Generator[Part, None, None]:
        """Read (sources, targets) in blocks, without the tag.

        Raises UserError with file and line, e.g. for a row with three columns. After the last block it is also raised
        if there were no pairs, or the numbers of sources and targets differ.
        """
        empty = True
        for part in self._side_by_side() if self.pairs is None else pair_parts(Path(self.pairs), self.columns):
            empty = empty and not part[0]
            yield part
        if empty:
            raise UserError(f"{self.name}: no pairs in it; give files with one sentence or pair a line")

    def check_beginning(self) -> None:
        """Raise UserError if the first pairs can't be read, before a large file is read for its digest."""
        parts = self.parts()
        next(parts, None)
        parts.close()

    def usable_parts(self) -> Iterator[tuple[list[str], list[str], int]]:
        """Read (tagged sources, targets, number of pairs left out since a side is empty) in blocks, for training."""
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
        """Raise UserError with both numbers of lines. Reads the files again, so that lengths needn't be stored."""
        names = (str(self.source), str(self.target))
        lengths = [
            np.fromiter((len(line) for lines in line_blocks(name) for line in lines), dtype=np.int32) for name in names
        ]
        raise unequal(*names, *lengths)


def language_pair(text: str) -> Columns:
    """Split "en-de" or "zh-CN,en" into two names. Raises UserError for anything else."""
    parts = [part.strip() for part in text.split("," if "," in text else "-")]
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise UserError(f'languages = {text!r}: give two names, such as "en-de" or "zh-CN,en"')
    return parts[0], parts[1]
