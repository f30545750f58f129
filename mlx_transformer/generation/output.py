"""Where translations go: standard output, or a file that appears whole or not at all.

While OUTPUT is being made it is OUTPUT.partial, and OUTPUT.partial.json says how far that is trusted and what it is a
translation of; at the end it takes its name. An earlier OUTPUT stays until then.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.locks import open_locked

FORMAT = 1
WINDOWS = sys.platform == "win32"  # where no open file can be renamed or removed
DIGEST = 64  # characters of a fact that nobody can read


@dataclass
class JobProgress:
    """How far a translation has come. read: bytes of the input, written: of the output. overlong: lines that were, and
    the first of them."""

    lines: int = 0
    read: int = 0
    written: int = 0
    overlong: int = 0
    first_overlong: int = 0


class Writer:
    """Every write goes out at once, so that closing has nothing left to fail at. progress: what is kept of it, so that
    another can continue it."""

    def __init__(self, stream: BinaryIO, name: str, ours: bool = False):
        """ours: the stream is closed in the end."""
        self.stream, self.name, self.ours, self.progress = stream, name, ours, JobProgress()

    def write(self, data: bytes) -> None:
        """`UserError` names what has no room for it; who reads no more is the caller's matter."""
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
        """Note that a part is written."""

    def finish(self) -> None:
        """End: all is written."""

    def close(self) -> None:
        """Close after `finish`, or after an error."""
        if self.ours:
            self.stream.close()


class Partial(Writer):
    """OUTPUT.partial, beside the file that it becomes."""

    def __init__(self, path: Path, facts: Callable[[], Mapping[str, str]] | None, resume: bool):
        """facts: what a translation must have in common with the one that it continues, as it is told; None: it can't
        be continued. `UserError` where one can't be begun, or not be resumed."""
        self.path = Path(os.path.realpath(path))  # a link stays a link
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.record = self.path.with_name(f"{self.partial.name}.json")
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
            if is_new:  # what a kill left after the file took its name
                self.record.unlink(missing_ok=True)
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
            else f"{name}={begun.get(name)} before, now {now.get(name)}"
            for name in {**begun, **now}
            if begun.get(name) != now.get(name)
        ]
        if changed:
            raise UserError(f"{self.file_name}: {'; '.join(changed)}; give what it was begun with, or remove the file")
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
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._refused(error) from error
        self.finished = True
        with suppress(OSError):
            self.record.unlink(missing_ok=True)
        self.stream.close()  # and with it the lock, for which others wait

    def close(self) -> None:
        """Leave what can be continued."""
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


@contextmanager
def finishing(target: Writer) -> Iterator[None]:
    """Finish it after all is written; what ends that before says how much is kept."""
    try:
        yield
        target.finish()
    except (UserError, KeyboardInterrupt) as error:
        if lines := target.progress.lines:
            what = f"{error}; " if str(error) else ""
            error.args = (f"{what}{lines:,} lines are done: go on with --resume",)
        raise


def writer(output: Path | None, facts: Callable[[], Mapping[str, str]] | None, resume: bool) -> Writer:
    """For standard output, a file, or what is no file, such as a pipe, which is written to as it is."""
    if output is None:
        return Writer(sys.stdout.buffer, "standard output")
    if output.is_file() or not output.exists():
        return Partial(output, facts, resume)
    if resume:
        raise UserError(f"{output}: is no file, so nothing of it was kept; leave out --resume")
    try:
        return Writer(open(output, "wb", buffering=0), str(output), ours=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
