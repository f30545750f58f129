"""Read files from others safely: only regular files of a bounded size, else a `UserError`.

Every file that is read whole, e.g. config.json or a tokenizer, is read here.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError, error_line, shortened

MAX_FILE_BYTES = 64 << 20
"""Bytes. A tokenizer.json of a million tokens has four fifths of it. Parsed JSON may take 20 times its file size."""

LONGEST_LINE = 16 << 20
"""Bytes of a line of text. Without a limit, a line of a device or sparse file would never end."""

LARGEST_HOLE = 64 << 20
"""Bytes. A part of a file up to this size isn't checked for holes (`check_written`)."""

DEEPEST = 64
"""Greatest nesting of a JSON file, so a recursive function can walk it."""

UTF8_MARK = codecs.BOM_UTF8
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # first: it begins like UTF-16's mark
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def open_regular(
    path: str | Path, largest: int | None = None, hint: str = "restore it from a copy", pipes: bool = False
) -> BufferedReader:
    """Open a regular file for reading.

    Raises `UserError`, ending with `hint`, if it can't be opened or has more than `largest` bytes. Pipes and devices
    are refused, as reading them may block or never end; `pipes` allows terminals, and pipes with a writer.
    """
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise UserError(f"{path}: cannot be read (no such file); {hint}") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # a name with a NUL, or half a surrogate pair
        raise UserError(f"{path!s}: cannot be read ({error})") from error
    try:
        status = os.fstat(file.fileno())
        if pipes and (stat.S_ISFIFO(status.st_mode) or file.isatty()):
            return BufferedReader(_Stream(file, f"{path}"))
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: is no regular file; put a copy of its contents there")
        if largest is not None and status.st_size > largest:
            size = f"{status.st_size / 1e6:,.1f} MB, more than the {largest / 1e6:,.1f} MB that such a file may have"
            raise UserError(f"{path}: {size}; {hint}")
    except BaseException:
        file.close()
        raise
    return file


def check_text(path: str | Path) -> None:
    """Raise `UserError` if a text file is missing. Commands call this before they open a model."""
    if not Path(path).exists():
        raise UserError(f"{path}: cannot be read (no such file); give a text file")


@contextmanager
def open_file(
    path: str | Path, largest: int | None = None, hint: str = "restore it from a copy", pipes: bool = False
) -> Iterator[BufferedReader]:
    """Open a file as `open_regular` does and close it after the block.

    OSError and MemoryError within the block become a `UserError` about this file, so the block should only read.
    """
    with open_regular(path, largest, hint, pipes) as file:
        try:
            yield file
        except OSError as error:
            raise _unreadable(path, error) from error
        except MemoryError as error:
            raise UserError(f"{path}: cannot be read (out of memory)") from error


def check_written(path: str | Path, begin: int, end: int) -> None:
    """Raise `UserError` if bytes `begin` to `end` of a file are almost all a hole, which would be read as zeros.

    This happens when a download reserves disk space and is broken off. Passes where the system can't report holes.
    """
    size, seek_data, seek_hole = end - begin, getattr(os, "SEEK_DATA", None), getattr(os, "SEEK_HOLE", None)
    if size <= LARGEST_HOLE or seek_data is None or seek_hole is None:
        return
    with open_file(path) as file:
        number, at, written = file.fileno(), begin, 0
        if os.fstat(number).st_size < end:
            return  # reading it will report the missing end
        while at < end and written < size // 64:
            try:
                data = min(os.lseek(number, at, seek_data), end)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the system can't report holes
                    return
                data = end  # only a hole follows
            at = end if data == end else min(os.lseek(number, data, seek_hole), end)
            written += at - data
    if written < size // 64:
        raise UserError(
            f"{path}: of {size / 1e6:,.1f} MB from byte {begin} on {written / 1e6:,.1f} MB were ever written; "
            "fetch it again, or restore it from a copy"
        )


