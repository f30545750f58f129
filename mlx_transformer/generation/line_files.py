"""The loop of all commands that write something for each line of text: a file in, a file out.

LineReader -> up to 2,000 lines -> LineWork: read each line, compute all, format each result -> Writer (`output.py`)

A file is read twice, so that a wrong line is found before the first result, not hours later. Memory use doesn't grow
with the file. `resume` continues an interrupted run, whose file gets the same bytes as without the interruption.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import LONGEST_LINE, line_without_end, open_regular, without_mark
from mlx_transformer.system.manifest import sha256
from mlx_transformer.system.progress import quiet_progress

from .output import Writer, claim_lines, writer

if TYPE_CHECKING:
    from mlx_transformer.data.corpus import ParallelText

PART_LINES, PART_BYTES = 2000, 4 << 20
"""Lines that are read, computed and written together; a part ends earlier when it has PART_BYTES bytes."""


class LineReader(Iterator[Any]):
    """Lines of UTF-8 text. Only \\n ends a line; a \\r before it is dropped.

    Bytes that are not UTF-8 are replaced, with one warning on standard error. A byte-order mark of another encoding
    raises `UserError`. number, position: lines and bytes read so far.
    """

    def __init__(self, stream: BinaryIO, name: str):
        self.stream, self.name, self.number, self.position, self.warned = stream, name, 0, 0, False

    def start(self, number: int, position: int) -> None:
        """Continue after this many lines and bytes; (0, 0) starts again."""
        self.stream.seek(position)
        self.number, self.position, self.warned = number, position, False

    def __next__(self) -> Any:
        try:
            line = self.stream.readline(LONGEST_LINE + 1)
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read ({error.strerror})") from error
        if not line:
            raise StopIteration
        self.number += 1
        self.position += len(line)
        if len(line) > LONGEST_LINE:
            raise line_without_end(self.name, self.number)
        if self.number == 1:
            line = without_mark(line, self.name)
        if line.endswith(b"\n"):
            line = line[:-1].removesuffix(b"\r")
        try:
            return line.decode()
        except UnicodeDecodeError:
            if not self.warned:
                print(f"{self.name}, line {self.number}: not UTF-8, bad bytes are replaced", file=sys.stderr)
                self.warned = True
            return line.decode(errors="replace")

    def parts(self, lines: int) -> Iterator[list[Any]]:
        """Yield the rest in lists of at most `lines` lines. Where a part ends depends only on the text."""
        part, begin = [], self.position
        for line in self:
            part.append(line)
            if len(part) == lines or self.position - begin >= PART_BYTES:
                yield part
                part, begin = [], self.position
        if part:
            yield part


class PairReader(LineReader):
    """The lines of two files side by side, as (source, target). Both are held in memory."""

    def __init__(self, text: ParallelText, name: str):
        super().__init__(io.BytesIO(), name)
        self.pairs = list(zip(text.source, text.target, strict=True))

    def __next__(self) -> tuple[str, str]:
        if self.number == len(self.pairs):
            raise StopIteration
        self.number += 1
        return self.pairs[self.number - 1]


@dataclass(frozen=True)
class LineReport:
    """Line numbers and callbacks for some lines of a file."""

    first_line: int = 1
    on_overlong: Callable[[int], None] | None = None
    """Called with the number of each line that is too long for the model and is cut or skipped. None: an error."""
    done: Callable[[float], None] = lambda share: None
    """Called with the finished share of these lines."""


NO_REPORT = LineReport()
"""For texts from a caller, not from a file."""


@dataclass(frozen=True, kw_only=True)
class LineWork:
    """How a command turns lines into output."""

    name: str
    """The command, shown on the progress bar."""
    run: Callable[[Sequence[Any], LineReport], Iterable[Any]]
    """Compute the results of up to 2,000 lines, given as `read` returns them."""
    show: Callable[[Any, Any], str | bytes | Mapping[str, Any]]
    """(line, result) -> output: text, which gets a line end; a mapping, written as JSON; or bytes."""
    read: Callable[[Any, int], Any] = lambda line, number: line
    """(line, its number) -> input of `run`. Raises `UserError` for a malformed line."""
    check: Callable[..., None] | None = None
    """check(lines, first_line=1) raises `UserError` for a line that `run` would refuse."""
    overlong: str = ""
    """The message about overlong lines, if any."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options that must be the same when a run is resumed."""
    head: Callable[[int], bytes] | None = None
    """(number of lines) -> first bytes of the output file, e.g. the header of an array."""
    stream: Callable[[str, LineReport], Iterable[str]] | None = None
    """Instead of `run` and `show`: yields a line's output in pieces, each as soon as it is decided."""
    suffixes: Sequence[str] = ()
    """Allowed suffixes of the output's name, besides no suffix. Default: any."""
    unit: str = "lines"

    def pieces(self, lines: Sequence[Any], report: LineReport) -> Iterator[bytes]:
        if self.stream is None:
            inputs = [self.read(line, number) for number, line in enumerate(lines, report.first_line)]
            pairs = zip(inputs, self.run(inputs, report), strict=True)
            yield b"".join(_bytes(self.show(*pair)) for pair in pairs)
            return
        for line in lines:
            yield from (piece.encode(errors="replace") for piece in self.stream(line, report))
            yield b"\n"


