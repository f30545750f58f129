"""Parallel text: two lists of equal length, from memory or from two files with one sentence a line.

Lines end at `\\n` and nowhere else: U+2028, U+0085, form feeds and a CR inside a line are text. A `\\r` directly
before the `\\n` belongs to the line end (files from Windows) and is dropped, as is a byte order mark at the start
of a file. A final newline adds no empty line.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import LONGEST_LINE, line_without_end, open_file, without_mark
from mlx_transformer.system.machine import check_memory


@dataclass(frozen=True)
class ParallelText:
    """`source[i]` is translated by `target[i]`; `kinds[i]`, where there is one, says what sort of phrase it is.

    `digests` are SHA-256 of both sides for the record of a run: of the files' bytes, or of the lines as
    `write` would write them. Raises UserError when the sides differ in length.
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

    @property
    def lines(self) -> Iterator[str]:
        """All text that a joint vocabulary is made of."""
        yield from self.source
        yield from self.target

    def select(self, indices: list[int]) -> "ParallelText":
        """The pairs at `indices`, in that order."""
        kinds = None if self.kinds is None else [self.kinds[i] for i in indices]
        return ParallelText([self.source[i] for i in indices], [self.target[i] for i in indices], kinds)

    def without_empty(self) -> tuple["ParallelText", int]:
        """For training: the pairs whose sides both hold more than white space, and how many others there were.

        Evaluation keeps every pair, so that output and reference stay aligned.
        """
        usable = [i for i, (s, t) in enumerate(zip(self.source, self.target, strict=True)) if s.strip() and t.strip()]
        dropped = len(self) - len(usable)
        return (self.select(usable), dropped) if dropped else (self, 0)

    def write(self, source: str | Path, target: str | Path) -> None:
        """Write both sides as UTF-8 files with `\\n` line ends. UserError for a line that holds a `\\n` itself."""
        for path, lines in ((source, self.source), (target, self.target)):
            write_lines(path, lines)


def read_parallel(source: str | Path, target: str | Path) -> ParallelText:
    """Read two files of parallel text.

    UserError, naming file and line, for a file that is missing, empty or not UTF-8; for unequal line counts it
    gives both counts and the first line that seems out of step.
    """
    (source_lines, source_digest), (target_lines, target_digest) = _read(source), _read(target)
    _check_counts(source_lines, target_lines, str(source), str(target))
    if not source_lines:
        raise UserError(f"{source} and {target} hold no lines; give files with one sentence a line")
    return ParallelText(source_lines, target_lines, digests={"source": source_digest, "target": target_digest})


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file by the rules above. UserError as for `read_parallel`."""
    return _read(path)[0]


def split_lines(data: bytes) -> list[bytes]:
    """Split at `\\n` only; drops one `\\r` before each `\\n`, and the empty piece after a final newline."""
    lines = data.split(b"\n")
    last = lines.pop()  # what follows the last \n: no line unless it holds something
    lines = [line[:-1] if line.endswith(b"\r") else line for line in lines]
    return [*lines, last] if last else lines


def write_lines(path: str | Path, lines: list[str]) -> None:
    """One line each, UTF-8, `\\n` line ends. UserError for a line that would not come back as it is."""
    for number, line in enumerate(lines, start=1):
        if "\n" in line or line.endswith("\r"):
            raise UserError(f"{path}: line {number} holds a line end inside; one sentence a line is the format")
    write_text(Path(path), "".join(f"{line}\n" for line in lines))


def _read(path: str | Path) -> tuple[list[str], str]:
    """Lines and the SHA-256 of the file's bytes."""
    data = _bytes(path)
    lines = []
    for number, line in enumerate(split_lines(without_mark(data, str(path))), start=1):
        if len(line) > LONGEST_LINE:
            raise line_without_end(path, number)
        try:
            lines.append(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}, byte {error.start + 1}: not UTF-8 (0x{line[error.start]:02x}); "
                "convert the file, for example with iconv -t UTF-8"
            ) from None
    return lines, hashlib.sha256(data).hexdigest()


def _bytes(path: str | Path) -> bytes:
    with open_file(path, hint="give a text file with one sentence a line", pipes=True) as file:
        parts, size = [], 0
        while part := file.read(LONGEST_LINE):
            if len(part) == LONGEST_LINE and b"\n" not in part:  # before the rest, which may be as large as a disk
                raise line_without_end(path, 1 + sum(part.count(b"\n") for part in parts))
            parts.append(part)
            size += len(part)
            check_memory(3 * size, f"{path}: its text", "give less")
        return b"".join(parts)


def _digest(lines: list[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def _check_counts(source: list[str], target: list[str], source_name: str, target_name: str) -> None:
    if len(source) == len(target):
        return
    line = first_suspect_line(source, target)
    more = source_name if len(source) > len(target) else target_name
    raise UserError(
        f"{source_name} has {len(source)} lines, {target_name} has {len(target)}; every line needs its translation. "
        f"First suspect: line {line} (from there on {more} seems to have the extra lines)"
    )


def first_suspect_line(source: list[str], target: list[str]) -> int:
    """Where two texts of unequal length most likely fall out of step: a line number counted from 1.

    Lengths of translations are proportional (Gale and Church 1993), so with d lines too many in the longer side
    the best place k minimises sum_{i<k} cost(i, i) + sum_{i>=k} cost(i, i+d), where cost is the deviation
    of the log length ratio from its median.
    """
    return suspect_line(*(np.array([len(line) for line in lines], dtype=float) for lines in (source, target)))


def suspect_line(source: np.ndarray, target: np.ndarray) -> int:
    """The same, of the lines' lengths in characters."""
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
