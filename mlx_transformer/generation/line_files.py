"""The outputs of a model for each line of a file, in a file: translations, vectors, classes. A file that is partly
written is never begun anew (`output.py`)."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_regular
from mlx_transformer.system.manifest import sha256
from mlx_transformer.system.progress import quiet_progress
from mlx_transformer.system.watch import Progress

from .lines import PART_LINES, LineReader, LineReport
from .output import Writer, claim_lines, finishing, writer

JSON = (".jsonl", ".ndjson", ".json", ".txt")
"""The endings of the name of a file of JSON lines."""


@dataclass(frozen=True, kw_only=True)
class LineWork:
    """The work that is done on lines."""

    name: str
    """The verb, which the progress bar shows."""
    make: Callable[[Sequence[str], LineReport], bytes]
    """From lines to what is written of them."""
    overlong: str = ""
    """The words about lines that are too long, behind their number, where there are such."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The settings that must be the same in an interrupted run and in the one that continues it."""
    check: Callable[..., None] | None = None
    """As `checked_lines` takes it, for lines of which nothing can be made."""
    head: Callable[[int], bytes] | None = None
    """The beginning of a file of so many lines."""
    pieces: Callable[[str, LineReport], Iterable[bytes]] | None = None
    """In place of `make`, what is written of one line as it is decided; such a file is not continued."""
    suffixes: Sequence[str] = ()
    """The endings that the name of the file may have, unless in nothing; without them in anything."""


def cut_at(most: int) -> str:
    """Say what becomes of lines that have more tokens than a model takes."""
    return f"longer than {most} tokens, cut there"


def json_lines(objects: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one object a line."""
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in objects).encode(errors="replace")


def write_lines(
    work: LineWork,
    input: Path | None = None,
    output: Target | None = None,
    *,
    text: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    model_facts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Write what is made of each line of a file (default: `text`, or else standard input) to a file (default: standard
    output).

    resume: continue what was interrupted on its way to OUTPUT; force: replace an earlier OUTPUT; model_facts: what must
    not have changed meanwhile.
    How many lines are longer than the model takes, so that their end is left out, is said on standard error.
    `UserError` for what can't be read, written or continued.
    """
    if text and input is not None:
        raise UserError("text is given twice: as an argument, and as a file (input)")
    if resume and (input is None or output is None):
        raise UserError("{resume} continues a file: it needs input and output", resume=True)
    is_file = input is not None and input.is_file()
    no_file = input is None or (input.exists() and not is_file)  # one that is missing is said so when it is opened
    if work.head is not None and not text and no_file:
        raise UserError(f"{output}: an array says how many rows it has: give a file as input, or write JSON")
    output = claim_lines(work.name, output, force, input)
    if output is not None and work.suffixes and output.path.suffix.lower() not in ("", *work.suffixes):
        known = f"{', '.join(work.suffixes[:-1])} or {work.suffixes[-1]}"
        raise UserError(f"{output}: {work.name} writes no {output.path.suffix}; give a name that ends in {known}")
    with ExitStack() as stack:
        source, name = open_source(stack, input, text)
        known = checked_lines(input, work.check) if input is not None and is_file else None

        def facts() -> Mapping[str, str]:
            assert known is not None
            options = {key: str(value) for key, value in work.options.items()}
            return {"input": known[1], **options, **model_facts()}

        target = writer(output, None if known is None or work.pieces is not None else facts, resume)
        stack.callback(target.close)
        lines = known[0] if known is not None else source.read().count(b"\n") if work.head is not None else None
        if work.head is not None and known is None:
            source.seek(0)
        head = b"" if work.head is None or lines is None else work.head(lines)
        echoed = lines if output is not None or not sys.stdout.isatty() else None
        _Job(work, source, name, target, head, echoed).run()


@dataclass
class _Job:
    work: LineWork
    source: BinaryIO
    name: str
    target: Writer
    head: bytes
    lines: int | None
    """The lines of the input, where they are known and progress is shown."""

    def run(self) -> None:
        self.progress = replace(self.target.progress)
        if self.progress.read:
            self.source.seek(self.progress.read)
        reader = LineReader(self.source, self.name, self.progress.lines, self.progress.read)
        with finishing(self.target):
            if self.head and not self.progress.written:
                self._write(self.head)
            self._parts(reader) if self.work.pieces is None else self._stream(reader, self.work.pieces)
        if count := self.progress.overlong:
            which = (
                f"{count:,} of {self.progress.lines:,} lines, the first of them line {self.progress.first_overlong:,}"
            )
            print(f"{self.name}: {which}: {self.work.overlong}", file=sys.stderr)

    def _parts(self, reader: LineReader) -> None:
        # A person at the keyboard waits for each line.
        size = 1 if self.source.isatty() else PART_LINES
        with quiet_progress(self.work.name if self.lines else None) as watch:
            for lines in reader.parts(size):
                if before := self.progress.lines:
                    self.target.save(replace(self.progress))
                report = LineReport(before + 1, self._count, self._reporting(watch, before, len(lines)))
                self._write(self.work.make(lines, report))
                self.progress.lines, self.progress.read = reader.number, reader.position

    def _stream(self, reader: LineReader, pieces: Callable[[str, LineReport], Iterable[bytes]]) -> None:
        for line in reader:
            for piece in pieces(line, LineReport(reader.number, self._count)):
                self._write(piece)
            self._write(b"\n")
            self.progress.lines = reader.number

    def _reporting(self, watch: Progress, before: int, count: int) -> Callable[[float], None]:
        """Return what passes on the share of these lines that is done, as one of all."""

        def done(share: float) -> None:
            if total := self.lines:
                now = before + round(share * count)
                watch(now / total, f"{now:,} of {total:,} lines")

        return done

    def _write(self, data: bytes) -> None:
        self.target.write(data)
        self.progress.written += len(data)

    def _count(self, line: int) -> None:
        self.progress.first_overlong = self.progress.first_overlong or line
        self.progress.overlong += 1


def open_source(stack: ExitStack, input: Path | None, text: Sequence[str]) -> tuple[BinaryIO, str]:
    """Return what text is read from, and its name: a file, lines that are given, or standard input."""
    if text:
        return io.BytesIO("".join(f"{part}\n" for part in text).encode(errors="surrogateescape")), "text"
    if input is None:
        if sys.stdin is None:
            raise UserError("standard input is closed; give a file with --input")
        return sys.stdin.buffer, "standard input"
    return stack.enter_context(open_regular(input, hint="give a text file", pipes=True)), str(input)


def checked_lines(path: Path, check: Callable[..., None] | None = None) -> tuple[int, str]:
    """Return the lines of a file and its SHA-256. check: raises `UserError` for a line that would end the run, of some
    lines and `first_line`, the number of their first."""
    with open_regular(path) as file:
        reader, first = LineReader(file, str(path), quiet=True), 1
        for part in reader.parts():
            if check is not None:
                check(part, first_line=first)
            first += len(part)
    return reader.number, sha256(path)