def _bytes(shown: str | bytes | Mapping[str, Any]) -> bytes:
    if isinstance(shown, bytes):
        return shown
    line = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    return f"{line}\n".encode(errors="replace")


def write_lines(
    work: LineWork,
    input: Path | tuple[Path, Path] | None = None,
    output: Target | None = None,
    *,
    text: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    model_facts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Write the result for each line of a file, of `text` or of standard input, to `output` or standard output.

    input: a file, or two files whose lines belong together. resume: continue an interrupted run. force: replace an
    earlier output. model_facts: facts that a resumed run must match, besides input and options. Prints the number of
    lines that are too long for the model to standard error. Raises `UserError` for anything that can't be read, written
    or resumed.
    """
    if text and input is not None:
        raise UserError("text is given twice: as an argument, and as a file (input)")
    if resume and (input is None or output is None):
        raise UserError("{resume} continues a file: it needs input and output", resume=True)
    files = input if isinstance(input, tuple) else (input,)
    output = claim_lines(work.name, output, force, *files)
    if output is not None and work.suffixes and output.path.suffix.lower() not in ("", *work.suffixes):
        known = f"{', '.join(work.suffixes[:-1])} or {work.suffixes[-1]}"
        raise UserError(f"{output}: {work.name} writes no {output.path.suffix}; give a name that ends in {known}")
    with ExitStack() as stack:
        reader, facts = _opened(stack, input, text), None
        file = input if isinstance(input, Path) and input.is_file() else None
        lines = _checked(reader, work) if text or file or isinstance(input, tuple) else None
        if work.head is not None and lines is None:
            raise UserError(f"{output}: an array's header has its number of rows: give a file as input, or write JSON")
        if file is not None and work.stream is None:
            fixed = {"input": sha256(file), **{name: str(value) for name, value in work.options.items()}}
            facts = lambda: {**fixed, **model_facts()}  # noqa: E731
        target = writer(output, facts, resume)
        stack.callback(target.close)
        shown = not text and work.stream is None and (output is not None or not sys.stdout.isatty())
        _Job(work, reader, target, lines if shown else None).run(b"" if work.head is None else work.head(lines or 0))


def _opened(stack: ExitStack, input: Path | tuple[Path, Path] | None, text: Sequence[str]) -> LineReader:
    if isinstance(input, tuple):
        from mlx_transformer.data.corpus import read_parallel

        return PairReader(read_parallel(*input), str(input[0]))
    if input is not None:
        return LineReader(stack.enter_context(open_regular(input, hint="give a text file", pipes=True)), str(input))
    if text:
        return LineReader(io.BytesIO("".join(f"{part}\n" for part in text).encode(errors="surrogateescape")), "text")
    if sys.stdin is None:
        raise UserError("standard input is closed; give a file with --input")
    return LineReader(sys.stdin.buffer, "standard input")


def _checked(reader: LineReader, work: LineWork) -> int:
    """Read and count all lines. Raises `UserError` for a line that the command would refuse."""
    reader.warned = True  # the second reading warns, not the first
    for part in reader.parts(PART_LINES):
        first = reader.number - len(part) + 1
        for number, line in enumerate(part, first):
            work.read(line, number)
        if work.check is not None:
            work.check(part, first_line=first)
    lines = reader.number
    reader.start(0, 0)
    return lines


@dataclass
class _Job:
    work: LineWork
    reader: LineReader
    target: Writer
    lines: int | None
    """Number of input lines, if progress is shown."""

    def run(self, head: bytes) -> None:
        work, progress = self.work, replace(self.target.progress)
        self.progress = progress
        if progress.read:
            self.reader.start(progress.lines, progress.read)
        try:
            with quiet_progress(work.name if self.lines else None) as watch:
                for piece in self._pieces(head, watch):
                    self.target.write(piece)
                    progress.written += len(piece)
            self.target.finish()
        except (UserError, KeyboardInterrupt) as error:
            if saved := self.target.progress.lines:
                done = f"{saved:,} lines are done: go on with --resume"
                if isinstance(error, UserError):
                    error.add(done)
                else:
                    error.args = ("; ".join(filter(None, [str(error), done])),)
            raise
        if count := progress.overlong:
            which = f"{count:,} of {progress.lines:,} {work.unit}, the first of them line {progress.first_overlong:,}"
            print(f"{self.reader.name}: {which}: {work.overlong}", file=sys.stderr)

    def _pieces(self, head: bytes, watch: Callable[[float, str], None]) -> Iterator[bytes]:
        """Yield the bytes to write. Each part is saved once the next one has been read."""
        progress, reader = self.progress, self.reader
        if not progress.written:
            yield head
        # Someone typing at a terminal waits for each line.
        for lines in reader.parts(1 if self.work.stream is not None or reader.stream.isatty() else PART_LINES):
            before = progress.lines
            if before:
                self.target.save(replace(progress))

            def done(share: float, before: int = before, count: int = len(lines)) -> None:
                if total := self.lines:
                    now = before + round(share * count)
                    watch(now / total, f"{now:,} of {total:,} {self.work.unit}")

            yield from self.work.pieces(lines, LineReport(before + 1, self._count, done))
            progress.lines, progress.read = reader.number, reader.position

    def _count(self, line: int) -> None:
        self.progress.first_overlong = self.progress.first_overlong or line
        self.progress.overlong += 1
