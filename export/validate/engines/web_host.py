"""Processes that run ONNX Runtime Web for an engine: where the npm package is, what is sent to them, and Node as one.

A message in either direction: its header's length (uint32, little endian), the header (JSON), then the bytes of the
header's `tensors` one after another. Requests: {open, data: [{path, file}], level}, {session, outputs, tensors}.
wasm_host.js and browser_page.js answer them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.web.assets import PACKAGE, installed_package

from .protocol import Unavailable

Array = NDArray
Reply = tuple[dict[str, Any], list[Array]]

TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}
VARIABLE = "ONNXRUNTIME_WEB"
PLACES = ("node_modules", "tests/consumers/node/node_modules", ".consumers/node_modules")
HOST = Path(__file__).with_name("wasm_host.js")
NODE_BUILD = "ort.node.min.js"


def find_package(runtime: str, *files: str) -> Path:
    """Find the package's folder: in the one that the variable names (its own or one that holds node_modules), else in
    the `PLACES` of the current folder, else where the command `web` keeps it. One that lacks any of `files`, of its
    folder dist, doesn't count. `Unavailable` without it."""
    configured = os.environ.get(VARIABLE)
    places = [Path(configured), Path(configured, "node_modules")] if configured else [Path(place) for place in PLACES]
    folders = [folder for place in places for folder in (place, place / PACKAGE)]
    if not configured and (installed := installed_package()) is not None:
        folders.append(installed)
    for folder in folders:
        if all((folder / "dist" / name).is_file() for name in ("../package.json", *files)):
            return folder.resolve()
    where = f"{VARIABLE}={configured}" if configured else f"{', '.join(PLACES)}; {VARIABLE} is not set"
    raise Unavailable(f"runtime {runtime}: {PACKAGE} is not installed ({where}): npm install {PACKAGE}")


def message(header: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Iterator[bytes]:
    """Yield the parts of a message, one after another."""
    named = [(name, np.asarray(array, order="C")) for name, array in tensors]
    described = [{"name": name, "type": array.dtype.name, "dims": array.shape} for name, array in named]
    text = json.dumps({**header, "tensors": described}).encode()
    yield struct.pack("<I", len(text)) + text
    for _, array in named:
        yield array.tobytes()


def read_message(read: Callable[[int], bytes]) -> Reply:
    """Read a reply's header and its tensors; `RuntimeError` with ONNX Runtime's message where it is an error. `read`:
    so many bytes of it, and no fewer."""
    header = json.loads(read(*struct.unpack("<I", read(4))))
    if "error" in header:
        raise RuntimeError(header["error"])
    return header, [_tensor(entry, read) for entry in header.get("tensors", ())]


def _tensor(entry: Mapping[str, Any], read: Callable[[int], bytes]) -> Array:
    dtype, shape = np.dtype(TYPES[entry["type"]]), entry["dims"]
    return np.frombuffer(read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


class Host(Protocol):
    """A process that holds sessions of ONNX Runtime Web. Requests are described above."""

    def request(self, request: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Reply:
        """Send a request and return the reply's header and its tensors; `RuntimeError` with ONNX Runtime's message
        where there is an error."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class NodeHost:
    """Node. `Unavailable` without it, or without onnxruntime-web."""

    def __init__(self, threads: int):
        if shutil.which("node") is None:
            raise Unavailable("runtime wasm needs Node.js: there is no program `node` (https://nodejs.org)")
        package = find_package("wasm", NODE_BUILD)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would block it
        self.process = subprocess.Popen(
            ["node", str(HOST), str(package), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self._finalizer = weakref.finalize(self, _end, self.process, self.errors)
        self.versions, _ = read_message(self._read)

    def close(self) -> None:
        self._finalizer()

    def request(self, request: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Reply:
        pipe = _open(self.process.stdin)
        try:
            for part in message(request, tensors):
                pipe.write(part)
            pipe.flush()
        except BrokenPipeError:
            pass  # the reply that doesn't come says why
        return read_message(self._read)

    def _read(self, length: int) -> bytes:
        data = _open(self.process.stdout).read(length)
        if len(data) < length:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"Node ended: {lines[0] if lines else 'without a message'}")
        return data


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was written and never read
                pipe.close()
