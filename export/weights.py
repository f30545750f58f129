"""External data: parameters go from the checkpoint to `NAME.onnx_data` one by one; memory holds one tensor at a time.

The graphs of a decoder share one file. Offsets are aligned to 64 bytes, a cache line, for runtimes that map the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mlx_transformer.spec.checkpoint import Checkpoint
from mlx_transformer.spec.errors import UserError

from .primitives import extent

ALIGNMENT = 64
CONSTANT = 64
"""Bytes. The builder's own constants (shapes, scalars) are smaller; their names mean something else in each graph."""


def fill(models: Iterable[ir.Model], checkpoint: Checkpoint, data: Path, threshold: int) -> bool:
    """Give every initializer of these graphs its value; False if none was large enough for a file.

    Tensors of more than `threshold` bytes are appended to the file `data`, once however many graphs use them; the
    graphs, to be saved beside it, refer to it. Smaller ones stay in the graph. Raises `UserError` for a parameter that
    isn't float32 and finite, or a full disk (as `OSError`).
    """
    users: dict[str, list[ir.Value]] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if _bytes(value) > max(threshold, CONSTANT):
                users.setdefault(str(name), []).append(value)
            elif value.const_value is None:
                value.const_value = ir.tensor(_parameter(checkpoint, str(name)), name=name)
    if not users:
        return False
    with data.open("wb") as file:
        for name, values in users.items():
            made = values[0].const_value
            array = _parameter(checkpoint, name) if made is None else made.numpy()
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            place = file.tell(), array.nbytes, ir.DataType.from_numpy(array.dtype)
            for value in values:
                value.const_value = ir.ExternalTensor(
                    data.name, *place, shape=ir.Shape(array.shape), name=name, base_dir=data.parent
                )
            file.write(np.ascontiguousarray(array).data)
    return True


def _parameter(checkpoint: Checkpoint, name: str) -> np.ndarray:
    array = checkpoint.tensor(name)
    if array.dtype != np.float32:
        raise UserError(
            f"{checkpoint.folder}: {name} is {array.dtype}; export writes float32: save it in that precision"
        )
    return array


def _bytes(value: ir.Value) -> int:
    """Size of an initializer, filled or not (parameters are float32)."""
    if value.const_value is not None:
        return value.const_value.nbytes
    return 4 * math.prod(extent(value, axis) for axis in range(len(value.shape or [])))
