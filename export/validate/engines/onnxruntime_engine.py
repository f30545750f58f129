"""ONNX Runtime as an engine: it runs the exported files unchanged on an execution provider.

ONNX Runtime's own profile of the first runs says where each node ran, as a node may fall back to another provider.

x86 CPUs without VNNI multiply unsigned by signed bytes and add two neighbouring products into 16 bits, too few for
2 x 255 x 127. With weights that use all 8 bits the results are then another network's. `integer_kernel` finds out which
kernel this machine has.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export.graph.protos import all_nodes, initializers, inner_graphs, outputs_as_float32
from export.precision.table import PRECISIONS
from export.runtime.sessions import SLOW_FUSIONS, chosen, find_plugin, missing, open_session, session_options
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import Stored

from .onnx_engine import OnnxEngine
from .protocol import Node, Placement, Unavailable

EXACT, SATURATING = "exact", "saturating (sums of two products in 16 bits)"


@cache
def integer_kernel(rows: int = 16, width: int = 64) -> str:
    """Find out ONNX Runtime's integer kernel on this CPU, EXACT or SATURATING, by multiplying the largest bytes."""
    dims = {"x": ["rows", width], "w": [width, width], "y": ["rows", width]}
    kinds = {"x": TensorProto.UINT8, "w": TensorProto.INT8, "y": TensorProto.INT32}
    x, _, y = (helper.make_tensor_value_info(name, kinds[name], dims[name]) for name in dims)
    w = helper.make_tensor("w", TensorProto.INT8, dims["w"], np.full(width * width, 127, np.int8))
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "kernel", [x], [y], [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sums = [session.run(None, {"x": np.full((n, width), 255, np.uint8)})[0] for n in (1, rows)]
    return EXACT if all(np.all(each == 255 * 127 * width) for each in sums) else SATURATING


def multiplies_within(file: Path) -> bool:
    """Return whether a graph multiplies integers in a branch or a loop.

    There the exact kernel isn't used on CPUs with saturating sums (`session_options` in `export/runtime/sessions.py`).
    """
    graph = onnx.load(file, load_external_data=False).graph
    inner = (node for outer in graph.node for part in inner_graphs(outer) for node in all_nodes(part))
    return any(node.op_type.startswith("MatMulInteger") for node in inner)


Array = NDArray

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "mlx": "MLXExecutionProvider",
}
LEVELS = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# Profiled runs of a session if its graph has an If: enough to take both branches. Other graphs need a single run.
RUNS_OF_BRANCHES = 8


OPEN_AT_ONCE = 128 << 20
"""Most bytes of weights in open sessions."""


class Entry(NamedTuple):
    """An input or output of a session, which outlives it."""

    name: str
    type: str
    shape: list[Any]


class TurnSession:
    """A session that is closed before others open if its weights are many, and opened again to run.

    A session has its own copy of the weights, often transposed. The first runs are profiled, for the provider of each
    node.
    """

    _open: ClassVar[WeakKeyDictionary[TurnSession, Any]] = WeakKeyDictionary()
    """The open sessions; the last is the one that ran last."""

    def __init__(self, make: Callable[[bool], Any], size: int, profiled: int = 0):
        """make: opens the session, profiling or not. size: bytes of its weights. profiled: how many runs to record."""
        self.make, self.size, self.profiled, self.runs = make, size, profiled, 0
        self.nodes: dict[tuple[str, str, str], None] = {}
        """(name, operator, provider) of the runs recorded so far."""
        session = self.session()
        self.inputs, self.outputs = (
            [Entry(entry.name, entry.type, list(entry.shape)) for entry in entries]
            for entries in (session.get_inputs(), session.get_outputs())
        )

    def session(self) -> Any:
        """The session, open."""
        if (session := self._open.pop(self, None)) is None:
            while sum(each.size for each in self._open) + self.size > OPEN_AT_ONCE and self._open:
                next(iter(self._open)).close()
            self.profiling = self.runs < self.profiled
            session = self.make(self.profiling)
        self._open[self] = session
        return session

    def get_inputs(self) -> list[Entry]:
        return self.inputs

    def get_outputs(self) -> list[Entry]:
        return self.outputs

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array], *options: Any) -> list[Any]:
        outputs = self.session().run(output_names, input_feed, *options)
        self._ran()
        return outputs

    def io_binding(self) -> Any:
        session = self.session()
        binding = session.io_binding()
        binding.session = session  # as long as it is bound, it stays open
        return binding

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        binding.session.run_with_iobinding(binding, options)
        self._ran()

    def _ran(self) -> None:
        self.runs += 1
        if self.runs == self.profiled:
            self._record()

    def _record(self) -> None:
        """End a profile, and read it."""
        if not self.profiling:
            return
        self.profiling = False
        path = Path(self._open[self].end_profiling())
        ran = [event for event in json.loads(path.read_text() or "[]") if event.get("cat") == "Node"]
        path.unlink()
        suffix = "_kernel_time"
        events = [(event["name"], event["args"]) for event in ran if event["name"].endswith(suffix)]
        self.nodes |= {(name.removesuffix(suffix), args["op_name"], args["provider"]): None for name, args in events}

    def close(self) -> None:
        """Close the session if it is open."""
        if self in self._open:
            self._record()
            del self._open[self]


