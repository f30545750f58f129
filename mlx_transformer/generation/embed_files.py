"""The vectors of a file's lines in a file: JSON, one line for each, or one array for NumPy (.npy).

Read, kept and continued as translations are (`files.py`, `output.py`). An array says in its head how many rows it has,
so that the lines of its text must be known beforehand.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mlx_transformer.system.durable import check_unread
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import quiet_progress
from mlx_transformer.system.watch import Watch

from .embed import Embedder
from .files import checked_lines, open_source
from .lines import PART_LINES, LineReader
from .options import EmbedOptions
from .output import Writer, finishing, writer
from .verbs import TextVerbs

ARRAY = ".npy"


def embed_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Path | None = None,
    options: EmbedOptions | None = None,
    *,
    text: Sequence[str] = (),
    resume: bool = False,
    model_facts: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Write the vector of each line of a file (default: `text`, or else standard input) to a file (default: standard
    output): {"text": ..., "embedding": [...]} a line, or to a file that ends in .npy an array (lines, W) of float32.

    resume: continue what was interrupted on its way to OUTPUT; model_facts: what must not have changed meanwhile.
    How many lines are longer than the model takes, so that their end is left out, is said on standard error.
    `UserError` for what can't be read, written or continued.
    """
    options = options or EmbedOptions()
    if text and input is not None:
        raise UserError("text is given twice: as an argument, and as a file (input)")
    if resume and (input is None or output is None):
        raise UserError("resume=True continues a file: it needs input and output")
    as_array = output is not None and output.suffix == ARRAY
    is_file = input is not None and input.is_file()
    if as_array and not (is_file or text):
        raise UserError(f"{output}: an array says how many rows it has: give a file as input, or write JSON")
    if input is not None and output is not None:
        check_unread(output, input)
    embedder = model.embedder(**asdict(options))
    _ = embedder.tokenizer
    with ExitStack() as stack:
        source, name = open_source(stack, input, text)
        known = checked_lines(input, model, "truncate") if input is not None and is_file else None

        def facts() -> Mapping[str, str]:
            assert known is not None
            asked = {key: str(value) for key, value in asdict(options).items()}
            return {"input": known[1], **asked, **model_facts()}

        target = writer(output, None if known is None else facts, resume)
        stack.callback(target.close)
        lines = known[0] if known is not None else source.read().count(b"\n") if as_array else None
        if as_array and known is None:
            source.seek(0)
        shown = lines if output is not None or not sys.stdout.isatty() else None
        _Job(embedder, source, name, target, lines if as_array else None, shown).run()


@dataclass
class _Job:
    embedder: Embedder
    source: BinaryIO
    name: str
    target: Writer
    rows: int | None
    """The rows of the array; None: JSON is written."""
    lines: int | None
    """The lines of the input, where they are known and progress is shown."""

    def run(self) -> None:
        self.progress = replace(self.target.progress)
        if self.progress.read:
            self.source.seek(self.progress.read)
        reader = LineReader(self.source, self.name, self.progress.lines, self.progress.read)
        with finishing(self.target):
            if self.rows is not None and not self.progress.written:
                self._write(array_head(self.rows, self.embedder.dimensions))
            self._parts(reader)
        if count := self.progress.overlong:
            told = (
                f"{count:,} of {self.progress.lines:,} lines, the first of them line {self.progress.first_overlong:,}"
            )
            print(f"{self.name}: {told}: longer than {self.embedder.most} tokens, cut there", file=sys.stderr)

    def _parts(self, reader: LineReader) -> None:
        # A person at the keyboard waits for each line.
        size = 1 if self.source.isatty() else PART_LINES
        with quiet_progress("embed" if self.lines else None) as report:
            for lines in reader.parts(size):
                if before := self.progress.lines:
                    self.target.save(replace(self.progress))
                rows = self.embedder.rows(lines, before + 1, self._count)
                vectors = self.embedder.vectors(rows, self._told(report, before, len(lines)))
                self._write(vectors.astype("<f4").tobytes() if self.rows is not None else json_lines(lines, vectors))
                self.progress.lines, self.progress.read = reader.number, reader.position

    def _told(self, report: Watch, before: int, count: int) -> Callable[[float], None]:
        """What passes on the share of these lines that is done, as one of all."""

        def done(share: float) -> None:
            if total := self.lines:
                now = before + round(share * count)
                report(now / total, f"{now:,} of {total:,} lines")

        return done

    def _write(self, data: bytes) -> None:
        self.target.write(data)
        self.progress.written += len(data)

    def _count(self, line: int) -> None:
        self.progress.first_overlong = self.progress.first_overlong or line
        self.progress.overlong += 1


def array_head(rows: int, width: int) -> bytes:
    """Return what a .npy file of float32 begins with."""
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})
    return head.getvalue()


def json_lines(lines: Sequence[str], vectors: NDArray[np.float32]) -> bytes:
    """Return one object a line; each number is the shortest that is read back as the same float32."""
    objects = ({"text": line, "embedding": short_floats(row)} for line, row in zip(lines, vectors, strict=True))
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in objects).encode(errors="replace")


def short_floats(vector: NDArray[np.float32]) -> list[float]:
    """Return numbers that JSON writes as briefly as float32 allows."""
    return [float(text) for text in vector.astype(str).tolist()]
