"""Text files, plain or packed (.gz, .zst), as lines a block at a time or as a whole: a file may be larger than memory.

Lines end at `\\n` and nowhere else: U+2028, U+0085, form feeds and a CR inside a line are text. A `\\r` directly before
the `\\n` belongs to the line end (files from Windows) and is dropped, as is a byte order mark at the start of a file. A
final newline adds no empty line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError, error_line
from mlx_transformer.system.files import LONGEST_LINE, line_without_end, open_file, without_mark
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.machine import check_memory

PACKED = (".gz", ".zst")
BLOCK = 1 << 20  # bytes
ZSTANDARD_BLOCK = 1 << 12  # packed bytes; unpacked they are at most 128 MB


HINT = "give a text file with one sentence a line"

WatchBytes = Callable[[bytes], object]
"""Is called with each block of a file's text, unpacked."""


def line_blocks(
    path: str | Path, *, watch: WatchBytes = len, hint: str = HINT, pipes: bool = False
) -> Iterator[list[str]]:
    """Read all lines, some at a time; `watch` is called with their bytes. `pipes`: a pipe will do too.

    `UserError`, naming the line, for text that isn't UTF-8 or has no line ends, and for a file that can't be read
    (which the `hint` ends) or is damaged.
    """
    rest, number, begun = b"", 1, False
    for block in chain(_bytes(path, watch, hint, pipes), [None]):
        data = rest + (block or b"")
        cut = data.rfind(b"\n") + 1 if block is not None else len(data)
        if len(data) - cut > LONGEST_LINE:
            raise line_without_end(path, number + data.count(b"\n"))
        whole, rest = data[:cut], data[cut:]
        if whole:
            whole, begun = whole if begun else without_mark(whole, str(path)), True
            lines = _lines(whole, path, number)
            number += len(lines)
            yield lines


def json_blocks(path: str | Path, *, watch: WatchBytes = len, hint: str = HINT) -> Iterator[list[tuple[str, str, Any]]]:
    """Read a file of JSON lines, some at a time: (file and number, line, its value) of all that aren't blank.

    `UserError` as for `line_blocks`, and for a line that isn't JSON.
    """
    number = 1
    for lines in line_blocks(path, watch=watch, hint=hint):
        numbered = [(f"{path}, line {i}", line) for i, line in enumerate(lines, number) if line.strip()]
        yield [(where, line, _parsed(line, where)) for where, line in numbered]
        number += len(lines)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error_line(error)}); each line must be an object") from error


def within_memory(name: str) -> WatchBytes:
    """Return a `watch` that raises `UserError` when the text, which `name` names, is more than memory has room for."""
    size = 0

    def watch(block: bytes) -> None:
        nonlocal size
        size += len(block)
        check_memory(3 * size, f"{name}: its text", "give less")

    return watch


def whole_text(path: str | Path, *, watch: WatchBytes = len, hint: str = HINT) -> str:
    """Read all text of a file, its line ends as they are; `UserError` as for `line_blocks`."""
    return _decoded(without_mark(b"".join(_bytes(path, watch, hint)), str(path)), path, 1)


def unpacked_suffix(path: Path) -> str:
    """Return the ending of the file's name without that of its packing: .jsonl for a.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def missing(package: str, what: str) -> UserError:
    """Return the error for a package of the extra `data` that isn't installed."""
    return UserError(f"{what} needs {package}: {needs('data')}")


def _lines(data: bytes, path: str | Path, number: int) -> list[str]:
    """Split whole lines, the last of a file perhaps without its end; `number` is that of the first."""
    if len(data) > LONGEST_LINE:
        for i, line in enumerate(data.split(b"\n")):
            if len(line) > LONGEST_LINE:
                raise line_without_end(path, number + i)
    lines = _decoded(data, path, number).split("\n")
    last = lines.pop()  # what follows the last \n: no line unless it holds something
    if b"\r\n" in data:
        lines = [line[:-1] if line.endswith("\r") else line for line in lines]
    return [*lines, last] if last else lines


def _decoded(data: bytes, path: str | Path, number: int) -> str:
    """Decode UTF-8; `number` is that of the first line, for the error."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        begin = data.rfind(b"\n", 0, error.start) + 1
        line = number + data.count(b"\n", 0, begin)
        raise UserError(
            f"{path}, line {line}, byte {error.start - begin + 1}: not UTF-8 "
            f"(0x{data[error.start]:02x}); convert the file, for example with iconv -t UTF-8"
        ) from None


def _bytes(path: str | Path, watch: WatchBytes, hint: str, pipes: bool = False) -> Iterator[bytes]:
    """Read the text's bytes, unpacked, a block at a time."""
    read = {".gz": _gzip, ".zst": _zstandard}.get(Path(path).suffix, _plain)
    with open_file(path, hint=hint, pipes=pipes) as file:
        for block in read(file, path):
            watch(block)
            yield block


def _plain(file: BufferedReader, path: str | Path) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def _gzip(file: BufferedReader, path: str | Path) -> Iterator[bytes]:
    unpacked = gzip.GzipFile(fileobj=file)
    try:
        while block := unpacked.read(BLOCK):
            yield block
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, "gzip", error) from error


def _zstandard(file: BufferedReader, path: str | Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing("zstandard", f"{path}: a .zst file") from None
    # Its readers take a file that was cut short for a whole one; an object knows whether its frame has ended.
    frame: Any = zstandard.ZstdDecompressor().decompressobj()
    fresh = True
    while block := file.read(ZSTANDARD_BLOCK):
        while block:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            fresh = False
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise _damaged(path, "zstd", error) from error
            block = frame.unused_data if frame.eof else b""
    if not fresh and not frame.eof:
        raise _damaged(path, "zstd", "it ends in the middle")


def _damaged(path: str | Path, kind: str, error: object) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{path}: damaged, or no {kind} file ({reason}); restore it from a copy")