def read_bytes(path: str | Path, largest: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file; raises `UserError` as `open_file` does."""
    with open_file(path, largest) as file:
        return file.read()


def read_text(path: str | Path, largest: int = MAX_FILE_BYTES) -> str:
    """Read a whole UTF-8 file; raises `UserError` as `open_file` does, and if it isn't UTF-8."""
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read (not UTF-8 at byte {error.start + 1})") from error


def read_protobuf(path: str | Path) -> bytes:
    """Read the bytes of a protobuf message, such as an ONNX graph.

    Raises `UserError` for files that can't be protobuf: over 2 GB, mostly a hole, or with a zero as the first byte.
    """
    with open_file(path, (1 << 31) - 1) as file:
        if file.peek(1)[:1] == b"\0":
            raise UserError(f"{path}: damaged, or no ONNX model; restore it from a copy")
        check_written(path, 0, os.fstat(file.fileno()).st_size)
        return file.read()


Default = TypeVar("Default", None, str, int)


class JsonObject(dict[str, Any]):
    """A JSON object from another program's file. Its methods return the value of a key and check the type.

    A missing or null key gives the default; a value of another type raises `UserError` with file, key and value.

    >>> read_object(folder / "config.json").text("pooling_mode")
    UserError: config.json: pooling_mode is 3, not a string
    """

    def __init__(self, values: dict[str, Any], where: str):
        super().__init__(values)
        self.where = where

    def text(self, key: str, default: Default = None) -> str | Default:
        return self._typed(key, default, (str,), "a string")

    def flag(self, key: str, default: bool = False) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def whole(self, key: str, default: Default = None) -> int | Default:
        return self._typed(key, default, (int,), "a whole number")

    def object(self, key: str) -> JsonObject:
        return JsonObject(self._typed(key, {}, (dict, JsonObject), "an object"), f"{self.where}: {key}")

    def texts(self, key: str) -> list[str]:
        """A string or a list of strings, returned as a list."""
        value = self._typed(key, [], (str, list), "a string or a list of strings")
        for each in value if isinstance(value, list) else ():
            if not isinstance(each, str):
                raise self.wrong(key, "a list of strings")
        return [value] if isinstance(value, str) else value

    def wrong(self, key: str, expected: str) -> UserError:
        from .fields import short  # rarely needed

        return UserError(f"{self.where}: {key} is {short(self[key])}, not {expected}")

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in kinds:  # bool is an int to isinstance
            raise self.wrong(key, expected)
        return value


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises `UserError` if it can't be read or isn't JSON."""
    return parse_json(read_text(path), f"{path}: damaged, or not JSON", "restore it from a copy")


def read_object(path: str | Path) -> JsonObject:
    """Read a JSON file that holds an object. Raises `UserError` as `read_json` does, and for any other value."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return JsonObject(values, str(path))


def optional_object(path: Path) -> JsonObject:
    """Read a JSON object as `read_object` does, or return {} if the file is missing."""
    return read_object(path) if path.is_file() else JsonObject({}, str(path))


def parse_json(text: str, where: str, hint: str) -> Any:
    """Parse JSON. Raises `UserError` "WHERE (reason); HINT" if it isn't JSON or is nested more than `DEEPEST` deep."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} ({error_line(error)}); {hint}") from error
    level = [parsed]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return parsed
    raise UserError(f"{where} (more than {DEEPEST} brackets deep); {hint}")


def without_mark(data: bytes, name: str) -> bytes:
    """Strip a UTF-8 byte order mark from a file's bytes. Raises `UserError` for a UTF-16 or UTF-32 mark."""
    for mark, encoding in WIDE_MARKS.items():
        if data.startswith(mark):
            from shlex import quote

            raise UserError(f"{name}: is {encoding}; convert it: iconv -f {encoding} -t UTF-8 {quote(name)} > NEW")
    return data.removeprefix(UTF8_MARK)


class _Stream(RawIOBase):
    """A pipe or terminal, opened without blocking; its reads block. Raises `UserError` for a pipe without a writer."""

    def __init__(self, file: BufferedReader, path: str):
        self._file, self._begin = file, b""
        if not file.isatty():
            try:
                self._begin = os.read(file.fileno(), 1)
            except BlockingIOError:  # no data yet, but there is a writer
                pass
            else:
                if not self._begin:
                    raise UserError(f"{path}: is a pipe that nobody writes to; give a file")
        os.set_blocking(file.fileno(), True)

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int | None:
        if self._begin:
            buffer[:1], self._begin = self._begin, b""
            return 1
        return self._file.raw.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def check_name(path: str | Path) -> None:
    """Raise `UserError` if a path can't be looked up, e.g. because it is empty, no string, or 5,000 characters long.

    A path at which nothing exists passes.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"expected a path or a name, found {type(path).__name__}")
    if not str(path):
        raise UserError("expected a path or a name, found nothing")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unreadable(shortened(str(path)), error) from error
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise UserError(f"{shortened(str(path))}: cannot be read ({error})") from error


def default_folder() -> Path:
    """This program's cache folder, e.g. ~/.cache/mlx-transformer. Raises `UserError` if the user has no home folder."""
    if sys.platform != "darwin" and (named := os.environ.get("XDG_CACHE_HOME")):
        return Path(named) / "mlx-transformer"
    try:
        home = Path.home()
    except RuntimeError:
        raise UserError("large text needs a cache, and this user has no home: name a folder by cache") from None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "mlx-transformer"


def line_without_end(path: str | Path, number: int) -> UserError:
    """The error for a line longer than `LONGEST_LINE`."""
    return UserError(f"{path}, line {number}: more than {LONGEST_LINE >> 20} MB in one line; is it text?")


def _unreadable(path: str | Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror or error})")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # don't wait for a pipe's writer
