"""Computes the matrices that a graph unpacks from integers, before a session opens the graph.

ONNX Runtime would do this itself, but keeps the result of every operation until the last is done: 23 bytes a number.
Here the same operations compute one matrix at a time, and the session gets the matrices in place of the nodes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.protobuf import Value, field, fields

GRAPH, NODE, INITIALIZER, OUTPUT, NAME = 7, 1, 5, 12, 8
"""Fields: ModelProto.graph, GraphProto.node, .initializer and .output, TensorProto.name."""
FLOAT, EXTERNAL = 1, 1
"""TensorProto.data_type of float32, TensorProto.data_location of a data file."""
UNPACKED = "unpacked"
"""Name of the data file that holds the computed matrices."""


def unpack(file: Path, shapes: Mapping[str, tuple[int, ...]], files: dict[str, mmap.mmap]) -> bytes | None:
    """The file's model without the nodes that compute matrices of these names and shapes; `files` gets the matrices.

    None if it computes none of them. `files`: data files in memory. Raises `UserError` if the file is damaged.
    """
    try:
        model = _Model(file, shapes)
        if not model.places:
            return None
        files[UNPACKED] = mmap.mmap(-1, model.size)
        model.compute(files[UNPACKED])
        return model.rest()
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise UserError(f"{file}: ONNX Runtime can't load it ({' '.join(str(error).split())[:300]})") from error


class _Model:
    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]]):
        model = [*fields(file.read_bytes())]
        self._folder, self._shapes, self.size = file.parent, shapes, 0
        self._around = b"".join(field(*part) for part in model if part[0] != GRAPH)
        self._graph = [part for number, value in model if number == GRAPH for part in fields(_bytes(value))]
        self._nodes = [(node, _texts(node, 1), _texts(node, 2)) for number, node in self._graph if number == NODE]
        self.places: dict[str, int] = {}  # where in memory each matrix begins
        for name in (name for *_, outputs in self._nodes for name in outputs if name in shapes):
            self.places[name] = self.size
            self.size += -(-4 * math.prod(shapes[name]) // mmap.PAGESIZE) * mmap.PAGESIZE

    def compute(self, memory: mmap.mmap) -> None:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._folder))
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena, options.log_severity_level = False, 4
        tensors = {_texts(tensor, NAME)[0]: tensor for number, tensor in self._graph if number == INITIALIZER}
        for name, place in self.places.items():
            needed = self._needed([name])
            parts = [(NODE, node) for node, _, outputs in self._nodes if not needed.isdisjoint(outputs)]
            parts += [(INITIALIZER, tensor) for each, tensor in tensors.items() if each in needed]
            kind = field(1, name.encode()) + field(2, field(1, field(1, FLOAT)))
            graph = b"".join(field(*part) for part in [*parts, (2, b"part"), (OUTPUT, kind)])
            session, shape = ort.InferenceSession(self._around + field(GRAPH, graph), options), self._shapes[name]
            matrix = np.asarray(session.run([name], {})[0], np.float32)
            np.frombuffer(memory, np.float32, matrix.size, place).reshape(shape)[:] = matrix

    def rest(self) -> bytes:
        """The model with the matrices as initializers of a data file."""
        computed = self._needed(self.places)
        nodes = {id(node) for node, inputs, outputs in self._nodes if inputs and not computed.isdisjoint(outputs)}
        parts = [part for part in self._graph if id(part[1]) not in nodes]
        for name, place in self.places.items():
            shape = self._shapes[name]
            told = {"location": UNPACKED, "offset": str(place), "length": str(4 * math.prod(shape))}
            told = b"".join(field(13, field(1, key.encode()) + field(2, text.encode())) for key, text in told.items())
            sizes = b"".join(field(1, size) for size in shape)
            tensor = sizes + field(2, FLOAT) + field(NAME, name.encode()) + told + field(14, EXTERNAL)
            parts.append((INITIALIZER, tensor))
        return self._around + field(GRAPH, b"".join(field(*part) for part in parts))

    def _needed(self, names: Collection[str]) -> set[str]:
        """These values, and all values from which they are computed."""
        needed = {*names}
        for _, inputs, outputs in reversed(self._nodes):
            if not needed.isdisjoint(outputs):
                needed.update(inputs)
        return needed


def _texts(message: Value, number: int) -> list[str]:
    return [_bytes(value).decode() for each, value in fields(_bytes(message)) if each == number]


def _bytes(value: Value) -> bytes:
    assert isinstance(value, bytes)
    return value
