"""Read parameters from ONNX files' initializers, and compute the values they must have from the checkpoint's.

The initializers of a quantised parameter have its name and a suffix for the kind of quantisation, e.g. NAME.int8 and
NAME.int8_scale. The float32 matrix (O, D) read from a file must equal the matrix computed from the checkpoint, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import array_of, constant_part, initializers
from export.precision.int8 import BY_ROW, IN_STEPS, WHOLE
from export.precision.packed import GAIN, REST, TOLERANCE, A, B, branch, delta_of, from_bytes, merged, nearest_zeros
from export.precision.rounding import BLOCK, block_rows, from_block_rows, from_int8_rows, int8_matrix, int8_rows
from export.precision.row_length import without_zeros
from export.targets.session import Session
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import Int8Scales
from mlx_transformer.core.parameters import is_unbounded, parameter_shapes
from mlx_transformer.core.quantization import Packed
from mlx_transformer.system.tensors import Stored, some_rows

from .protocol import Engine, Node

RoundTrip = Callable[[NDArray], NDArray]
"""A parameter -> the parameter after quantising and dequantising."""


def restored(
    tensors: Mapping[str, NDArray | Stored], names: Mapping[str, tuple[int, ...]], scales: Int8Scales = BY_ROW
) -> Iterator[tuple[str, Stored, RoundTrip]]:
    """Yield (parameter, its matrix, dequantised on first use, its round trip) for a file's quantised parameters.

    A parameter for both a product and a lookup comes twice, as each has its own scales. `tensors`: the file's
    initializers. `names`: parameters with their shapes. `scales`: int8's fixed scales.
    """
    for tensor, q in tensors.items():
        name, _, kind = tensor.rpartition(".")
        if name not in names or kind not in KINDS:
            continue
        for suffix in SCALES[kind]:
            if (scale := tensors.get(f"{name}.{suffix}")) is not None:
                (read, round_trip), scale = KINDS[kind], np.asarray(scale)
                if kind in ROWS:
                    steps = np.float32(suffix.removeprefix(IN_STEPS) if suffix.startswith(IN_STEPS) else 1)
                    scale, round_trip = scale * steps, _int8_in(steps, scales.of(name).weight)
                yield name, _later(names[name], partial(_read, read, q, scale, names[name])), round_trip


def _read(read: Callable[..., NDArray], q: NDArray | Stored, *others: Any) -> NDArray:
    return read(np.asarray(q), *others)


def _later(shape: tuple[int, ...], read: Callable[[], NDArray]) -> Stored:
    return Stored(shape, np.dtype(np.float32), read)


def _int8_in(steps: np.float32, multiplier: np.float32 | None = None) -> RoundTrip:
    def round_trip(w: NDArray) -> NDArray:
        try:
            q, scale = int8_rows(w) if multiplier is None else int8_matrix(w, multiplier)
        except ValueError:  # the multiplier doesn't fit these weights: no value in a file is right
            return w
        return from_int8_rows(q, scale / steps * steps)

    return round_trip


def _blocks(bits: int) -> RoundTrip:
    return lambda w: from_block_rows(*block_rows(w, bits, BLOCK), bits, w.shape[1])


def _from_packed(bits: int) -> Callable[[NDArray, NDArray, tuple[int, ...]], NDArray]:
    def read(q: NDArray, scale: NDArray, shape: tuple[int, ...]) -> NDArray:
        values = q if bits == 8 else np.stack([q & 15, q >> 4], axis=-1).astype(np.uint8)
        return from_block_rows(values.reshape(shape[0], -1, BLOCK), scale, bits, shape[1])

    return read


def _from_blocks(q: NDArray, scale: NDArray, shape: tuple[int, ...]) -> NDArray:
    groups = np.repeat(scale, BLOCK, axis=0)[: shape[1]]
    return np.ascontiguousarray((q.astype(np.float32) * groups).T)


KINDS: dict[str, tuple[Callable[[NDArray, NDArray, tuple[int, ...]], NDArray], RoundTrip]] = {
    "int8": (lambda q, scale, _: from_int8_rows(q.T, scale.reshape(-1)), _int8_in(np.float32(1))),
    "int8_rows": (lambda q, scale, _: from_int8_rows(q, scale.reshape(-1)), _int8_in(np.float32(1))),
    "uint4": (_from_packed(4), _blocks(4)),
    "uint8": (_from_packed(8), _blocks(8)),
    "uint8_rows": (_from_packed(8), _blocks(8)),
    "int4_blocks": (_from_blocks, _blocks(4)),
    "int8_blocks": (_from_blocks, _blocks(8)),
}
ROWS = ("int8", "int8_rows")
SCALES = {
    **{kind: (f"{kind}_scale",) for kind in KINDS},
    # A product's scales are divided by its activations' steps; fixed scales and a lookup's scales are not.
    **dict.fromkeys(ROWS, (f"{IN_STEPS}127", f"{IN_STEPS}255", WHOLE, "scales")),
    "uint8_rows": ("uint8_scale",),
}


def matrices(
    tensors: Mapping[str, NDArray | Stored], names: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, Stored]]:
    """Yield (parameter, "blocks" or "rows", its matrix (O, D) with the adapter merged) for precision packed. Matrices
    are computed on first use.

    `tensors`: a file's initializers. `names`: parameters with their shapes.
    """
    for tensor in tensors:
        name, _, kind = tensor.rpartition(".")
        if name in names and kind in ("blocks", "rows"):
            yield name, kind, _later(names[name], partial(_merged, tensors, name, kind, names[name]))


def _merged(
    tensors: Mapping[str, NDArray | Stored], name: str, kind: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    (rows, width), data = shape, np.asarray(tensors[f"{name}.{kind}"])
    bits, scales = data.size * 8 // (rows * width), np.asarray(tensors[f"{name}.scales"])
    zeros = from_bytes(np.asarray(tensors[f"{name}.zeros"]).reshape(rows, -1), bits)[:, : scales.shape[1]]
    rest = tensors.get(f"{name}.{REST}")
    q, rest = from_bytes(data.reshape(rows, -1), bits), None if rest is None else np.asarray(rest).T
    adapter = {part: np.asarray(tensors[part]) for k in (A, B, GAIN) if (part := f"{name}.{k}") in tensors}
    return merged(name, _matrix(q, scales, zeros, rest), adapter)


def round_trip_of(checkpoint: Checkpoint, name: str) -> RoundTrip:
    """Return a round trip to the matrix of a quantised parameter's operators, its adapter included."""
    packed, delta = checkpoint.packed(name), delta_of(checkpoint, name)
    if delta is None:
        return partial(matrix_of, packed)
    dense = packed.dequantised()
    parts = zip((A, B, GAIN), branch(delta, dense), strict=False)
    stored = {f"{name}.{kind}": array for kind, array in parts}
    return lambda _: merged(name, matrix_of(packed, dense), stored)