def provider_of(device: str) -> str:
    """Return a device's execution provider, e.g. cuda -> CUDAExecutionProvider; a provider's full name is kept.

    Raises Unavailable if ONNX Runtime doesn't have this provider here.
    """
    provider = PROVIDERS.get(device, device)
    find_plugin(provider)
    if provider not in (available := ort.get_available_providers()):
        there = ", ".join(available)
        raise Unavailable(f"onnxruntime:{device}: {provider} is not available (there are: {there}{missing(provider)})")
    return provider


def open_changed(model: onnx.ModelProto, path: Path, options: ort.SessionOptions, providers: Sequence[Any]) -> Any:
    """Open a changed model instead of the file `path`, with the data files beside `path`, optimised like files."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    named = chosen(options, providers)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=named, disabled_optimizers=[*SLOW_FUSIONS]
    )


def threads_in_words(threads: int | None) -> str:
    return "one for each core" if threads is None else str(threads)


class OnnxRuntimeEngine(OnnxEngine):
    """ONNX Runtime with an ONNX folder's graphs.

    device: an execution provider, e.g. "cuda" (`PROVIDERS`, or a full name). optimisation: "all", "extended", "basic"
    or "none". precision: of the folder, by default float32 or its only precision; on CUDA also "tf32". CUDA's TF32 is
    off otherwise; providers keep their other defaults.
    """

    name = "onnxruntime"

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        onnx_folder: Path,
        device: str = "cpu",
        optimisation: str = "all",
        precision: str | None = None,
        threads: int | None = None,
    ):
        if optimisation not in LEVELS:
            raise UserError(f"optimisation {optimisation!r} is not one of {', '.join(LEVELS)}")
        if precision not in (None, "tf32", *PRECISIONS) or (precision == "tf32" and device != "cuda"):
            raise UserError(
                f"onnxruntime:{device}: precision {precision!r} is not one of {', '.join(PRECISIONS)} or, on cuda, tf32"
            )
        self.device, self.optimisation, self.threads = device, optimisation, threads
        self.tf32 = precision == "tf32"
        self.provider = provider_of(device)
        self._profiles = Path(tempfile.mkdtemp(prefix="validate-"))
        weakref.finalize(self, shutil.rmtree, self._profiles, ignore_errors=True)
        super().__init__(checkpoint, onnx_folder, "float32" if self.tf32 else precision)
        if self.tf32:
            self.precision = "tf32"

    @property
    def sums_in_16_bits(self) -> bool:
        if self.device != "cpu" or not self.int8_scales.may_overflow or integer_kernel() == EXACT:
            return False
        # `session_options` asks the optimiser for the exact kernel; lower levels and inner graphs can't have it.
        return self.optimisation in ("none", "basic") or any(map(multiplies_within, self.folder.graphs.values()))

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> TurnSession:
        tf32 = {"use_tf32": int(self.tf32)}
        providers = [(self.provider, tf32) if self.device == "cuda" else self.provider]
        graph = (onnx.load(path, load_external_data=False) if model is None else model).graph
        lengths = (int(e.value) for t in initializers(graph) for e in t.external_data if e.key == "length")
        size, branches = sum(lengths), any(node.op_type == "If" for node in graph.node)

        def opened(profiling: bool) -> Any:
            options = session_options(self.threads, 0, self.activations, self.int8_scales.may_overflow)
            options.graph_optimization_level = LEVELS[self.optimisation]
            if model is None:
                options.enable_profiling = profiling
                self._profiles.mkdir(exist_ok=True)
                options.profile_file_prefix = str(self._profiles / path.stem)
                session = open_session(path, providers, options)
            else:
                session = open_changed(model, path, options, providers)
                narrow = [output.name for output in session.get_outputs() if output.type == "tensor(bfloat16)"]
                if narrow:  # NumPy has no bfloat16
                    session = open_changed(outputs_as_float32(model, narrow), path, options, providers)
            # ONNX Runtime only warns if it can't load a provider's libraries.
            if self.provider not in session.get_providers():
                raise Unavailable(f"onnxruntime:{self.device}: {self.provider} can't be used: its libraries don't load")
            return session

        return TurnSession(opened, size, 0 if model is not None else RUNS_OF_BRANCHES if branches else 1)

    def parameters(self) -> Iterator[tuple[str, str, Array | Stored]]:
        for session in self.sessions.values():
            if isinstance(session, TurnSession) and session.size > OPEN_AT_ONCE:
                session.close()
        yield from super().parameters()

    def details(self) -> dict[str, str]:
        return {
            "onnxruntime": ort.__version__,
            "provider": self.provider,
            "graph optimisation": self.optimisation,
            "threads": str(self.threads or "default"),
        }

    def placement(self) -> Placement:
        """See `Engine`. Raises Unavailable if no node ran on the requested provider."""
        nodes = tuple(self._nodes())
        with suppress(OSError):
            self._profiles.rmdir()
        if nodes and not any(node.provider == self.provider for node in nodes):
            others = ", ".join(sorted({node.provider for node in nodes}))
            raise Unavailable(f"{self.name}: no node ran on {self.provider}: all {len(nodes)} on {others}")
        tf32 = ("on" if self.tf32 else "off") + " (use_tf32)" if self.device == "cuda" else "none"
        libraries = {name: version for name, version in versions().items() if name.startswith("onnxruntime")}
        return Placement(self.name, self.provider, tf32, threads_in_words(self.threads), libraries, nodes)

    def _nodes(self) -> Iterator[Node]:
        for graph, session in self.sessions.items():
            assert isinstance(session, TurnSession)
            session.close()
            for name, operator, provider in session.nodes:
                yield Node(graph, name, operator, provider)
