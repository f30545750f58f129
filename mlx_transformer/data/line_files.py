"""Read text files, plain or packed (.gz, .zst), and files of pairs, in blocks of lines: a file may exceed memory.

A line ends only at `\\n`: U+2028, U+0085, form feeds and a CR inside a line are text. A `\\r` directly before the `\\n`
belongs to the line end (files from Windows) and is dropped. So is a byte order mark at the start of a file. A final
newline adds no empty line.

Files of pairs are TSV, JSON lines, Parquet, or Arrow as written by Hugging Face's `datasets`. Their columns are
`source` and `target`, or two languages, e.g. `en` and `de`. In JSON, Parquet and Arrow the columns may be inside a
field `translation`: {"translation": {"en": ..., "de": ...}}. A null is read as an empty side.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError, error_line
from mlx_transformer.system.files import (
    LONGEST_LINE,
    line_without_end,
    open_file,
    open_regular,
    read_json,
    without_mark,
)
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.machine import check_memory

PACKED = (".gz", ".zst")
BLOCK = 1 << 20  # bytes
ZSTANDARD_BLOCK = 1 << 12  # packed bytes, which unpack to at most 128 MB


HINT = "give a text file with one sentence a line"

WatchBytes = Callable[[bytes], object]
"""A function that is called with each unpacked block of a file, e.g. to compute a digest."""


def line_blocks(
    path: str | Path, *, watch: WatchBytes = len, hint: str = HINT, pipes: bool = False
) -> Iterator[list[str]]:
    """Yield a file's lines in blocks.

    watch: called with each block's bytes. hint: last words of the error for a file that can't be read. pipes: whether
    `path` may be a pipe. Raises UserError, with the line if there is one, if the file can't be read, is damaged or not
    UTF-8, or has an endless line.
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
    """Yield ("FILE, line N", line, parsed value) for the lines of a JSON lines file, in blocks; skips blank lines.

    Raises UserError as `line_blocks`, and for a line that isn't JSON.
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
    """Make a `watch` that raises UserError once the text `name` gets too large for the machine's memory."""
    size = 0

    def watch(block: bytes) -> None:
        nonlocal size
        size += len(block)
        check_memory(3 * size, f"{name}: its text", "give less")

    return watch


def whole_text(path: str | Path, *, watch: WatchBytes = len, hint: str = HINT) -> str:
    """Read a whole file, with its line ends unchanged. Raises UserError as `line_blocks`."""
    return _decoded(without_mark(b"".join(_bytes(path, watch, hint)), str(path)), path, 1)


def unpacked_suffix(path: Path) -> str:
    """The suffix of a file without its packing: ".jsonl" for a.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def missing(package: str, what: str) -> UserError:
    """The error for a missing package of the extra `data`, e.g. pyarrow. what: what needs it."""
    return UserError(f"{what} needs {package}: {needs('data')}")


def _lines(data: bytes, path: str | Path, number: int) -> list[str]:
    """Split data into lines; only a file's last line may lack its end. number: the first line's number, for errors."""
    if len(data) > LONGEST_LINE:
        for i, line in enumerate(data.split(b"\n")):
            if len(line) > LONGEST_LINE:
                raise line_without_end(path, number + i)
    lines = _decoded(data, path, number).split("\n")
    last = lines.pop()  # after the last \n: counts as a line only if it isn't empty
    if b"\r\n" in data:
        lines = [line[:-1] if line.endswith("\r") else line for line in lines]
    return [*lines, last] if last else lines


def _decoded(data: bytes, path: str | Path, number: int) -> str:
    """Decode UTF-8. number: the first line's number, for errors."""
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
    """Read a file's unpacked bytes in blocks."""
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
    # zstandard's readers don't notice a file that was cut short; a decompressobj knows whether its frame has ended.
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


Columns = tuple[str, str]
Part = tuple[list[str], list[str]]

INSIDE = "translation"
ROWS = 8192  # rows of a Parquet file read at a time
KINDS = ".tsv, .jsonl (both also as .gz or .zst), .parquet, .arrow, or a folder as datasets' save_to_disk writes it"


def pair_parts(path: Path, columns: Columns) -> Iterator[Part]:
    """Yield (sources, targets) of a file of pairs in blocks. Raises UserError with the line or row, e.g. for a missing
    column."""
    return _reader(path)(path, columns)


def files_of(path: Path) -> list[Path]:
    """The files with the pairs: `path` itself, or the Arrow files of a folder written by `datasets`, in order.

    Raises UserError for another folder, and for a folder with several splits, e.g. train and test.
    """
    if not path.is_dir():
        return [path]
    state = path / "state.json"
    if (splits := path / "dataset_dict.json").exists():
        names = _listed(splits, "splits")
        raise UserError(f"{path}: holds the splits {', '.join(map(str, names))}; name one, such as {path / names[0]}")
    if not state.exists():
        raise UserError(f"{path}: a folder without state.json, which datasets' save_to_disk writes; give a file")
    try:
        return [path / Path(entry["filename"]).name for entry in _listed(state, "_data_files")]
    except (LookupError, TypeError) as error:
        raise UserError(f"{state}: damaged (no file names); save the dataset anew") from error


