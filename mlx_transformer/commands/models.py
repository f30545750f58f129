"""Open a model in any form: a checkpoint, run by MLX, or an ONNX folder or file, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from mlx_transformer.core.folders import AN_ONNX_FOLDER, Place
from mlx_transformer.system.errors import CommandLine, Name, UserError
from mlx_transformer.system.files import check_name
from mlx_transformer.system.lazy import check_export, naming_extra, needs

if TYPE_CHECKING:
    from typing import Unpack

    from export import OnnxTransformer, SearchModel
    from export.arguments import ExportArguments, ServeArguments
    from export.search.vector_model import VectorModel
    from export.settings import PrecisionName
    from mlx_transformer import Transformer
    from mlx_transformer.generation.line_files import LineWork
    from mlx_transformer.generation.verbs import TextVerbs
    from mlx_transformer.report.result import Comparison
    from mlx_transformer.report.worker import Served
    from mlx_transformer.system.durable import Output
    from mlx_transformer.text.tokenizer import Tokenizer

    from .settings import LineFiles, RuntimeSettings


def open_model(
    path: str | Path,
    *,
    runtime: Literal["mlx", "onnx"] | None = None,
    threads: int | None = None,
    precision: PrecisionName | None = None,
    verify: bool = True,
    shortlist: str | Path | None = None,
    draft: str | Path | None = None,
    cache_bits: Literal[4, 8] | None = None,
) -> Transformer | OnnxTransformer | SearchModel | VectorModel:
    """Open a checkpoint folder, a run's folder, an ONNX folder, an ONNX file (`export_search`), or a published model: a
    folder or a GGUF file.

    All have the methods of `generation.verbs.TextVerbs`.

    path: if there is no such file or folder, a name on the Hugging Face Hub, e.g. "Helsinki-NLP/opus-mt-en-de".
    runtime: "mlx" or "onnx"; default: by the kind of model. A published folder with ONNX graphs beside its weights can
    be run by both, by default by MLX if it is installed.
    threads: for ONNX models. precision: for an ONNX folder see `OnnxTransformer`, for a checkpoint the type to compute
    in, by default the file's.
    verify: check the files against the SHA-256 digests in their manifest.
    shortlist: a file in Marian's format, or "none"; default: as the model's settings say. draft: a smaller decoder,
    which guesses tokens for `speculate`. cache_bits: quantise a checkpoint's cached keys and values to 4 or 8 bits.
    Raises `UserError` for anything that is no model, for damaged files, and for options that don't fit the model.
    """
    opened = _opened_by(path, runtime, threads, precision, verify)
    opened.use_shortlist(shortlist)
    opened.use_cache_bits(cache_bits)
    if draft is not None:
        of_draft = threads if runs_onnx(Path(draft)) else None
        opened.use_draft(open_model(draft, threads=of_draft, verify=verify))
    return opened


def load(path: str | Path, verify: bool = True, revision: str | None = None) -> tuple[Transformer, Tokenizer | None]:
    """Open a model of any form, as `open_model` does; return it and its tokenizer (None if it has none).

    revision: branch, tag or commit of a name on the Hugging Face Hub. Type checkers see MLX's `Transformer`, the type
    of an opened checkpoint. ONNX models have the same methods; `open_model` has the exact types.
    """
    model: Any = open_model(path, verify=verify) if revision is None else _checkpoint(Path(path), verify, revision)
    return model, model.tokenizer


def _opened_by(
    path: str | Path,
    runtime: Literal["mlx", "onnx"] | None,
    threads: int | None,
    precision: PrecisionName | None,
    verify: bool,
) -> Transformer | OnnxTransformer | SearchModel | VectorModel:
    check_name(path)
    path = Path(path)
    if not path.exists():
        from mlx_transformer.families.hub import find_model

        checkpoint = find_model(path)
        if checkpoint.repository is not None and not Place.of(checkpoint.folder).onnx:
            return _checkpoint(path, verify, precision=precision)
        path = checkpoint.folder
    if runs_onnx(path):
        check_export()
    if path.is_file() and not Place.of(path).is_importable:
        from export.search import open_file
        from export.search.metadata import check_file

        check_file(path, precision)
        if runtime == "mlx":
            raise UserError("{}: an ONNX file needs {runtime}; MLX needs the checkpoint", path, runtime="onnx")
        return open_file(path, threads=threads, verify=verify)
    if _is_onnx(path, runtime, threads):
        from export import OnnxTransformer

        return OnnxTransformer(path, threads=threads, precision=precision, verify=verify)
    return _checkpoint(path, verify, precision=precision)


def open_folder(path: Path, **options: Any) -> TextVerbs:
    """Open a model folder or a GGUF file. Raises `UserError` for an ONNX file: its search can't be run step by step."""
    if path.is_file() and not Place.of(path).is_importable:
        raise UserError(f"{path}: is a file; give a checkpoint folder or an ONNX folder")
    return open_model(path, **options)


def run_on_lines(
    verb: str,
    model: Path,
    text: Sequence[str] | None,
    files: LineFiles,
    runtime: RuntimeSettings,
    make: Callable[[TextVerbs, Output | None], LineWork],
    open: Callable[..., TextVerbs] = open_folder,
) -> None:
    """Open the model, and write the result of `make(model, output)` for each line."""
    from mlx_transformer.generation.line_files import write_lines
    from mlx_transformer.generation.output import claim_lines

    out = claim_lines(verb, files.out, files.force, model, files.input)  # before opening the model, which takes longer
    work, facts = make(open(model, **vars(runtime)), out), facts_of(model, runtime)
    write_lines(work, files.input, out, text=text or (), resume=files.resume, model_facts=facts)


