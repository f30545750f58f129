"""Which engines there are: a runtime is asked for by name, with options after colons; `../rule.txt` lists them for
people.

One that cannot run here raises `Unavailable`: exit status 3. The engines' own modules are imported when one is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from export.interface import ENCODER_CPU
from export.runtime.folder import has_graph, has_row_per_token
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .protocol import Engine


def _of_checkpoint(runtime: str, options: Sequence[str], checkpoint: Checkpoint | None) -> Engine:
    source = _source(checkpoint, runtime)
    if runtime == "mlx":
        from .mlx_engine import MlxEngine

        return MlxEngine(source, *options)
    if runtime == "js":
        from .js_engine import JsEngine

        return JsEngine(source)
    from .reference_engine import ReferenceEngine

    return ReferenceEngine(source.config, dict(source.tensors()), *options)


def _of_folder(folder: Path, runtime: str) -> Any:
    """Return the engine class for the folder's graphs; those of target cpu have their own."""
    if has_graph(folder, ENCODER_CPU):
        from .cpu_engine import CpuEngine

        return CpuEngine
    if runtime == "onnxruntime" and has_row_per_token(folder):
        from .cpu_engine import CpuEncoderEngine

        return CpuEncoderEngine
    module, _, name = GRAPH_ENGINES[runtime].partition(":")
    return getattr(import_module(module, __package__), name)


def _source(checkpoint: Checkpoint | None, runtime: str) -> Checkpoint:
    if checkpoint is None:
        raise UserError(f"{runtime} needs a checkpoint, not an ONNX folder")
    return checkpoint


def _needed(onnx: Path | None, runtime: str) -> Path:
    if onnx is None:
        raise UserError(f"{runtime} needs the folder of an exported model")
    if runtime != "onnxruntime" and onnx.is_file():
        raise UserError(f"{onnx}: is one file; {runtime} needs the folder of an exported model")
    if runtime != "onnxruntime" and (has_graph(onnx, ENCODER_CPU) or has_row_per_token(onnx)):
        raise UserError(f"{onnx}: was exported for target cpu, whose operators only onnxruntime has, not {runtime}")
    return onnx


GRAPH_ENGINES = {
    "onnxruntime": ".onnxruntime_engine:OnnxRuntimeEngine",
    "evaluator": ".evaluator_engine:EvaluatorEngine",
    "wasm": ".wasm_engine:WasmEngine",
    "webgpu": ".webgpu_engine:WebGpuEngine",
}
"""Those that run a folder's graphs."""
ENGINES: dict[str, tuple[str, ...]] = {
    "mlx": ("device", "precision"),
    "onnxruntime": ("provider", "optimisation", "precision"),
    "evaluator": (),
    "wasm": (),
    "webgpu": ("adapter",),
    "js": (),
    "reference": ("precision",),
}
"""The words that may follow the name of each."""
DEFAULT = ("mlx", "onnxruntime")


def default_runtimes() -> tuple[str, ...]:
    """Return what is judged by default: the CPU's runtimes, and MLX's GPU where there is one."""
    from .mlx_engine import has_gpu

    return (*DEFAULT, "mlx:gpu") if has_gpu() else DEFAULT


def full_name(name: str) -> str:
    """Return the name of a runtime as `ENGINES` has it: other commands call ONNX Runtime onnx."""
    runtime, colon, options = name.partition(":")
    return f"onnxruntime{colon}{options}" if runtime == "onnx" else name


def open_engine(name: str, checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None = None) -> Engine:
    """Open the engine of a name such as "onnxruntime:cpu". `UserError` if it is unknown, `Unavailable` if it can't run.

    checkpoint: None where ONNX files are run and compared with no checkpoint.
    `threads`: of one operator in ONNX Runtime; default: the machine's cores. MLX and NumPy have no such setting.
    """
    name = full_name(name)
    runtime, *options = name.split(":")
    if runtime not in ENGINES:
        raise UserError(f"unknown runtime {name!r}: choose from {', '.join(ENGINES)}")
    known = ENGINES[runtime]
    if len(options) > len(known):
        raise UserError(f"runtime {name!r}: {runtime} takes only {':'.join((runtime, *known))}")
    if runtime not in GRAPH_ENGINES:
        engine = _of_checkpoint(runtime, options, checkpoint)
    elif (path := _needed(onnx, runtime)).is_file():
        from .search_engine import SearchEngine

        source = _source(checkpoint, "one file")
        if len(options) > 1:
            raise UserError(f"{path}: is one file: choose its provider alone, as in onnxruntime:cpu")
        engine = SearchEngine(source, path, *options, threads=threads)
    else:
        source = checkpoint if runtime == "onnxruntime" else _source(checkpoint, runtime)
        named = {} if runtime == "evaluator" else {"threads": threads}
        engine = _of_folder(path, runtime)(source, path, *options, **named)
    engine.name = name
    return engine