def _listed(path: Path, key: str) -> list[Any]:
    values = read_json(path)
    if not isinstance(values, dict) or not isinstance(values.get(key), list) or not values[key]:
        raise UserError(f"{path}: lists no {key}; save the dataset anew")
    return values[key]


def _reader(path: Path) -> Callable[[Path, Columns], Iterator[Part]]:
    if path.is_dir():
        return _folder
    readers = {".tsv": _tsv, ".jsonl": _json, ".ndjson": _json}
    readers |= (
        {} if path.suffix in PACKED else {".parquet": partial(_tables, _parquet), ".arrow": partial(_tables, _arrow)}
    )
    if (kind := unpacked_suffix(path)) not in readers:
        raise UserError(f"{path}: pairs are read from {KINDS}; what ends otherwise is none of these")
    return readers[kind]


def _tsv(path: Path, columns: Columns) -> Iterator[Part]:
    number = 1
    for lines in line_blocks(path):
        rows = [line.split("\t") for line in lines]
        for i, row in enumerate(rows, number):
            if len(row) != 2:
                raise UserError(
                    f"{path}, line {i}: {len(row)} columns; each line is a source, one tab and its translation"
                )
        yield [row[0] for row in rows], [row[1] for row in rows]
        number += len(rows)


def _json(path: Path, columns: Columns) -> Iterator[Part]:
    for entries in json_blocks(path):
        pairs = [_from_json(*entry, columns) for entry in entries]
        yield [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _from_json(where: str, line: str, row: Any, columns: Columns) -> tuple[str, str]:
    inside = row if isinstance(row, dict) and columns[0] in row else row.get(INSIDE) if isinstance(row, dict) else None
    if not isinstance(inside, dict) or any(name not in inside for name in columns):
        raise UserError(f"{where}: {_lacks(columns)}")
    values = tuple("" if inside[name] is None else inside[name] for name in columns)
    for name, value in zip(columns, values, strict=True):
        if not isinstance(value, str):
            raise UserError(f"{where}: {name} is {value!r:.60}, no text")
        if "\\" in line and any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
            raise UserError(f"{where}: {name} holds half a surrogate pair, which is no Unicode text")
    return values  # type: ignore[return-value]


def _lacks(columns: Columns) -> str:
    names = f'has no "{columns[0]}" and "{columns[1]}"'
    return f'{names}, alone or inside "{INSIDE}"; languages = "en-de" names others'


def _folder(path: Path, columns: Columns) -> Iterator[Part]:
    for file in files_of(path):
        yield from _tables(_arrow, file, columns)


def _parquet(path: Path, columns: Columns, pyarrow: Any) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(path) as file:
        top = INSIDE if INSIDE in file.schema_arrow.names and columns[0] not in file.schema_arrow.names else None
        names = [top] if top else [name for name in columns if name in file.schema_arrow.names]
        yield from file.iter_batches(ROWS, columns=names)


def _arrow(path: Path, columns: Columns, pyarrow: Any) -> Iterator[Any]:
    # Not memory-mapped, since pages of a mapped file count as this process's memory.
    with pyarrow.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if not is_file:
            yield from pyarrow.ipc.open_stream(file)
            return
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _tables(batches: Callable[[Path, Columns, Any], Iterator[Any]], path: Path, columns: Columns) -> Iterator[Part]:
    """Yield (sources, targets) of a Parquet or Arrow file; `batches` reads its record batches with pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", f"{path}: a Parquet or Arrow file") from None
    open_regular(path, hint="give a file of pairs").close()  # rejects pipes, for which pyarrow would wait forever
    row = 1
    try:
        for batch in batches(path, columns, pyarrow):
            source, target = (_column(batch, name, columns, path, pyarrow) for name in columns)
            yield source, target
            row += len(source)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}, from row {row} on: damaged ({error_line(error)}); restore it from a copy") from error


def _column(batch: Any, name: str, columns: Columns, path: Path, pyarrow: Any) -> list[str]:
    try:
        if columns[0] in batch.schema.names:
            values = batch.column(name)
        else:
            struct = batch.column(INSIDE)
            values = struct.flatten()[[field.name for field in struct.type].index(name)]
    except (KeyError, ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: {_lacks(columns)}; its columns are {', '.join(batch.schema.names)}") from None
    kind = values.type.value_type if pyarrow.types.is_dictionary(values.type) else values.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or str(kind) == "string_view"):
        raise UserError(f"{path}: its column {name} holds {values.type}, no text")
    return [value or "" for value in values.to_pylist()]
