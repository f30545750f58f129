"""A file translated to a file, or a stream to a stream: one line out for each line in, in memory that doesn't grow.

check the whole input -> parts of some thousand lines -> translations -> written; what is written is never begun anew
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mlx_transformer.system.durable import check_unread
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import changed
from mlx_transformer.system.files import open_regular
from mlx_transformer.system.manifest import sha256
from mlx_transformer.system.progress import quiet_progress
from mlx_transformer.system.watch import Watch

from .alignment import CrossWeights
from .lines import PART_LINES, Layout, LineReader, one_line
from .options import Options, Overlong, TextSettings
from .output import Writer, finishing, writer
from .settings import SOURCE_LANGUAGE, TARGET_LANGUAGE, TASK_PREFIX, language_id
from .verbs import TextVerbs

DONE_WITH = {
    "split": "translated in pieces",
    "truncate": "translated as far as it takes",
    "skip": "left empty",
}


def translate_stream(
    model: TextVerbs,
    input: Path | None = None,
    output: Path | None = None,
    settings: TextSettings = TextSettings(overlong="error"),
    *,
    text: Sequence[str] = (),
    cross_weights: CrossWeights | None = None,
    model_facts: Callable[[], Mapping[str, str]] = dict,
    **changes: Any,
) -> None:
    """Translate a file (default: `text`, or else standard input) to a file (default: standard output), one line out for
    each line in.

    Lines and their translations are as in `lines.py`. A file is read once before it is translated, so that what is
    wrong with a line of it is found before the first translation, not after the last hour; OUTPUT appears whole or not
    at all, and an interrupted one is continued by `resume` (`output.py`), with the same bytes in the end. How many
    lines were too long for the model is said on standard error, as is, for a file, how far it is.

    changes: by their names, fields of `TextSettings` that differ from `settings`, and the options of the search.
    cross_weights: what aligns, for a model whose search shows no attention. model_facts: what must not change between
    an interrupted translation and the one that continues it, by name, beside input and options. `UserError` for what
    can't be read, written or continued.
    """
    s, options = changed(settings, changes)
    for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE):
        if (code := getattr(s, name)) is not None:
            language_id(model.generation, code)
            options[name] = code
    if s.task_prefix is not None:
        options[TASK_PREFIX] = s.task_prefix
    if s.stream and (s.scores or s.json or s.resume or s.alignment):
        raise UserError("stream=True writes bare text as it is decided: without scores, json, resume and alignment")
    if text and input is not None:
        raise UserError("text is given twice: as an argument, and as a file (input)")
    if s.resume and (input is None or output is None):
        raise UserError("resume=True continues a file: it needs input and output")
    layout = Layout(n_best=options.get("n_best", 1), scores=s.scores, json=s.json, alignment=s.alignment)
    if input is not None and output is not None:
        check_unread(output, input)
    with ExitStack() as stack:
        source, name = open_source(stack, input, text)
        known = None
        if input is not None and input.is_file():
            check = partial(model.check_lines, overlong="error", task_prefix=s.task_prefix)
            known = checked_lines(input, check if s.overlong == "error" else None)

        def facts() -> Mapping[str, str]:
            assert known is not None
            said = {"overlong": s.overlong, "scores": s.scores, "json": s.json, "alignment": s.alignment}
            searched = {**asdict(Options()), **model.generation, **options}
            written = {key: str(value) for key, value in {**searched, **said}.items()}
            return {"input": known[1], **written, **model_facts()}

        target = writer(output, None if known is None or s.stream else facts, s.resume)
        stack.callback(target.close)
        aside = output is not None or not sys.stdout.isatty()
        lines = known[0] if known and aside else None
        aligned = s.alignment and (cross_weights or True)
        _Job(model, source, name, target, layout, s.overlong, lines, aligned, options).run(s.stream)


@dataclass
class _Job:
    model: TextVerbs
    source: BinaryIO
    name: str
    target: Writer
    layout: Layout
    overlong: Overlong
    lines: int | None
    """The lines of the input, where they are known and progress is shown."""
    aligned: bool | CrossWeights
    options: Mapping[str, Any]

    def run(self, stream: bool) -> None:
        self.progress = replace(self.target.progress)
        if self.progress.read:
            self.source.seek(self.progress.read)
        reader = LineReader(self.source, self.name, self.progress.lines, self.progress.read)
        with finishing(self.target):
            self._stream(reader) if stream else self._parts(reader)
        self._tell()

    def _parts(self, reader: LineReader) -> None:
        # A person at the keyboard waits for each line.
        size = 1 if self.source.isatty() else PART_LINES
        with quiet_progress("translate" if self.lines else None) as report:
            for lines in reader.parts(size):
                if self.progress.lines:
                    self.target.save(replace(self.progress))
                found = self.model.n_best(
                    lines,
                    overlong=self.overlong,
                    first_line=self.progress.lines + 1,
                    scored=self.layout.scored,
                    on_overlong=self._count,
                    aligned=self.aligned,
                    **self._watched(len(lines), report),
                    **self.options,
                )
                rows = (self.layout.line(*pair) + "\n" for pair in zip(lines, found, strict=True))
                data = "".join(rows).encode(errors="replace")
                self.target.write(data)
                self.progress.lines, self.progress.read = reader.number, reader.position
                self.progress.written += len(data)

    def _stream(self, reader: LineReader) -> None:
        for line in reader:
            pieces = self.model.stream(
                line, overlong=self.overlong, line_number=reader.number, on_overlong=self._count, **self.options
            )
            for piece in pieces:
                self.target.write(one_line(piece).encode(errors="replace"))
            self.target.write(b"\n")
            self.progress.lines = reader.number

    def _watched(self, lines: int, report: Watch) -> dict[str, Any]:
        """What tells `report` of the search in these lines, where there is something to report."""
        if not self.lines:
            return {}
        before, all_lines = self.progress.lines, self.lines

        def done(share: float) -> None:
            now = before + round(share * lines)
            report(now / all_lines, f"{now:,} of {all_lines:,} lines")

        return {"done": done}

    def _count(self, line: int) -> None:
        self.progress.first_overlong = self.progress.first_overlong or line
        self.progress.overlong += 1

    def _tell(self) -> None:
        if count := self.progress.overlong:
            lines = (
                f"{count:,} of {self.progress.lines:,} lines, the first of them line {self.progress.first_overlong:,}"
            )
            print(f"{self.name}: {lines}: longer than the model takes, {DONE_WITH[self.overlong]}", file=sys.stderr)


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
