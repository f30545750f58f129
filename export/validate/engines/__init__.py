"""Engines run a Transformer, e.g. in MLX or ONNX Runtime, all with the same methods (`protocol.py`).

    engine = open_engine("onnxruntime:cpu:none", checkpoint, Path("run/onnx"))

`ENGINES` is the table of runtimes; `../rule.txt` explains them to users. Engines for an ONNX folder's graphs share
`onnx_engine.py` and differ in how they open a graph. An engine's module is imported when the engine is opened. An
engine that can't run here raises `Unavailable` (exit status 3).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from export.interface import ENCODER_CPU, STEP_CPU
from export.runtime.folder import has_graph, has_row_per_token
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .protocol import Engine, Node, Placement, Unavailable

__all__ = ["ENGINES", "Engine", "Node", "Placement", "Unavailable", "default_runtimes", "full_name", "open_engine"]


class Row(NamedTuple):
    """A runtime: its engine as module:class, and the meaning of the words after its name, e.g. mlx:gpu:float16."""

    engine: str
    words: tuple[str, ...] = ()
    runs_graphs: bool = True
    """Whether it runs an ONNX folder's graphs. Otherwise it runs the checkpoint."""


ENGINES = {
    "mlx": Row("mlx_engine:MlxEngine", ("device", "precision"), runs_graphs=False),
    "onnxruntime": Row("onnxruntime_engine:OnnxRuntimeEngine", ("provider", "optimisation", "precision")),
    "evaluator": Row("graph_runtimes:EvaluatorEngine"),
    "wasm": Row("graph_runtimes:WasmEngine"),
    "webgpu": Row("graph_runtimes:WebGpuEngine", ("adapter",)),
    "js": Row("js_engine:JsEngine", runs_graphs=False),
    "reference": Row("reference_engine:of_checkpoint", ("precision",), runs_graphs=False),
}
# Engines for exports that only ONNX Runtime runs: a single file with the search, and graphs of target cpu.
ONE_FILE = "opaque_engines:SearchEngine"
CPU, CPU_ENCODER = "cpu_engine:CpuEngine", "cpu_engine:CpuEncoderEngine"
CPU_DECODER = "cpu_engine:CpuDecoderEngine"
DEFAULT = ("mlx", "onnxruntime")


def default_runtimes() -> tuple[str, ...]:
    """The default runtimes: MLX and ONNX Runtime on the CPU, and MLX on the GPU if the machine has one."""
    from .mlx_engine import has_gpu

    return (*DEFAULT, "mlx:gpu") if has_gpu() else DEFAULT


def full_name(name: str) -> str:
    """Return a runtime's name as in `ENGINES`, e.g. onnx:cpu -> onnxruntime:cpu (other commands say onnx)."""
    runtime, colon, words = name.partition(":")
    return f"onnxruntime{colon}{words}" if runtime == "onnx" else name


def open_engine(name: str, checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None = None) -> Engine:
    """Open an engine by its runtime's name, e.g. "onnxruntime:cpu".

    checkpoint: None runs an ONNX folder without a comparison. threads: per operator in ONNX Runtime, by default the
    machine's cores; no effect in MLX and NumPy.

    Raises UserError for an unknown runtime or the wrong kind of model, and Unavailable if the runtime can't run here.
    """
    name = full_name(name)
    runtime, *words = name.split(":")
    if (row := ENGINES.get(runtime)) is None:
        raise UserError(f"unknown runtime {name!r}: choose from {', '.join(ENGINES)}")
    if len(words) > len(row.words):
        raise UserError(f"runtime {name!r}: {runtime} takes only {':'.join((runtime, *row.words))}")
    if row.runs_graphs:
        path, place = _graphs_for(runtime, onnx)
        if place == ONE_FILE and len(words) > 1:
            raise UserError(f"{path}: is one file: give only its provider, e.g. onnxruntime:cpu")
        if checkpoint is None and (place == ONE_FILE or runtime != "onnxruntime"):
            raise UserError(f"{'one file' if place == ONE_FILE else runtime} needs a checkpoint, not an ONNX folder")
        engine = _loaded(place)(checkpoint, path, *words, threads=threads)
    elif checkpoint is None:
        raise UserError(f"{runtime} needs a checkpoint, not an ONNX folder")
    else:
        engine = _loaded(row.engine)(checkpoint, *words)
    engine.name = name
    return engine


def _graphs_for(runtime: str, onnx: Path | None) -> tuple[Path, str]:
    """Return (path, engine) for a runtime and an ONNX folder or file. The engine depends on the kind of export."""
    if onnx is None:
        raise UserError(f"{runtime} needs the folder of an exported model")
    if onnx.is_file():
        place = ONE_FILE
    else:
        own = {ENCODER_CPU: CPU, STEP_CPU: CPU_DECODER}
        place = next((engine for graph, engine in own.items() if has_graph(onnx, graph)), "")
        place = place or (CPU_ENCODER if has_row_per_token(onnx) else "")
    if place == ONE_FILE and runtime != "onnxruntime":
        raise UserError(f"{onnx}: is one file; {runtime} needs the folder of an exported model")
    if place and runtime != "onnxruntime":
        raise UserError(f"{onnx}: was exported for target cpu, whose operators only onnxruntime has, not {runtime}")
    return onnx, place or ENGINES[runtime].engine


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)
