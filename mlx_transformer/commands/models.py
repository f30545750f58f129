"""A model in whatever form it is kept: a checkpoint, run by MLX, or an ONNX folder or file, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_transformer.system.errors import UserError

if TYPE_CHECKING:
    from export import OnnxTransformer, SearchModel
    from mlx_transformer import Transformer
    from mlx_transformer.generation.verbs import TextVerbs


def open_model(
    path: str | Path,
    *,
    backend: Literal["mlx", "onnx"] | None = None,
    threads: int | None = None,
    precision: str | None = None,
    verify: bool = True,
) -> Transformer | OnnxTransformer | SearchModel:
    """Open a checkpoint folder (or a run's folder), an ONNX folder, or one file with the search; all have the verbs of
    `generation.verbs.TextVerbs`.

    backend: the runtime that it must be for. threads, precision: of an ONNX model, as `OnnxTransformer` has them.
    verify: compare the files with the digests in their manifest. `UserError` for anything else, and for damage.
    """
    path = Path(path)
    if path.is_file():
        return _search_model(path, backend, threads, precision, verify)
    if is_onnx(path, backend, threads, precision):
        from export import OnnxTransformer

        return OnnxTransformer(path, threads=threads, precision=precision, verify=verify)
    return _checkpoint(path, verify)


def open_folder(path: Path, **options: Any) -> TextVerbs:
    """Open a folder of any architecture; `UserError` for a file, whose search has no steps."""
    if path.is_file():
        raise UserError(f"{path}: is a file; give a checkpoint folder or an ONNX folder")
    return open_model(path, **options)


def is_onnx(model: Path, backend: str | None, threads: int | None = None, precision: str | None = None) -> bool:
    """Return which runtime a folder is for; `UserError` if the options ask for the other."""
    from mlx_transformer.core.folders import is_onnx_folder

    onnx = is_onnx_folder(model)
    if backend == "onnx" and not onnx:
        raise UserError(f"{model}: not an ONNX folder; write one with: mlx-transformer export {model} OUT")
    if backend == "mlx" and onnx:
        raise UserError(f"{model}: an ONNX folder runs with --backend onnx; MLX needs the checkpoint folder")
    if not onnx:
        for name, value in (("threads", threads), ("precision", precision)):
            if value is not None:
                raise UserError(f"{model}: is a checkpoint; --{name} is for ONNX folders")
    return onnx


def _checkpoint(model: Path, verify: bool) -> Transformer:
    try:
        from mlx_transformer.runtime.transformer import load
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        build = f"python -m export build {model} OUT"
        raise UserError(f"{model}: a checkpoint needs MLX, which is not installed; export it: {build}") from None
    return load(model, verify)[0]


def _search_model(
    file: Path, backend: str | None, threads: int | None, precision: str | None, verify: bool
) -> SearchModel:
    from export import SearchModel
    from export.search.interface import check_file

    check_file(file, precision)
    if backend == "mlx":
        raise UserError(f"{file}: runs with --backend onnx; MLX needs the checkpoint folder")
    return SearchModel(file, threads=threads, verify=verify)
