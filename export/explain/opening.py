"""The models that are explained: a folder with the runtime that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from export.validate.engines import Engine, open_engine
from export.validate.engines.mlx_engine import has_gpu
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import is_onnx_folder
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.tokenizer_files import tokenizer_path
from mlx_transformer.generation.translate import USES, fitting_tokenizer
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import verify_files

RUNTIMES = ("mlx", "onnxruntime", "reference")
FOR_FOLDERS = ("onnxruntime",)


@dataclass(frozen=True)
class Opened:
    """A model that can be looked into."""

    folder: Path
    runtime: str
    engine: Any
    """An `export.validate.engines.Engine` that shows points and searches."""
    config: TransformerConfig
    tokenizer: Tokenizer

    @property
    def label(self) -> str:
        """For people: what runs it, and in which precision if not in float32."""
        engine: Engine = self.engine
        details = engine.details()
        names = {"mlx": "MLX", "onnxruntime": "ONNX Runtime", "reference": "NumPy reference"}
        runtime = self.runtime.partition(":")[0]
        where = details.get("provider", "").removesuffix("ExecutionProvider") or str(engine.device).upper()
        parts = [names[runtime]] if runtime == "reference" else [names[runtime], where]
        computed = details.get("computed in", engine.precision)
        return ", ".join([*parts, *([computed] if computed != "float32" else [])])


def open_model(folder: Path, runtime: str | None = None, threads: int | None = None, verify: bool = True) -> Opened:
    """A checkpoint, run by MLX (without it by the NumPy reference), or an ONNX folder, run by ONNX Runtime.

    runtime: another one, by its name in `validate --runtimes`. verify: compare files with their manifest's digests.
    `UserError` for what is neither, has no tokenizer, or doesn't go with the runtime.
    """
    if folder.is_file():
        raise UserError(f"{folder}: is a file, which shows nothing from within; give a checkpoint or an ONNX folder")
    onnx = is_onnx_folder(folder)
    chosen = runtime or ("onnxruntime" if onnx else _best())
    name = chosen.partition(":")[0]
    if name not in RUNTIMES:
        raise UserError(f"runtime {chosen!r}: choose from {', '.join(RUNTIMES)}, with options as validate has them")
    if (name in FOR_FOLDERS) != onnx:
        kind = "an ONNX folder" if onnx else "a checkpoint"
        needs = "a checkpoint folder" if onnx else "an ONNX folder (mlx-transformer export writes one)"
        raise UserError(f"{folder}: is {kind}; runtime {chosen} needs {needs}")
    if onnx:
        for place in (folder, folder / "onnx"):
            if verify and place.is_dir():
                verify_files(place)
        engine, path = open_engine(chosen, None, folder, threads), tokenizer_path(folder)
    else:
        if threads is not None:
            raise UserError(f"{folder}: is a checkpoint; --threads is for ONNX folders")
        checkpoint = open_checkpoint(folder, verify)
        engine, path = open_engine(chosen, checkpoint, None), checkpoint.tokenizer_path
    config: TransformerConfig = engine.config  # type: ignore[attr-defined]
    tokenizer = None if path is None else Tokenizer.load(path)
    architecture = config.architecture
    tokenizer = fitting_tokenizer(config, tokenizer, str(folder), architecture, USES[architecture])
    return Opened(folder, chosen, engine, config, tokenizer)


def open_other(text: str, first: Opened, threads: int | None = None, verify: bool = True) -> Opened:
    """What is shown beside the first model: another folder, or the same one run by a runtime of this name."""
    is_runtime = text.partition(":")[0] in RUNTIMES and not Path(text).exists()
    if is_runtime:
        onnx = first.runtime.partition(":")[0] in FOR_FOLDERS
        other = open_model(first.folder, text, threads if onnx else None, verify)
    else:
        onnx = Path(text).is_dir() and is_onnx_folder(text)
        other = open_model(Path(text), None, threads if onnx else None, verify)
    if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
        raise UserError(f"{text}: has another vocabulary than {first.folder}; compare models of the same tokens")
    for name in ("architecture", "encoder_layers", "decoder_layers", "heads", "d_model"):
        ours, theirs = getattr(first.config, name), getattr(other.config, name)
        if ours != theirs:
            raise UserError(f"{text}: {name}={theirs!r}, {first.folder} has {ours!r}; maps of these can't be compared")
    return other


def _best() -> str:
    if find_spec("mlx") is None:
        return "reference"
    return "mlx:gpu" if has_gpu() else "mlx"
