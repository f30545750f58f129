"""ONNX Runtime's browser build (wasm) as an engine, run by Node: the exported files as transformers.js runs them.

Needs Node.js and the npm package onnxruntime-web (web_host.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from export.graph.protos import data_files_of
from export.precision.table import ACTIVATIONS
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .evaluator_engine import DescribedSession
from .onnx_engine import OnnxEngine
from .protocol import Placement
from .web_host import Host, NodeHost

Array = NDArray


class WasmSession(DescribedSession):
    """One graph in the other process, with the methods of an ONNX Runtime session."""

    def __init__(self, host: Host, model: onnx.ModelProto, file: Path, folder: Path, activations: str | None = None):
        """`file`: the model; `folder`: where its data files lie; `activations`: see `session_options`."""
        super().__init__(model)
        self.host = host
        data = [{"path": name, "file": str((folder / name).resolve())} for name in sorted(set(data_files_of(model)))]
        level = None if activations is None else str(ACTIVATIONS[activations])
        self.opened = host.request({"open": str(file.resolve()), "data": data, "level": level})[0]

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
        """Start what runs the sessions."""
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
        """Say where it ran. The build has one provider. Nodes are those of the files; it doesn't tell what its
        optimiser made of them."""
        return Placement(self.name, self.device, "none", str(self.threads), self.details(), self.file_nodes())
