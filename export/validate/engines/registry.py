"""Which engines there are: a runtime is asked for by name, with options after colons; `../rule.txt` lists them for
people.

One that cannot run here raises `Unavailable`: exit status 3. The engines' own modules are imported when one is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from export.interface import DECODER_COREML, ENCODER_COREML, ENCODER_CPU
from export.runtime.folder import has_graph
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.system.errors import UserError

from .protocol import Engine


def _mlx(options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None) -> Engine:
    from .mlx_engine import MlxEngine

    return MlxEngine(_source(checkpoint, "mlx"), *options)


def _onnxruntime(
    options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None
) -> Engine:
    from .cpu_engine import CpuEngine
    from .onnxruntime_engine import OnnxRuntimeEngine

    folder = _needed(onnx, "onnxruntime")
    if folder.is_file():
        return _one_file(folder, _source(checkpoint, "one file"), options, threads)
    engine_class = CpuEngine if has_graph(folder, ENCODER_CPU) else _of_shape(folder, OnnxRuntimeEngine)
    return engine_class(checkpoint, folder, *options, threads=threads)


def _one_file(path: Path, checkpoint: Checkpoint, options: Sequence[str], threads: int | None) -> Engine:
    from .search_engine import SearchEngine

    if len(options) > 1:
        raise UserError(f"{path}: is one file: choose its provider alone, as in onnxruntime:cpu")
    return SearchEngine(checkpoint, path, *options, threads=threads)


def _reference(options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None) -> Engine:
    from .reference_engine import ReferenceEngine

    source = _source(checkpoint, "reference")
    return ReferenceEngine(source.config, dict(source.tensors()), *options)


def _evaluator(options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None) -> Engine:
    from .evaluator_engine import EvaluatorEngine

    folder = _needed(onnx, "evaluator")
    return _of_shape(folder, EvaluatorEngine)(_source(checkpoint, "evaluator"), folder)


def _wasm(options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None) -> Engine:
    from .wasm_engine import WasmEngine

    folder = _needed(onnx, "wasm")
    return _of_shape(folder, WasmEngine)(_source(checkpoint, "wasm"), folder, threads)


def _webgpu(options: Sequence[str], checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None) -> Engine:
    from .webgpu_engine import WebGpuEngine

    folder = _needed(onnx, "webgpu")
    return _of_shape(folder, WebGpuEngine)(_source(checkpoint, "webgpu"), folder, *options, threads=threads)


def _of_shape(folder: Path, base: Any) -> Any:
    """Return the engine class for the folder's graphs, which may be of fixed shape."""
    from .coreml_engine import fixed

    return fixed(base) if has_graph(folder, ENCODER_COREML) or has_graph(folder, DECODER_COREML) else base


def _source(checkpoint: Checkpoint | None, runtime: str) -> Checkpoint:
    if checkpoint is None:
        raise UserError(f"{runtime} needs a checkpoint, not an ONNX folder")
    return checkpoint


def _needed(onnx: Path | None, runtime: str) -> Path:
    if onnx is None:
        raise UserError(f"{runtime} needs the folder of an exported model")
    if runtime != "onnxruntime" and onnx.is_file():
        raise UserError(f"{onnx}: is one file; {runtime} needs the folder of an exported model")
    if runtime != "onnxruntime" and has_graph(onnx, ENCODER_CPU):
        raise UserError(f"{onnx}: was exported for target cpu, whose operators only onnxruntime has, not {runtime}")
    return onnx


# How an engine is opened, and what may follow its name.
ENGINES: dict[str, tuple[Callable[..., Engine], tuple[str, ...]]] = {
    "mlx": (_mlx, ("device", "precision")),
    "onnxruntime": (_onnxruntime, ("provider", "optimisation", "precision")),
    "evaluator": (_evaluator, ()),
    "wasm": (_wasm, ()),
    "webgpu": (_webgpu, ("adapter",)),
    "reference": (_reference, ("precision",)),
}
DEFAULT = ("mlx", "onnxruntime")


def default_runtimes() -> tuple[str, ...]:
    """Return what is judged by default: the CPU's runtimes, and MLX's GPU where there is one."""
    from .mlx_engine import has_gpu

    return (*DEFAULT, "mlx:gpu") if has_gpu() else DEFAULT


def open_engine(name: str, checkpoint: Checkpoint | None, onnx: Path | None, threads: int | None = None) -> Engine:
    """Open the engine of a name such as "onnxruntime:cpu". `UserError` if it is unknown, `Unavailable` if it can't run.

    checkpoint: None where ONNX files are run and compared with no checkpoint.
    `threads`: of one operator in ONNX Runtime; default: the machine's cores. MLX and NumPy have no such setting.
    """
    runtime, *options = name.split(":")
    if runtime not in ENGINES:
        raise UserError(f"unknown runtime {name!r}: choose from {', '.join(ENGINES)}")
    make, known = ENGINES[runtime]
    if len(options) > len(known):
        raise UserError(f"runtime {name!r}: {runtime} takes only {':'.join((runtime, *known))}")
    engine = make(options, checkpoint, onnx, threads)
    engine.name = name
    return engine