def merged_in_float64(checkpoint: Checkpoint, name: str, stored: NDArray | Stored) -> RoundTrip:
    """Return a round trip to the parameter that a graph computes from integers and an adapter in float64.

    A number in `stored` may be rounded to the other neighbouring float32 if float64's own error can cause this, e.g. by
    another order of the sum.
    """
    delta, weight = delta_of(checkpoint, name), checkpoint.packed(name).dequantised()
    assert delta is not None
    size = np.abs(weight) + delta.factor * (np.abs(delta.b).astype(np.float64) @ np.abs(delta.a))
    gain = delta.gain(weight)
    error = size * (1 if gain is None else np.abs(gain)[:, None]) * (len(delta.a) + 8) * 2.0**-53
    exact = delta.of(weight)
    low, high = ((exact + sign * error).astype(np.float32) for sign in (-1, 1))

    def round_trip(dense: NDArray) -> NDArray:
        got = np.asarray(stored)
        same = got.shape == dense.shape and got.dtype == dense.dtype
        return np.where((low <= got) & (got <= high), got, dense) if same else dense

    return round_trip


def matrix_of(packed: Packed, dense: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scale * (q - zero) + rest, the operators' matrix, if only rounding tells it from `dense`; else `dense`."""
    zero = nearest_zeros(packed)
    if zero is None or packed.biases is None:
        return dense
    matrix = _matrix(packed.integers(), packed.scales, *zero)
    largest = 2 * TOLERANCE * (np.abs(packed.biases) + np.abs(packed.scales) * 2**packed.scheme.bits)
    near = (
        np.abs(matrix[rows] - dense[rows]) <= np.repeat(largest[rows], packed.scheme.group_size, axis=1)
        for rows in some_rows(dense.shape)
    )
    return matrix if all(map(np.all, near)) else dense


def _matrix(
    q: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8],
    rest: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    group, matrix = q.shape[1] // scales.shape[1], np.empty(q.shape, np.float32)
    for rows in some_rows(q.shape):
        difference = q[rows].astype(np.float32) - np.repeat(zeros[rows], group, axis=1).astype(np.float32)
        np.multiply(difference, np.repeat(scales[rows], group, axis=1), out=matrix[rows])
        if rest is not None:
            matrix[rows] += np.repeat(rest[rows], group, axis=1)
    return matrix


def computed(graph: onnx.GraphProto, config: TransformerConfig) -> list[str]:
    """The parameters that nodes of a graph compute from its initializers."""
    table = parameter_shapes(config)
    return [output for node in graph.node for output in node.output if output in table]


def unread(tensor: onnx.TensorProto, folder: Path) -> Stored:
    """Return an initializer as an array that reads its numbers on first use."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return Stored(tuple(tensor.dims), dtype, lambda: array_of(tensor, folder))


class OnnxFiles(Engine):
    """An engine with its parameters in ONNX files.

    Subclasses define `open(path)`, and `open(path, model)` for a changed model with the data files beside `path`.
    """

    checkpoint: Checkpoint | None
    int8_scales: Int8Scales = BY_ROW
    """The files' fixed scales, and the layers left in float32."""
    _round_trips: dict[tuple[str, str], RoundTrip]

    @property
    def files(self) -> Mapping[str, Path]:
        """{graph: file}"""
        return self.capabilities.files

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> Session:
        raise NotImplementedError

    @property
    def float32_layers(self) -> list[str]:
        return self.int8_scales.float32

    def file_nodes(self) -> tuple[Node, ...]:
        """Return the files' nodes, all on the engine's device, for runtimes that don't report where nodes ran."""
        graphs = {name: onnx.load(path, load_external_data=False).graph for name, path in self.files.items()}
        return tuple(Node(name, n.name, n.op_type, self.device) for name, graph in graphs.items() for n in graph.node)

    def parameters(self) -> Iterator[tuple[str, str, NDArray | Stored]]:
        """Yield the parameters in every file: initializers, or values computed from initializers in the graph.

        Tables of positions and constants for shapes aren't parameters.
        """
        table = parameter_shapes(self.config)
        for path in self.files.values():
            model = onnx.load(path, load_external_data=False)
            tensors: dict[str, Any] = {
                tensor.name: unread(tensor, path.parent)
                for tensor in initializers(model.graph)
                if tensor.name in table or tensor.name.rpartition(".")[0] in table
            }
            tensors = without_zeros(tensors, table)
            for name, stored in ((name, tensors[name]) for name in table.keys() & tensors.keys()):
                if self.precision == "float16" and stored.dtype == np.float32 and is_unbounded(name, self.config):
                    self._round_trips[path.name, name] = lambda array: array  # float16 would overflow
                yield path.name, name, stored.astype(np.float32) if stored.dtype.name == "bfloat16" else stored
            for name, array, round_trip in restored(tensors, table, self.int8_scales):
                where = path.name if (path.name, name) not in self._round_trips else f"{path.name}, table"
                self._round_trips[where, name] = round_trip
                yield where, name, array
            for name, kind, array in matrices(tensors, table):
                where = path.name if kind == "blocks" else f"{path.name}, table"
                if self.checkpoint is not None:
                    self._round_trips[where, name] = round_trip_of(self.checkpoint, name)
                yield where, name, array
            for name, array in self.computed(path, model):
                if self.checkpoint is not None and name in self.checkpoint.adapted_integers:
                    self._round_trips[path.name, name] = merged_in_float64(self.checkpoint, name, array)
                yield path.name, name, array

    def computed(self, path: Path, model: onnx.ModelProto) -> Iterator[tuple[str, NDArray | Stored]]:
        """Yield the parameters that a file's nodes compute from its initializers."""
        for name in computed(model.graph, self.config):
            read = partial(self._run_part, path, model, name)
            yield name, _later(parameter_shapes(self.config)[name], read)

    def _run_part(self, path: Path, model: onnx.ModelProto, name: str) -> NDArray:
        return self.open(path, constant_part(model, name)).run([name], {})[0]

    def as_stored(self, where: str, name: str, array: NDArray) -> NDArray:
        """Convert a parameter of the checkpoint to the values a file must hold."""
        round_trip = self._round_trips.get((where, name))
        return super().as_stored(where, name, array) if round_trip is None else round_trip(array)
