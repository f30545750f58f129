"""Move weights from a checkpoint into a data file beside the graphs, with a single tensor in memory at a time.

An initializer is a parameter, an array computed from parameters (`products.LateWeight`), or a constant of the
graph builder. Offsets are aligned to 64 bytes, a cache line, for runtimes that map the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import SEEK_CUR
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from export.nn.marks import extent
from export.precision.products import LATE, LateWeight
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import PART

ALIGNMENT = 64
CONSTANT = 64
"""Bytes. The builder's own constants (shapes, scalars) are smaller. They stay in the graph, since the same name can
have another value in another graph."""


def fill(models: Iterable[ir.Model], checkpoint: Checkpoint, data: Path, threshold: int) -> bool:
    """Give every initializer of these graphs its value; False if all fitted into the graphs.

    Tensors of more than `threshold` bytes go to the file `data`, each once, even if several graphs use it or use it in
    several shapes. The graphs refer to that file and have to be saved beside it. Raises UserError for a parameter not
    in float32 or not finite, and OSError for a full disk.
    """
    users: dict[str, list[ir.Value]] = {}
    large = max(threshold, CONSTANT)
    for model in models:
        for name, value in model.graph.initializers.items():
            is_text = value.dtype == ir.DataType.STRING  # a data file can't hold strings
            if value.const_value is None or (nbytes(value) > large and not is_text):
                users.setdefault(str(name), []).append(value)
    external = any(nbytes(values[0]) > large for values in users.values())
    made = _Made(checkpoint)
    places: dict[tuple[str, int], tuple[int, int]] = {}
    with data.open("wb") if external else nullcontext() as file:
        for values in _grouped(users).values():
            if file is None or nbytes(values[0]) <= large:
                contents = b"".join(part.tobytes() for part in made(values[0]))
                for value in values:
                    _check_size(value, len(contents))
                    value.const_value = _in_graph(value, contents)
                continue
            if (made_as := _made_as(values[0])) not in places:
                places[made_as] = _append(file, made(values[0]))
            for value in values:
                _check_size(value, places[made_as][1])
                value.const_value = _in_file(value, data, places[made_as])
    return external


def promise(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Give every initializer of a graph a lazy value, made again at each read."""
    made = _Made(checkpoint)

    def tensor(value: ir.Value) -> ir.TensorProtocol:
        contents = b"".join(part.tobytes() for part in made(value, promised=True))
        _check_size(value, len(contents))
        return _in_graph(value, contents)

    for value in model.graph.initializers.values():
        if value.const_value is None:
            assert value.dtype is not None
            dims = ir.Shape([extent(value, axis) for axis in range(len(value.shape or []))])
            value.const_value = ir.LazyTensor(partial(tensor, value), value.dtype, dims, name=value.name)


def is_parameter(value: ir.Value) -> bool:
    """Whether a promised initializer is a plain parameter of the checkpoint, not computed from parameters."""
    return isinstance(value.const_value, ir.LazyTensor) and LATE not in value.meta


class _Made:
    """Makes the arrays of initializers. A `LateWeight`'s arrays are made together and kept until the next is needed."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.key: str | None = None
        self.arrays: Sequence[NDArray] = []

    def __call__(self, value: ir.Value, promised: bool = False) -> Iterator[NDArray]:
        """Yield the parts of an initializer's array in order. promised: its value is lazy, see `promise`."""
        if value.const_value is not None and not promised:
            yield value.const_value.numpy()
        elif LATE not in value.meta:
            yield _parameter(self.checkpoint, str(value.name))
        else:
            late, index = value.meta[LATE]
            yield from self._parts(late) if late.elementwise else self._whole(late, index)

    def _parts(self, late: LateWeight) -> Iterator[NDArray]:
        self.key, self.arrays = None, []
        numbers = _parameter(self.checkpoint, *late.parameters).reshape(-1)
        for begin in range(0, len(numbers), PART):
            yield late.make(numbers[begin : begin + PART])[0]

    def _whole(self, late: LateWeight, index: int) -> Iterator[NDArray]:
        if late.key != self.key:
            self.arrays = []  # free them before making the next
            self.arrays = late.make(*(_parameter(self.checkpoint, p) for p in late.parameters))
            self.key = late.key
        yield self.arrays[index]


def _grouped(users: Mapping[str, list[ir.Value]]) -> dict[str, list[ir.Value]]:
    """Sort initializers so that all results of a `LateWeight` follow each other."""
    first: dict[str, int] = {}
    for i, values in enumerate(users.values()):
        first.setdefault(_made_as(values[0])[0], i)
    return dict(sorted(users.items(), key=lambda item: first[_made_as(item[1][0])[0]]))


def _made_as(value: ir.Value) -> tuple[str, int]:
    """A key that is equal for initializers with the same bytes, whatever their shapes."""
    if LATE not in value.meta:
        return str(value.name), 0
    late, index = value.meta[LATE]
    return late.key, index


def _check_size(value: ir.Value, made: int) -> None:
    if made != nbytes(value):
        raise ValueError(f"{value.name}: {made} bytes were made, {value.shape} is {nbytes(value)}")


def _append(file: BinaryIO, parts: Iterable[NDArray]) -> tuple[int, int]:
    """Append an array at an aligned offset; return (offset, length) in bytes."""
    begin = file.seek(-file.tell() % ALIGNMENT, SEEK_CUR)
    for part in parts:
        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)  # NumPy gives bfloat16 no buffer
    return begin, file.tell() - begin


def _in_file(value: ir.Value, data: Path, place: tuple[int, int]) -> ir.ExternalTensor:
    assert value.dtype is not None
    assert value.shape is not None
    return ir.ExternalTensor(
        data.name, *place, value.dtype, shape=value.shape, name=str(value.name), base_dir=data.parent
    )


def _in_graph(value: ir.Value, contents: bytes) -> ir.TensorProtocol:
    assert value.dtype is not None
    dims = [extent(value, axis) for axis in range(len(value.shape or []))]
    proto = onnx.TensorProto(data_type=value.dtype, dims=dims, raw_data=contents, name=value.name)
    return ir.from_proto(proto)


def _parameter(checkpoint: Checkpoint, name: str) -> NDArray:
    array = checkpoint.tensor(name)
    if array.dtype != np.float32:
        raise UserError(
            f"{checkpoint.folder}: {name} is {array.dtype}; export writes float32: save it in that precision"
        )
    return array


def nbytes(value: ir.Value) -> int:
    """Size of an initializer in bytes, with or without a value."""
    if value.const_value is not None:
        return value.const_value.nbytes
    assert value.dtype is not None
    return math.ceil(value.dtype.itemsize * math.prod(extent(value, axis) for axis in range(len(value.shape or []))))
