"""ONNX Runtime as an engine: it runs the exported files unchanged on an execution provider.

ONNX Runtime's own profile of the first runs says where each node ran, as a node may fall back to another provider.

x86 CPUs without VNNI multiply unsigned by signed bytes and add two neighbouring products into 16 bits, too few for
2 x 255 x 127. With weights that use all 8 bits, the results are then wrong. `integer_kernel` finds out this machine's
kernel.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export.graph.protos import (
    all_nodes,
    array_of,
    constant_part,
    edges_of,
    initializers,
    inner_graphs,
    outputs_as_float32,
    outside,
    reached,
    with_values,
)
from export.package.weights import ALIGNMENT
from export.precision.table import PRECISIONS
from export.runtime.sessions import (
    FOLDING,
    SLOW_FUSIONS,
    TRANSPOSING,
    chosen,
    find_plugin,
    missing,
    open_session,
    session_options,
)
from export.validate.cases import Case
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import Stored

from .onnx_engine import OnnxEngine, graph_logits
from .protocol import Node, Placement, Unavailable, is_large
from .stored import computed, unread

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
    """The open sessions, in the order of their last runs."""

    def __init__(self, make: Callable[[bool], Any], size: int, profiled: int = 0):
        """make: opens the session, profiling or not. size: bytes of its weights. profiled: how many runs to record."""
        self.make, self.size, self.profiled, self.runs = make, size, profiled, 0
        self.nodes: dict[tuple[str, str, str], None] = {}
        """(name, operator, provider) of the runs recorded so far."""
        if not is_large(size):
            self.session()

    @cached_property
    def _entries(self) -> tuple[list[Entry], list[Entry]]:
        session = self.session()
        inputs, outputs = (
            [Entry(entry.name, entry.type, list(entry.shape)) for entry in entries]
            for entries in (session.get_inputs(), session.get_outputs())
        )
        return inputs, outputs

    def session(self) -> Any:
        """The session, open."""
        if (session := self._open.pop(self, None)) is None:
            while self._open and is_large(sum(each.size for each in self._open) + self.size):
                next(iter(self._open)).close()
            self.profiling = self.runs < self.profiled
            session = self.make(self.profiling)
        self._open[self] = session
        return session

    @classmethod
    def close_large(cls) -> None:
        for session in [each for each in cls._open if is_large(each.size)]:
            session.close()

    def get_inputs(self) -> list[Entry]:
        return self._entries[0]

    def get_outputs(self) -> list[Entry]:
        return self._entries[1]

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
        if not path.is_file():  # of an earlier comparison, whose folder is gone
            return
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


def open_changed(
    model: onnx.ModelProto,
    path: Path,
    options: ort.SessionOptions,
    providers: Sequence[Any],
    without: Sequence[str] = (),
) -> Any:
    """Open a changed model instead of the file `path`, with the data files beside `path`, optimised like files.

    without: more passes of the optimiser to leave out.
    """
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    named = chosen(options, providers)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=named, disabled_optimizers=[*SLOW_FUSIONS, *without]
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
        self._scratch = Path(tempfile.mkdtemp(prefix="validate-"))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self._places: dict[Path, dict[str, onnx.TensorProto]] = {}
        self._untouched: dict[str, TurnSession] = {}
        super().__init__(checkpoint, onnx_folder, "float32" if self.tf32 else precision)
        if self.tf32:
            self.precision = "tf32"

    @property
    def sums_in_16_bits(self) -> bool:
        if self.device != "cpu" or not self.int8_scales.may_overflow or integer_kernel() == EXACT:
            return False
        # `session_options` asks the optimiser for the exact kernel; lower levels and inner graphs can't have it.
        return self.optimisation in ("none", "basic") or any(map(multiplies_within, self.folder.graphs.values()))

    def open(self, path: Path, model: onnx.ModelProto | None = None, folding: bool = True) -> TurnSession:
        """folding: False computes constants in each run. For large matrices that graphs compute from integers: if ONNX
        Runtime computes them when it opens a graph, the result of each operation stays in memory."""
        tf32 = {"use_tf32": int(self.tf32)}
        providers = [(self.provider, tf32) if self.device == "cuda" else self.provider]
        whole = onnx.load(path, load_external_data=False) if model is None else model
        data = path
        if folding and (values := self._values(path, whole)):
            model = with_values(whole, values)
            whole, data = model, self._scratch / path.name
        graph = whole.graph
        lengths = (int(e.value) for t in initializers(graph) for e in t.external_data if e.key == "length")
        size, branches = sum(lengths), any(node.op_type == "If" for node in graph.node)
        # As in use: a Transpose of a stored matrix belongs to the product, which packs the matrix.
        floats = data != path or self.folder.has_float32_matrices
        large = self.device == "cpu" and is_large(size) and floats and self._graph_of(path) in TRANSPOSING
        without = [] if folding and not large else FOLDING

        def opened(profiling: bool) -> Any:
            options = session_options(self.threads, 0, self.activations, self.int8_scales.may_overflow)
            options.graph_optimization_level = LEVELS[self.optimisation]
            options.enable_cpu_mem_arena = folding
            if model is None:
                options.enable_profiling = profiling
                options.profile_file_prefix = str(self._scratch / path.stem)
                session = open_session(path, providers, options, without)
            else:
                session = open_changed(model, data, options, providers, without)
                narrow = [output.name for output in session.get_outputs() if output.type == "tensor(bfloat16)"]
                if narrow:  # NumPy has no bfloat16
                    session = open_changed(outputs_as_float32(model, narrow), data, options, providers, without)
            # ONNX Runtime only warns if it can't load a provider's libraries.
            if self.provider not in session.get_providers():
                raise Unavailable(f"onnxruntime:{self.device}: {self.provider} can't be used: its libraries don't load")
            return session

        session = TurnSession(opened, size, 0 if model is not None else RUNS_OF_BRANCHES if branches else 1)
        if self.device != "cpu":
            session.session()  # an unavailable provider is found at once
        return session

    def _graph_of(self, path: Path) -> str:
        return next((name for name, file in self.files.items() if file == path), "")

    def _values(self, path: Path, model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
        """Compute the large matrices that a graph computes from constants, one at a time, and store them in a file:
        {name: its place there}."""
        names = computed(model.graph, self.config)
        if not is_large(4 * sum(math.prod(parameter_shapes(self.config)[name]) for name in names)):
            return {}
        if path not in self._places:
            self._places[path] = {}
            with (self._scratch / f"{path.stem}.values").open("wb") as out:
                for name, array in self._arrays(path, model, names):
                    out.write(bytes(-out.tell() % ALIGNMENT))
                    like = onnx.TensorProto(name=name, dims=array.shape)
                    like.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                    self._places[path][name] = outside(like, Path(out.name).name, out.tell(), array.nbytes)
                    out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return self._places[path]

    def _arrays(self, path: Path, model: onnx.ModelProto, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
        """Yield the computed parameters, and the data file's tensors that other nodes read."""
        for name in names:
            part = self.open(path, constant_part(model, name), folding=False)
            yield name, part.run([name], {})[0]
            part.close()
        behind = reached(names, edges_of(model.graph))
        read = {name for inputs, outputs in edges_of(model.graph) if not behind & {*outputs} for name in inputs}
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL and (tensor.name in read or tensor.name not in behind):
                yield tensor.name, array_of(tensor, path.parent)

    def computed(self, path: Path, model: onnx.ModelProto) -> Iterator[tuple[str, Array | Stored]]:
        values, names = self._values(path, model), computed(model.graph, self.config)
        yield from ((name, unread(values[name], self._scratch)) for name in names if values)
        if not values:
            yield from super().computed(path, model)

    def logits(self, case: Case) -> Array:
        """See `Engine`. Here a file that computes large matrices runs unchanged; in other runs it gets them
        computed."""
        if not self._places:
            return super().logits(case)
        for name in self.folder.graphs:
            if name not in self._untouched:
                self._untouched[name] = self.open(self.files[name], folding=False)
        return graph_logits(self._model(self._untouched), case, self._memory(case))

    def rest(self) -> None:
        TurnSession.close_large()

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

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
        if nodes and not any(node.provider == self.provider for node in nodes):
            others = ", ".join(sorted({node.provider for node in nodes}))
            raise Unavailable(f"{self.name}: no node ran on {self.provider}: all {len(nodes)} on {others}")
        tf32 = ("on" if self.tf32 else "off") + " (use_tf32)" if self.device == "cuda" else "none"
        libraries = {name: version for name, version in versions().items() if name.startswith("onnxruntime")}
        return Placement(self.name, self.provider, tf32, threads_in_words(self.threads), libraries, nodes)

    def _nodes(self) -> Iterator[Node]:
        for graph, session in (self.sessions | self._untouched).items():
            assert isinstance(session, TurnSession)
            session.close()
            for name, operator, provider in session.nodes:
                yield Node(graph, name, operator, provider)
