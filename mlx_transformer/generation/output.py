"""Where results go: standard output, or a file that appears whole or not at all.

While OUT is being written it is called OUT.partial. OUT.partial.json records how much of it is safe and the input,
options and model it was made with. At the end OUT.partial is renamed to OUT. An earlier OUT, which only `force`
replaces, stays until then.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mlx_transformer.core.outputs import Kind, beginning, claim, holds_json_lines, holds_lines, holds_object
from mlx_transformer.system.durable import Output, Target, open_locked, put_output, write_text
from mlx_transformer.system.errors import Name, Text, UserError, joined
from mlx_transformer.system.files import read_json

FORMAT = 1
WINDOWS = sys.platform == "win32"  # an open file can't be renamed or removed there
DIGEST = 64  # characters of a SHA-256; errors don't show values of this length
NUMPY = b"\x93NUMPY"

Facts = Callable[[], Mapping[str, str]]
"""Returns facts that a run and its continuation must share: input, options, model."""


def _holds_any(*forms: Callable[[Path], bool]) -> Callable[[Path], bool]:
    return lambda path: any(form(path) for form in forms)


def _holds_scores(path: Path) -> bool:
    return re.match(rb"-?\d+\.\d{4}\t|\t\n", beginning(path)) is not None


_VECTORS = (holds_json_lines("text", name) for name in ("embedding", "weights", "embeddings"))
KINDS = {
    "translate": Kind("file of translations", _holds_any(holds_lines, holds_json_lines("source", "translations"))),
    "score": Kind("file of scores", _holds_any(_holds_scores, holds_json_lines("source", "target", "log_p"))),
    "embed": Kind("file of vectors", _holds_any(*_VECTORS, lambda path: beginning(path).startswith(NUMPY))),
    "fill": Kind("file of guesses", holds_json_lines("text", "masks")),
    "classify": Kind("file of classes", holds_json_lines("text", "classes")),
    "rerank": Kind("file of rankings", holds_json_lines("query", "results")),
    "tag": Kind("file of entities", holds_json_lines("text", "entities")),
    "answer": Kind("file of answers", holds_json_lines("question", "context", "answer")),
}
"""The file that each command writes, and how an earlier file is recognised."""
_is_record = holds_object("format", "progress", "facts")


def claim_lines(verb: str, out: Target | None, force: bool, *read: Path | None) -> Output | None:
    """Claim the output file of a command; None is standard output. Raises `UserError` as `claim` does, for OUT.partial
    too."""
    if out is None or isinstance(out, Output):
        return out
    output = claim(out, KINDS[verb], force, *read)
    if not output.special:
        if not (folder := output.place.parent).is_dir():
            raise UserError(f"{out}: cannot be written (there is no folder {folder}); make it first")
        partial = _partial(output.place)
        # A kill may cut the text anywhere, even in a character; its record says that it is an interrupted run's.
        begun = (record := partial.with_name(f"{partial.name}.json")).is_file() and _is_record(record)
        claim(partial, Kind(KINDS[verb].name, lambda _: True) if begun else KINDS[verb], True, *read)
    return output


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


@dataclass
class JobProgress:
    """How far a run is: lines done, bytes read and written, and overlong lines."""

    lines: int = 0
    read: int = 0
    written: int = 0
    overlong: int = 0
    first_overlong: int = 0


class Writer:
    """An open output, unbuffered so that closing can't fail. progress: how much of it can be resumed."""

    def __init__(self, stream: BinaryIO, name: str, ours: bool = False):
        """ours: `close` closes the stream."""
        self.stream, self.name, self.ours, self.progress = stream, name, ours, JobProgress()

    def write(self, data: bytes) -> None:
        """Write all bytes. Raises `UserError` with the output's name if that fails, e.g. on a full disk;
        `BrokenPipeError` goes to the caller."""
        left = memoryview(data)
        try:
            while left:
                left = left[self.stream.write(left) :]
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UserError:
        return UserError(f"{self.name}: could not be written ({error.strerror}); look for free space")

    def save(self, progress: JobProgress) -> None:
        """Make everything written so far safe."""

    def finish(self) -> None:
        """Complete the output."""

    def close(self) -> None:
        """Close the output, after `finish` or after an error."""
        if self.ours:
            self.stream.close()


