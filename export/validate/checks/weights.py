"""Check parameters bit for bit in every runtime and file, and every byte of data files.

A quantised parameter in a file must be the checkpoint's parameter quantised in the same way.

Every byte of a data file must belong to a tensor of some graph, or to the padding before a tensor. Comparing values
can't find unused bytes, e.g. remains of another model. Nor can it find overlapping tensors that happen to have the
right values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import all_nodes, initializers
from export.package.weights import ALIGNMENT
from export.validate.engines.protocol import Engine
from export.validate.findings import Weights
from export.validate.reference import Parameters
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_file, read_protobuf
from mlx_transformer.system.tensors import PART, Stored

Array = NDArray


def check_weights(engine: Engine, stored: Parameters) -> Iterator[Weights]:
    """Check the parameters in each of an engine's files, or in its memory. Parameters are read one at a time."""
    places: dict[str, dict[str, Array | Stored]] = {}
    for where, name, array in engine.parameters():
        places.setdefault(where, {})[name] = array
    for where, arrays in places.items():
        problems: dict[str, str] = {}
        sha256 = hashlib.sha256()  # of names, types, shapes and values, in the order of the names
        for name in sorted(arrays):
            array = np.asarray(arrays[name])
            expected = engine.as_stored(where, name, np.asarray(stored[name])) if name in stored else None
            problems[name] = difference(name, expected, array)
            sha256.update(f"{name} {array.dtype.str} {array.shape}".encode())
            sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array, expected  # before the next are read
        differing = tuple(problems[name] for name in arrays if problems[name])
        yield Weights(engine.name, where, len(arrays), differing, sha256.hexdigest())
    unused = engine.unused_parameters()
    missing = [name for name in stored if name not in unused and not any(name in arrays for arrays in places.values())]
    if missing:
        yield Weights(engine.name, "all of it", 0, tuple(f"{name} is nowhere" for name in missing))


def difference(name: str, expected: Array | None, got: Array) -> str:
    """Describe how two arrays differ bit for bit; "" if they don't."""
    if expected is None:
        return f"{name} is no parameter of the checkpoint"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name} is {got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}"
    flat, right = (
        np.ascontiguousarray(part).reshape(-1).view(f"u{expected.dtype.itemsize}") for part in (got, expected)
    )
    parts = range(0, got.size, PART)
    differing = [i + np.flatnonzero(flat[i : i + PART] != right[i : i + PART]) for i in parts]
    if not (count := sum(map(len, differing))):
        return ""
    place = tuple(int(i) for i in np.unravel_index(np.concatenate(differing)[0], got.shape))
    values = f"{got[place]:.9g}, expected {expected[place]:.9g}"
    return f"{name}: {count} of {got.size} values differ in their bits, first {list(place)}: {values}"


def reference_weights(engine: Engine, stored: Parameters) -> Parameters:
    """Return the parameters for the reference that judges an engine, usually the checkpoint's own.

    With float32 activations and quantised weights an engine computes another network: the quantised weights' values.
    """
    if engine.activations != "float32":
        return stored
    places = {name: where for where, name, _ in engine.parameters() if name in stored}

    def later(name: str, where: str) -> Stored:
        read = lambda: engine.as_stored(where, name, np.asarray(stored[name]))  # noqa: E731
        return Stored(np.shape(stored[name]), np.dtype(np.float32), read)

    return {**stored, **{name: later(name, where) for name, where in places.items()}}


LISTED = 8  # most problems to report for a file


@dataclass(frozen=True)
class DataFile:
    """A data file and its readers. `size`, `padding`: bytes. `tensors`: shared tensors are counted once."""

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
    """A tensor's place in a data file: bytes [start, end)."""

    start: int
    end: int
    dtype: str
    name: str
    graph: str

    def __str__(self) -> str:
        return f"{self.name} of {self.graph}"


def data_files(engines: Iterable[Engine]) -> Iterator[DataFile]:
    """Check every data file in these engines' folders, or beside their single files.

    All graphs in a folder count, also graphs that no engine runs, as graphs share data files. Raises UserError if a
    graph can't be read.
    """
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
    """Check a data file. Tensors may share bytes only if they have the same start, end and type."""
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
    """Describe the bytes between two tensors; "" if they are zeros that align the second tensor."""
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
    """Yield (data file, tensor) for all external tensors of a graph and its inner graphs."""
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
