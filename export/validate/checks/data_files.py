"""Data files: every byte of them is a tensor's of some graph, or the padding before one.

Numbers say nothing of bytes that nobody reads: what is left of another model, or a tensor that no graph has any more.
And a graph may read right values from a wrong place, where two tensors overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path

import onnx

from export.graph.protos import all_nodes, initializers
from export.package.weights import ALIGNMENT
from export.validate.engines.protocol import Engine
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_file, read_protobuf

LISTED = 8  # problems of one file


@dataclass(frozen=True)
class DataFile:
    """One data file, and what the graphs beside it read of it. `size`, `padding`: bytes. `tensors`: without repetition,
    however many graphs have them."""

    file: str
    size: int
    graphs: int
    tensors: int
    padding: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        read = f"{self.size:,} bytes, {self.tensors} tensors of {self.graphs} graphs, {self.padding} bytes of padding"
        return f"{self.file}: {read}"


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor's bytes lie: [start, end)."""

    start: int
    end: int
    dtype: str
    name: str
    graph: str

    def __str__(self) -> str:
        return f"{self.name} of {self.graph}"


def data_files(engines: Iterable[Engine]) -> Iterator[DataFile]:
    """Yield every data file of the folders, or beside the single files, that these engines run. All graphs there count,
    not only those that an engine runs: several share one data file. `UserError` for a graph that can't be read."""
    places = {}
    for engine in engines:
        for path in engine.capabilities.files.values():
            places[path.parent] = escape(path.name) if engine.capabilities.shows == "tokens" else "*.onnx"
    for folder, pattern in places.items():
        readers: dict[str, list[_Tensor]] = {path.name: [] for path in folder.glob(f"{pattern}_data")}
        for graph in sorted(folder.glob(pattern)):
            for file, tensor in _external(graph):
                readers.setdefault(file, []).append(tensor)
        for name, tensors in sorted(readers.items()):
            yield _checked(folder / name, tensors)


def _checked(path: Path, tensors: list[_Tensor]) -> DataFile:
    """Check one file. Different tensors may be the same bytes, whole and as the same type."""
    if not path.is_file():
        return DataFile(path.name, 0, len({t.graph for t in tensors}), len(tensors), 0, ("is missing",))
    size, end, padding = path.stat().st_size, 0, 0
    problems: list[str] = []
    places: dict[tuple[int, int], _Tensor] = {}
    last: _Tensor | None = None
    for tensor in sorted(tensors, key=lambda t: (t.start, -t.end)):
        same = places.setdefault((tensor.start, tensor.end), tensor)
        if same.dtype != tensor.dtype:
            problems.append(
                f"{same} reads the bytes from {same.start:,} on as {same.dtype}, {tensor} as {tensor.dtype}"
            )
        if same is not tensor:
            continue
        if tensor.end > size:
            problems.append(f"{tensor} ends at byte {tensor.end:,}, the file has {size:,}")
        if last is not None and tensor.start < end:
            problems.append(f"{tensor} overlaps {last}, which ends at byte {end:,}, by {end - tensor.start:,} bytes")
        elif tensor.start > end:
            if why := _unread(path, end, tensor.start):
                problems.append(why)
            else:
                padding += tensor.start - end
        if tensor.end > end:
            last, end = tensor, tensor.end
    if size > end:
        problems.append(_bytes(end, size))
    lines = problems[:LISTED] + [f"and {len(problems) - LISTED} more"] * (len(problems) > LISTED)
    return DataFile(path.name, size, len({t.graph for t in tensors}), len(places), padding, tuple(lines))


def _unread(path: Path, start: int, end: int) -> str:
    """Return what is wrong with bytes between two tensors; empty for the padding that aligns the second."""
    if end - start >= ALIGNMENT or end % ALIGNMENT:
        return _bytes(start, end)
    with open_file(path) as file:
        file.seek(start)
        if any(file.read(end - start)):
            return f"{_bytes(start, end)}, and aren't the zeros that would align the next"
    return ""


def _bytes(start: int, end: int) -> str:
    return f"bytes {start:,} to {end - 1:,} ({end - start:,}) are read by no tensor"


def _external(file: Path) -> Iterator[tuple[str, _Tensor]]:
    """Yield (data file, tensor) of all tensors of a graph, and of the graphs within it, that lie in a data file."""
    data = read_protobuf(file)
    try:
        graph = onnx.load_from_string(data).graph
        attributes = (attribute for node in all_nodes(graph) for attribute in node.attribute)
        for tensor in chain(initializers(graph), (each.t for each in attributes if each.HasField("t"))):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                start, length = int(entries.get("offset", 0)), int(entries["length"])
                if min(start, length) < 0:
                    raise ValueError(f"{tensor.name} begins at {start} and has {length} bytes")
                dtype = onnx.TensorProto.DataType.Name(tensor.data_type)
                yield entries["location"], _Tensor(start, start + length, dtype, tensor.name, file.name)
    except Exception as error:  # protobuf's exceptions have no common base
        raise UserError(f"{file}: its tensors' places can't be read ({error!r}); export the model again") from error
