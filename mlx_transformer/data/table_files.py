"""Pairs from files of columns: TSV, JSON lines, Parquet, and Arrow as Hugging Face's `datasets` writes it.

The columns are `source` and `target`, or two languages by name; those of JSON, Parquet and Arrow may also be inside a
field `translation`, as {"translation": {"en": ..., "de": ...}}. A null is a side without text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlx_transformer.system.errors import UserError, error_line
from mlx_transformer.system.files import open_regular, read_json

from .line_files import PACKED, json_blocks, line_blocks, missing, unpacked_suffix

Columns = tuple[str, str]
Part = tuple[list[str], list[str]]

INSIDE = "translation"
ROWS = 8192  # of a Parquet file at a time
KINDS = ".tsv, .jsonl (both also as .gz or .zst), .parquet, .arrow, or a folder as datasets' save_to_disk writes it"


def pair_parts(path: Path, columns: Columns) -> Iterator[Part]:
    """Read sources and targets, some at a time. `UserError`, naming the line or row, for what the file lacks."""
    return _reader(path)(path, columns)


def files_of(path: Path) -> list[Path]:
    """Return the files that hold the pairs: `path` itself, or those of a folder of `datasets`, in order."""
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
    # Read, not mapped: what is read of a mapped file counts as this process's memory.
    with pyarrow.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if not is_file:
            yield from pyarrow.ipc.open_stream(file)
            return
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _tables(batches: Callable[[Path, Columns, Any], Iterator[Any]], path: Path, columns: Columns) -> Iterator[Part]:
    """Read a file of tables, as `batches` reads it with pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", f"{path}: a Parquet or Arrow file") from None
    open_regular(path, hint="give a file of pairs").close()  # pyarrow would wait for a pipe
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
