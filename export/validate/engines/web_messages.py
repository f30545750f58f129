"""Messages between an engine and the JavaScript that runs ONNX Runtime Web for it (wasm_host.js, browser_page.js).

A message in either direction: its header's length (uint32, little endian), the header (JSON), then the bytes of the
header's `tensors` one after another. Requests: {open, data: [{path, file}], level}, {session, outputs, tensors}.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray
Reply = tuple[dict[str, Any], list[Array]]

TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}


def message(header: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Iterator[bytes]:
    """The parts of a message, one after another."""
    named = [(name, np.asarray(array, order="C")) for name, array in tensors]
    described = [{"name": name, "type": array.dtype.name, "dims": array.shape} for name, array in named]
    text = json.dumps({**header, "tensors": described}).encode()
    yield struct.pack("<I", len(text)) + text
    for _, array in named:
        yield array.tobytes()


def read_message(read: Callable[[int], bytes]) -> Reply:
    """A reply's header and its tensors; `RuntimeError` with ONNX Runtime's message where it is an error. `read`: so
    many bytes of it, and no fewer."""
    header = json.loads(read(*struct.unpack("<I", read(4))))
    if "error" in header:
        raise RuntimeError(header["error"])
    return header, [_tensor(entry, read) for entry in header.get("tensors", ())]


def _tensor(entry: Mapping[str, Any], read: Callable[[int], bytes]) -> Array:
    dtype, shape = np.dtype(TYPES[entry["type"]]), entry["dims"]
    return np.frombuffer(read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
