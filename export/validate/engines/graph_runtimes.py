"""Engines that run the exported graphs without ONNX Runtime's native build.

    evaluator   onnx's ReferenceEvaluator: the operators' specification in Python and NumPy. It shares no kernel and no
                optimiser with ONNX Runtime. Slow: small models only
    wasm        ONNX Runtime Web in Node, as in transformers.js
    webgpu      ONNX Runtime Web's WebGPU provider in headless Chromium. Without a GPU, Chromium computes on the CPU
                with SwiftShader; the report names the adapter

wasm and webgpu need the npm package onnxruntime-web (web_host.py).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from export.graph.protos import data_files_of, initializers, load_data
from export.precision.table import ACTIVATIONS
from export.web.assets import WEBGPU, version_of
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError

from .onnx_engine import OnnxEngine
from .protocol import Node, Placement, Unavailable
from .web_host import Browser, Host, NodeHost, find_package

Array = NDArray

# Most parameters for the evaluator (2 million take 4 s on two cores).
MOST_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class Entry:
    """An input or output of a graph. shape: sizes, and names of dynamic axes."""

    name: str
    shape: list[int | str]


class DescribedSession:
    """A session with `get_inputs` and `get_outputs`, read from the model."""

    def __init__(self, model: onnx.ModelProto):
        self.inputs, self.outputs = (
            [Entry(v.name, [axis.dim_param or axis.dim_value for axis in v.type.tensor_type.shape.dim]) for v in values]
            for values in (model.graph.input, model.graph.output)
        )

    def get_inputs(self) -> list[Entry]:
        return self.inputs

    def get_outputs(self) -> list[Entry]:
        return self.outputs


class EvaluatorSession(DescribedSession):
    """A `ReferenceEvaluator` with the methods of an ONNX Runtime session."""

    def __init__(self, model: onnx.ModelProto):
        super().__init__(model)
        self.evaluator = ReferenceEvaluator(model)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array]) -> list[Any]:
        with np.errstate(all="ignore"):  # no warnings, as in other runtimes
            return list(self.evaluator.run(output_names, dict(input_feed)))  # type: ignore[arg-type]


class EvaluatorEngine(OnnxEngine):
    name = "evaluator"
    device = "cpu"

    def __init__(self, checkpoint: Checkpoint, onnx_folder: Path, threads: int | None = None):
        """threads: no effect, as NumPy computes. Raises UserError if the model is too large."""
        size = sum(int(np.prod(shape)) for shape in parameter_shapes(checkpoint.config).values())
        if size > MOST_PARAMETERS:
            raise UserError(
                f"evaluator: {size / 1e6:.1f} million parameters; onnx's ReferenceEvaluator is plain Python, "
                f"models above {MOST_PARAMETERS / 1e6:.0f} million take too long: leave it out"
            )
        super().__init__(checkpoint, onnx_folder)

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> EvaluatorSession:
        if model is None:
            model = onnx.load(path, load_external_data=False)
        for tensor in initializers(model.graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                load_data(tensor, path.parent)
        return EvaluatorSession(model)

    def details(self) -> dict[str, str]:
        return {"onnx": onnx.__version__, "device": "cpu"}

    def placement(self) -> Placement:
        return Placement(self.name, self.device, "none", "NumPy's", {"onnx": onnx.__version__}, self.file_nodes())


class WasmSession(DescribedSession):
    """A graph in the other process, with the methods of an ONNX Runtime session."""

    def __init__(self, host: Host, model: onnx.ModelProto, file: Path, folder: Path, activations: str | None = None):
        """file: the model. folder: with its data files. activations: see `session_options`."""
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
        """Start the program for the sessions."""
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
        """See `Engine`. Lists the files' nodes, as this build doesn't report nodes after its optimisation."""
        return Placement(self.name, self.device, "none", str(self.threads), self.details(), self.file_nodes())


PROVIDER = "WebGpuExecutionProvider"
ADAPTERS = ("software",)
PLACE = re.compile(r"(?:Node\(s\)|All nodes) placed on \[(\w+)\]")
NODE = re.compile(r"\] +(\w+) \((.*)\)")


class WebGpuEngine(WasmEngine):
    name = "webgpu"
    device = "webgpu"

    def __init__(self, checkpoint: Checkpoint, onnx_folder: Path, adapter: str = "", threads: int | None = None):
        """adapter: "software" computes on the CPU even if there is a GPU."""
        if adapter not in ("", *ADAPTERS):
            raise UserError(f"webgpu: adapter {adapter!r} is not one of {', '.join(ADAPTERS)}")
        self.requested = adapter
        super().__init__(checkpoint, onnx_folder, threads)

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> WasmSession:
        if self.precision == "float16" and not self.host.versions["adapter"]["float16"]:
            raise Unavailable(f"{self.name}: its adapter ({self.adapter}) doesn't compute in float16")
        return super().open(path, model)

    def start(self) -> Browser:
        return Browser(find_package("webgpu", *WEBGPU), self.threads, self.requested)

    @property
    def adapter(self) -> str:
        """The adapter's vendor and name, as reported by the browser."""
        adapter = self.host.versions["adapter"]
        names = [adapter[key] for key in ("vendor", "architecture", "device", "description") if adapter[key]]
        return " ".join(dict.fromkeys(names)) + (", on the processor" if adapter["software"] else "")

    def details(self) -> dict[str, str]:
        browser = re.search(r"Chrome/([\d.]+)", self.host.versions["browser"])
        return {
            "onnxruntime-web": version_of(self.host.exchange.package),
            "browser": f"Chromium {browser[1]}" if browser else self.host.versions["browser"],
            "adapter": self.adapter,
        }

    def placement(self) -> Placement:
        """See `Engine`. Read from ONNX Runtime's own log, for the untapped files."""
        sessions: dict[str, Any] = self.sessions
        nodes = tuple(node for name, session in sessions.items() for node in placed(name, session.opened["placed"]))
        if not any(node.provider == PROVIDER for node in nodes):
            raise Unavailable(f"{self.name}: no node ran on {PROVIDER}")
        return Placement(self.name, PROVIDER, "none", str(self.threads), self.details(), nodes)


def placed(graph: str, lines: Iterable[str]) -> Iterator[Node]:
    """Parse nodes and their providers in lines of ONNX Runtime's log."""
    provider = ""
    for line in lines:
        if match := PLACE.search(line):
            provider = match[1]
        elif match := NODE.search(line):
            yield Node(graph, match[2], match[1], provider)