class Partial(Writer):
    """OUT.partial and its record OUT.partial.json."""

    def __init__(self, output: Output, facts: Facts | None, resume: bool):
        """facts: None if the run can't be resumed. Raises `UserError` if the file can't be written, or can't be
        resumed."""
        self.output, path = output, output.path
        self.partial = _partial(output.place)
        self.record = self.partial.with_name(f"{self.partial.name}.json")
        self.file_name = path.with_name(self.partial.name)
        self.facts, self.finished = facts, False
        try:
            if (handle := open_locked(self.partial)) is None:
                raise UserError(
                    f"{self.file_name}: another process is writing it; wait for it, or choose another output"
                )
            stream = open(handle, "r+b", buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        super().__init__(stream, str(path))
        is_new = not self.partial.stat().st_size
        try:
            if is_new:
                self._remove_record()  # left by a kill after the rename
            elif resume:
                self._read()
            elif self.record.exists():
                raise UserError(
                    f"{self.file_name}: holds what an interrupted run has done; go on with --resume, or remove the file"
                )
            stream.truncate(self.progress.written)
            stream.seek(self.progress.written)
        except OSError as error:
            self._close(remove=is_new)
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        except UserError:
            self._close(remove=False)
            raise

    def _read(self) -> None:
        if not self.record.exists():
            return
        values = read_json(self.record)
        try:
            begun, progress = dict(values["facts"]), JobProgress(**values["progress"])
            whole = values["format"] == FORMAT and progress.written <= self.partial.stat().st_size
        except (LookupError, TypeError, ValueError):
            whole = False
        if not whole:
            raise UserError(f"{self.record}: damaged; remove it and {self.file_name}, and begin anew")
        now = self.known
        changed = [
            f"{name} is another than before"
            if len(now.get(name, "")) == DIGEST
            else Text("{} before, now {}", Name(name, str(begun.get(name))), now.get(name))
            for name in {**begun, **now}
            if begun.get(name) != now.get(name)
        ]
        if changed:
            hint = "give what it was begun with, or remove the file"
            raise UserError("{}: {}; {}", self.file_name, joined(changed), hint)
        self.progress = progress

    @cached_property
    def known(self) -> dict[str, str]:
        assert self.facts is not None
        return dict(self.facts())

    def save(self, progress: JobProgress) -> None:
        if self.facts is None:
            return
        try:
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise self._refused(error) from error
        self.progress = progress
        record = {"format": FORMAT, "progress": asdict(progress), "facts": self.known}
        write_text(self.record, json.dumps(record, indent=2) + "\n")

    def finish(self) -> None:
        try:
            os.fsync(self.stream.fileno())
            if WINDOWS:
                self.stream.close()
            put_output(self.partial, self.output)
        except OSError as error:
            raise self._refused(error) from error
        self.finished = True
        with suppress(OSError):
            self._remove_record()
        self.stream.close()  # releases the lock

    def _remove_record(self) -> None:
        with suppress(UserError):  # damaged, or another program's file of that name: leave it
            if self.record.exists() and _is_record(self.record):
                self.record.unlink()

    def close(self) -> None:
        """Close the file; keep it if it can be resumed."""
        self._close(remove=not self.finished and not self.progress.lines)

    def _close(self, remove: bool) -> None:
        if self.stream.closed:
            return
        if WINDOWS:
            self.stream.close()
        if remove:
            with suppress(OSError):
                self.partial.unlink(missing_ok=True)
        self.stream.close()


def writer(output: Output | None, facts: Facts | None, resume: bool) -> Writer:
    """Open an output: a file through OUT.partial, a device or a pipe directly, or standard output (None)."""
    if output is None:
        return Writer(sys.stdout.buffer, "standard output")
    if not output.special:
        return Partial(output, facts, resume)
    if resume:
        raise UserError(f"{output}: is not a regular file, so there is nothing to resume; leave out --resume")
    try:
        return Writer(open(output, "wb", buffering=0), str(output), ours=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