def facts_of(model: Path, runtime: RuntimeSettings) -> Callable[[], dict[str, str]]:
    """Return a function that computes the facts that a resumed run must match: model, runtime, versions."""

    def facts() -> dict[str, str]:
        from mlx_transformer.core.folders import fingerprint
        from mlx_transformer.system.machine import versions

        runs = {"threads": str(runtime.threads), "precision": str(runtime.precision)}
        return {"model": fingerprint(_local(model)), **runs, **versions()}

    return facts


@naming_extra("compare")
def compare(
    a: str | Path, b: str | Path, source: Sequence[str], reference: Sequence[str] | None = None, **options: Any
) -> Comparison:
    """Compare two models of any form on the same lines: scores with a significance test, differing lines, speed and
    memory.

    Each model runs in its own process. Options as for `report.comparing.compare`.
    """
    from mlx_transformer.report.comparing import compare

    return compare(opener(a), opener(b), source, reference, **options)


@naming_extra("export")
def export(checkpoint: str | Path, out: str | Path, **settings: Unpack[ExportArguments]) -> Path:
    """Write a checkpoint as ONNX: a file with the search inside if `out` ends in .onnx, otherwise a folder.

    Settings as for `export_search` and `export_onnx`.
    """
    check_export()
    from export import export_onnx, export_search

    write = export_search if Path(out).suffix == ".onnx" else export_onnx
    return write(checkpoint, out, **settings)


def serve(models: str | Path | Sequence[str | Path], **settings: Unpack[ServeArguments]) -> None:
    """Serve models of any form over HTTP; arguments as for `export.serve.serve`. MLX runs checkpoints."""
    check_export()
    from export.serve import serve as serve_models

    serve_models(models, open_model, **settings)


def opener(
    model: str | Path, precision: str | None = None, threads: int | None = None, verify: bool = True
) -> tuple[str, Callable[[], Served]]:
    """Return a model's name and a function that opens it, for `report.comparing.compare`.

    precision and threads: for ONNX models.
    """
    options = {"threads": threads, "precision": precision, "verify": verify}
    name = str(model) if precision is None else f"{model}, {precision}"
    return name, partial(_opened, Path(model), options)


def _opened(model: Path, options: dict[str, Any]) -> Served:
    """Open a model in the process that will run it."""
    from mlx_transformer.core.parameters import parameter_count
    from mlx_transformer.report.worker import Served
    from mlx_transformer.system.machine import versions

    opened: Any = open_model(model, **options)
    packages = versions()
    facts = {"model": str(model), "parameters": f"{parameter_count(opened.config):,}"}
    folder = _local(model)
    if runs_onnx(folder):
        facts["runs on"] = f"ONNX Runtime {packages.get('onnxruntime') or packages.get('onnxruntime-gpu')}, CPU"
        if model.is_file():
            from export.search.metadata import PRECISION

            files = [model, model.with_name(f"{model.name}_data")]
            facts["precision"] = opened.metadata.get(PRECISION, "float32")
        else:
            files, facts["precision"] = opened.folder.files, opened.folder.precision
            _ = opened.translator  # raises if it can't translate
        return Served(opened, facts, sum(file.stat().st_size for file in files if file.is_file()))
    import mlx.core as mx

    from mlx_transformer.core.checkpoint import WEIGHTS, open_checkpoint
    from mlx_transformer.device import device_record
    from mlx_transformer.families.conversion import sources

    _ = opened.translator
    facts["runs on"], facts["precision"] = f"MLX {packages.get('mlx')}, {device_record()}", opened.precision
    if Place.of(folder).is_importable:
        return Served(opened, facts, sum(file.stat().st_size for file in sources(folder)), mx.get_peak_memory)
    checkpoint = open_checkpoint(folder, verify=False)
    if checkpoint.quantization:
        facts["precision"] = "integers, see info"
    return Served(opened, facts, (checkpoint.folder / WEIGHTS).stat().st_size, mx.get_peak_memory)


def runs_onnx(model: Path) -> bool:
    """Whether ONNX Runtime runs a model by default. Raises `UserError` if it is no model."""
    return Place.of(_local(model)).runs_onnx


def _local(model: Path) -> Path:
    """The file or folder of this name; if there is none, its folder after a download from the Hub."""
    if model.exists():
        return model
    from mlx_transformer.families.hub import find_model

    return find_model(model).folder


def _is_onnx(model: Path, runtime: str | None, threads: int | None) -> bool:
    """Whether ONNX Runtime will run the folder. Raises `UserError` if the options ask for the other runtime."""
    place = Place.of(model).check_model()
    onnx = place.onnx if runtime == "onnx" else place.runs_onnx
    if runtime == "onnx" and not onnx:
        raise place.error(AN_ONNX_FOLDER)
    if runtime == "mlx" and onnx:
        raise UserError("{}: an ONNX folder needs {runtime}; MLX needs the checkpoint", model, runtime="onnx")
    if not onnx and threads is not None:
        raise UserError("{}: is a checkpoint; {} is for ONNX folders", model, Name("threads"))
    return onnx


def _checkpoint(
    model: Path, verify: bool, revision: str | None = None, precision: PrecisionName | None = None
) -> Transformer:
    if precision not in (None, "float32", "float16", "bfloat16"):
        raise UserError(
            f"{model}: {precision} is for ONNX folders; a checkpoint computes in float32, float16 or bfloat16"
        )
    try:
        from mlx_transformer.runtime.transformer import load
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        build = CommandLine("export", f"{quote(str(model))} OUT")
        raise UserError(
            "{}: a checkpoint needs MLX, which is not installed; {}, or export it: {}", model, needs("train"), build
        ) from None
    return load(model, verify, revision, precision)[0]
