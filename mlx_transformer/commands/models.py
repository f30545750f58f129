"""What a command's MODEL is: a checkpoint, run by MLX, or an ONNX folder, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_transformer.system.errors import UserError

from .settings import RuntimeSettings

if TYPE_CHECKING:
    from mlx_transformer.core.config import TransformerConfig
    from mlx_transformer.core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Opened:
    """A model of either runtime."""

    config: TransformerConfig
    tokenizer: Tokenizer | None
    generate: Callable[..., Any]
    stream_ids: Callable[..., Any]
    logits: Callable[..., Any]


def is_onnx(model: Path, runtime: RuntimeSettings) -> bool:
    """Which runtime a folder is for; `UserError` if the options ask for the other."""
    from mlx_transformer.core.folders import is_onnx_folder

    onnx = is_onnx_folder(model)
    if runtime.runtime == "onnx" and not onnx:
        raise UserError(f"{model}: not an ONNX folder; write one with: mlx-transformer export {model} OUT")
    if runtime.runtime == "mlx" and onnx:
        raise UserError(f"{model}: an ONNX folder runs with --runtime onnx; MLX needs the checkpoint folder")
    if not onnx:
        for name, value in (("threads", runtime.threads), ("precision", runtime.precision)):
            if value is not None:
                raise UserError(f"{model}: is a checkpoint; --{name} is for ONNX folders")
    return onnx


def load_checkpoint(model: Path, runtime: RuntimeSettings) -> tuple[Any, Tokenizer | None]:
    """The network in MLX and its tokenizer."""
    try:
        from mlx_transformer.nn.loading import load
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        build = f"python -m export build {model} OUT"
        raise UserError(f"{model}: a checkpoint needs MLX, which is not installed; export it: {build}") from None
    return load(model, runtime.verify)


def open_translator(model: Path, runtime: RuntimeSettings) -> Any:
    """Something with `.translate(lines, **options)` for a checkpoint (MLX) or an ONNX folder (ONNX Runtime)."""
    if model.is_file():
        return _search_model(model, runtime)
    if is_onnx(model, runtime):
        from export import OnnxTransformer

        return OnnxTransformer(model, threads=runtime.threads, precision=runtime.precision, verify=runtime.verify)
    loaded = load_checkpoint(model, runtime)
    from mlx_transformer.runtime.decoding import MlxTranslator

    return MlxTranslator(*loaded, str(model))


def open_model(model: Path, runtime: RuntimeSettings) -> Opened:
    """A folder of any architecture."""
    if model.is_file():
        raise UserError(f"{model}: is a file; give a checkpoint folder or an ONNX folder")
    if is_onnx(model, runtime):
        from export import OnnxTransformer
        from mlx_transformer.core.tokenizer import Tokenizer

        opened = OnnxTransformer(model, threads=runtime.threads, precision=runtime.precision, verify=runtime.verify)
        path = opened.folder.tokenizer_path
        tokenizer = Tokenizer.load(path) if path else None
        return Opened(opened.config, tokenizer, opened.generate, opened.stream_ids, opened.logits)
    network, tokenizer = load_checkpoint(model, runtime)
    from mlx_transformer.runtime import decoding as with_mlx

    return Opened(
        network.config,
        tokenizer,
        partial(with_mlx.generate, network),
        partial(with_mlx.stream_ids, network),
        network,
    )


def _search_model(file: Path, runtime: RuntimeSettings) -> Any:
    from export import SearchModel
    from export.search.metadata import check_file

    check_file(file, runtime.precision)
    if runtime.runtime == "mlx":
        raise UserError(f"{file}: runs with --runtime onnx; MLX needs the checkpoint folder")
    return SearchModel(file, threads=runtime.threads, verify=runtime.verify)
