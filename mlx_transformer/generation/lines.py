"""Lines of text from a stream of bytes, and lines of translations for one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import LONGEST_LINE, line_without_end, without_mark

from .alignment import pharaoh
from .translate import Translation

PART_LINES, PART_BYTES = 2000, 4 << 20
"""Read, translated and written at once: so many lines, or fewer of so many bytes together."""


class LineReader(Iterator[str]):
    """Lines end at \\n alone (a \\r before it belongs to the end). Bytes that are no UTF-8 are replaced, with one
    warning on standard error; another encoding that says so is a `UserError`.

    number: of lines that were read. position: bytes that were read.
    """

    def __init__(self, stream: BinaryIO, name: str, number: int = 0, position: int = 0, quiet: bool = False):
        self.stream, self.name, self.number, self.position, self.warned = stream, name, number, position, quiet

    def __next__(self) -> str:
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

    def parts(self, lines: int = PART_LINES) -> Iterator[list[str]]:
        """Yield all that is left, so many lines at a time. Where a part ends depends on the text alone."""
        part, begin = [], self.position
        for line in self:
            part.append(line)
            if len(part) == lines or self.position - begin >= PART_BYTES:
                yield part
                part, begin = [], self.position
        if part:
            yield part


@dataclass(frozen=True)
class LineReport:
    """Which lines these are, and who hears of them."""

    first_line: int = 1
    """The number of the first one, in messages."""
    on_overlong: Callable[[int], None] | None = None
    """Called with the number of a line that is longer than the model takes, whose end is left out; None: an error."""
    done: Callable[[float], None] = lambda share: None
    """Called with the share of them that is done."""


NO_REPORT = LineReport()
"""Lines that are no file's: a caller's texts."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the translations of a line are written: on one line, n_best of them separated by tabs, with `scores` each
    followed by its score, with `alignment` by its links, 0-0 1-2; or as JSON, {"source": ..., "translations":
    [{"text": ..., "score": ..., "alignment": [[0, 0], [1, 2]]}, ...]}.

    Every line has the same columns; what there is no translation for is empty.
    """

    n_best: int = 1
    scores: bool = False
    json: bool = False
    alignment: bool = False

    @property
    def scored(self) -> bool:
        return self.scores or self.json

    def line(self, source: str, translations_of: Sequence[Translation]) -> str:
        if self.json:
            translations = [{"text": t.text, "score": t.score, **self._links(t)} for t in translations_of]
            return json.dumps({"source": source, "translations": translations}, ensure_ascii=False)
        tabs_separate = self.n_best > 1 or self.scores or self.alignment
        cells: list[str] = []
        for i in range(self.n_best):
            cells.append(one_line(translations_of[i].text, tabs_separate) if i < len(translations_of) else "")
            if self.scores:
                cells.append(f"{translations_of[i].score:.4f}" if i < len(translations_of) else "")
            if self.alignment:
                alignment = translations_of[i].alignment if i < len(translations_of) else None
                cells.append(pharaoh(alignment.links) if alignment else "")
        return "\t".join(cells)

    def _links(self, translation: Translation) -> dict[str, list[list[int]]]:
        if not self.alignment:
            return {}
        alignment = translation.alignment
        return {"alignment": [[*link] for link in alignment.links] if alignment else []}


def one_line(text: str, tabs_separate: bool = False) -> str:
    return re.sub(r"[\n\t]" if tabs_separate else r"\n", " ", text)
