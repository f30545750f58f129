"""translate, evaluate, serve: a model at work on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_transformer.spec.errors import UserError

from .arguments import (
    Backend,
    BackendOption,
    Beam,
    EarlyStopping,
    FormOfPenalty,
    LengthPenalty,
    MaxNew,
    MinNew,
    Model,
    NoVerify,
    Onnx,
    Overlong,
    OverlongOption,
    PenaltyForm,
    Precision,
    Threads,
)


def translate(
    model: Model,
    input: Annotated[
        Path | None, typer.Option("--input", help="Text, one sentence a line.", show_default="stdin")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Where to write.", show_default="stdout")] = None,
    beam: Beam = 1,
    length_penalty: LengthPenalty = 0.6,
    penalty_form: FormOfPenalty = PenaltyForm.gnmt,
    n_best: Annotated[int, typer.Option(help="Translations a sentence, tab-separated on its line, best first.")] = 1,
    min_new_tokens: MinNew = 0,
    max_new_tokens: MaxNew = None,
    early_stopping: EarlyStopping = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of taking the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling; below 1 is safer.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    overlong: OverlongOption = Overlong.error,
    stream: Annotated[bool, typer.Option("--stream", help="Write text as it is decided, line by line.")] = False,
    backend: BackendOption = None,
    threads: Threads = None,
    precision: Precision = None,
    no_verify: NoVerify = False,
) -> None:
    """Translate text: one line in, one line out."""
    from mlx_transformer.generation.options import Options
    from mlx_transformer.generation.translate import translate_stream

    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "n_best": n_best}
    options |= {"early_stopping": early_stopping, "penalty_form": penalty_form.value}
    options |= {"min_new_tokens": min_new_tokens, "max_new_tokens": max_new_tokens, "seed": seed}
    options |= {"sample": sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    Options(**options)  # before the model is read
    translator = _translator(model, backend, threads, precision, not no_verify)
    translate_stream(translator, input, output, overlong=overlong.value, stream=stream, **options)


def evaluate(
    model: Model,
    source: Annotated[Path, typer.Option(help="Source sentences, one a line.")],
    reference: Annotated[Path, typer.Option(help="Their translations, line by line.")],
    beam: Beam = 1,
    length_penalty: LengthPenalty = 0.6,
    penalty_form: FormOfPenalty = PenaltyForm.gnmt,
    max_new_tokens: MaxNew = None,
    overlong: OverlongOption = Overlong.error,
    backend: BackendOption = None,
    threads: Threads = None,
    precision: Precision = None,
    no_verify: NoVerify = False,
) -> None:
    """Score translations: JSON with sacreBLEU (and its signature), chrF and exact match."""
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.generation.options import Options
    from mlx_transformer.scoring import score

    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    options |= {"penalty_form": penalty_form.value}
    Options(**options)  # before the files and the model are read
    text = read_parallel(source, reference)
    hypotheses = _translator(model, backend, threads, precision, not no_verify).translate(
        text.source, overlong=overlong.value, **options
    )
    print(json.dumps({"model": str(model), **options, **score(hypotheses, text.target)}, indent=2, ensure_ascii=False))


def serve(
    model: Onnx,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Most sentences computed together.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="Longest wait of a sentence for others when nothing runs.")] = 5.0,
    max_queue: Annotated[int, typer.Option(help="Most sentences waiting; beyond them requests get 503.")] = 1024,
    threads: Threads = None,
    workers: Annotated[int, typer.Option(help="Batches computed at the same time.")] = 1,
    precision: Precision = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    no_verify: NoVerify = False,
) -> None:
    """Answer translation requests over HTTP, with dynamic batching; SIGTERM or Ctrl-C finish what runs, then end it."""
    from export.serve import serve as run

    run(model, host, port, max_batch, max_wait_ms, max_queue, threads, workers, precision, access_log, not no_verify)


def _translator(model: Path, backend: Backend | None, threads: int | None, precision: str | None, verify: bool) -> Any:
    """Something with `.translate(lines, **options)` for a checkpoint (MLX) or an ONNX folder (ONNX Runtime)."""
    from mlx_transformer.spec.folders import is_onnx_folder

    if model.is_file():
        raise UserError(f"{model}: is a file; give a folder (export.SearchModel runs what `export --search` wrote)")
    onnx = is_onnx_folder(model)
    if backend is Backend.onnx and not onnx:
        raise UserError(f"{model}: not an ONNX folder; write one with: mlx-transformer export {model} OUT")
    if backend is Backend.mlx and onnx:
        raise UserError(f"{model}: an ONNX folder runs with --backend onnx; MLX needs the checkpoint folder")
    if onnx:
        from export import OnnxTransformer

        return OnnxTransformer(model, threads=threads, precision=precision, verify=verify)
    for name, value in (("threads", threads), ("precision", precision)):
        if value is not None:
            raise UserError(f"{model}: is a checkpoint; --{name} is for ONNX folders")
    from mlx_transformer.generation.with_mlx import MlxTranslator
    from mlx_transformer.nn.loading import load

    return MlxTranslator(*load(model, verify))
