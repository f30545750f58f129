"""ONNX Runtime's browser build (wasm) as an engine, run by Node: the exported files as transformers.js runs them.

Needs Node.js and the npm package onnxruntime-web (web_package.py).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import onnx
from numpy.typing import NDArray

from export.precision.table import ACTIVATIONS
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .evaluator_engine import graph_entries
from .onnx_engine import OnnxEngine
from .protocol import Node, Placement, Unavailable
from .web_messages import Reply, message, read_message
from .web_package import find_package

Array = NDArray

HOST = Path(__file__).with_name("wasm_host.js")
NODE_BUILD = "ort.node.min.js"


class Host(Protocol):
    """A process that holds sessions of ONNX Runtime Web. Requests are described in web_messages.py."""

    def request(self, request: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Reply:
        """The reply's header and its tensors; `RuntimeError` with ONNX Runtime's message where there is an error."""
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


class WasmSession:
    """One graph in the other process, with the methods of an ONNX Runtime session."""

    def __init__(self, host: Host, model: onnx.ModelProto, file: Path, folder: Path, activations: str | None = None):
        """`file`: the model; `folder`: where its data files lie; `activations`: see `session_options`."""
        self.host, self.inputs, self.outputs = host, *graph_entries(model)
        data = [{"path": name, "file": str((folder / name).resolve())} for name in sorted(set(_data_files(model)))]
        level = None if activations is None else str(ACTIVATIONS[activations])
        self.opened = host.request({"open": str(file.resolve()), "data": data, "level": level})[0]

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def get_outputs(self) -> list[Any]:
        return self.outputs

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array]) -> list[Any]:
        outputs = list(output_names or [entry.name for entry in self.outputs])
        return self.host.request({"session": self.opened["session"], "outputs": outputs}, input_feed.items())[1]


class WasmEngine(OnnxEngine):
    name = "wasm"
    device = "wasm"

    def __init__(self, checkpoint: Checkpoint, onnx_folder: Path, threads: int | None = None):
        self.threads = threads or 1
        self.host = self.start()
        super().__init__(checkpoint, onnx_folder)

    def start(self) -> Any:
        """What runs the sessions."""
        return NodeHost(self.threads)

    def close(self) -> None:
        self.host.close()

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> WasmSession:
        try:
            if model is None:
                graph = onnx.load(path, load_external_data=False)
                return WasmSession(self.host, graph, path, path.parent, self.activations)
            with tempfile.TemporaryDirectory(prefix="validate-") as folder:
                file = Path(folder) / path.name
                file.write_bytes(model.SerializeToString())
                return WasmSession(self.host, model, file, path.parent, self.activations)
        except RuntimeError as error:
            raise UserError(f"{path}: ONNX Runtime Web can't load it ({' '.join(str(error).split())[:300]})") from error

    def details(self) -> dict[str, str]:
        return {"onnxruntime-web": self.host.versions["version"], "node": self.host.versions["node"]}

    def placement(self) -> Placement:
        """The build has one provider. Nodes are those of the files; it doesn't tell what its optimiser made of them."""
        graphs = {name: onnx.load(path, load_external_data=False).graph for name, path in self.files.items()}
        nodes = tuple(Node(name, n.name, n.op_type, self.device) for name, graph in graphs.items() for n in graph.node)
        return Placement(self.name, self.device, "none", str(self.threads), self.details(), nodes)


def _data_files(model: onnx.ModelProto) -> Iterator[str]:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield entry.value


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
