"""The commands of `python -m export` and their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn, get_args

from mlx_transformer.generation.options import PENALTY_OFFSETS, Options
from mlx_transformer.generation.translate import Overlong, translate_stream
from mlx_transformer.spec.errors import UserError

from .precision.table import ACTIVATIONS, IN_BLOCKS, PRECISIONS


def invoke(arguments: list[str] | None) -> int:
    """The exit status of a command; None: that of the process. What is wrong with its options is a `UserError`."""
    chosen = vars(_parser().parse_args(arguments))
    functions = {"build": _build, "translate": _translate, "serve": _serve, "validate": _validate}
    return functions[chosen.pop("command")](**chosen) or 0


def _build(checkpoint: Path, out: Path, precision: list[str] | None, search: bool, text: bool, **options: Any) -> None:
    from .package import export_onnx

    options["told"] = print
    if search or text:
        from .search import export_search

        if options.pop("fixed_shape") is not None or len(precision or []) > 1:
            raise UserError("--search and --text write one file: of one precision, and of no fixed shape")
        export_search(checkpoint, out, precision=(precision or ["float32"])[0], text=text, **options)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
        return
    export_onnx(checkpoint, out, precision=precision or "float32", **options)
    files = [path for path in out.rglob("*") if path.is_file()]
    print(f"{out}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


def _validate(
    checkpoint: Path,
    onnx: Path,
    runtimes: str | None,
    seed: int | None,
    threads: int | None,
    json: Path | None,
    html: Path | None,
    names: str | None,
    verify: bool,
) -> int:
    from .validate import runtime_names, validate_command

    return validate_command(
        checkpoint, onnx, json, runtime_names(runtimes), seed, threads, html=html, names=names, verify=verify
    )


def _translate(
    model: Path,
    input: Path | None,
    output: Path | None,
    overlong: Overlong,
    stream: bool,
    threads: int | None,
    verify: bool,
    **options,
):
    from .runtime import OnnxTransformer

    Options(**options)  # before the model is read
    translator = OnnxTransformer(model, threads=threads, verify=verify)
    translate_stream(translator, input, output, overlong=overlong, stream=stream, **options)


def _serve(model: Path, **options) -> None:
    from .serve import serve

    serve(model, **options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m export", description="Export to ONNX, validate, and translate with ONNX Runtime.")
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="write a checkpoint as an ONNX folder")
    build.add_argument("checkpoint", type=Path, help="checkpoint folder (config.json, model.safetensors)")
    build.add_argument("out", type=Path, help="folder to write; consumers load it as it is")
    build.add_argument("--target", default="portable", help="made for: portable, cpu, web, cuda or coreml")
    build.add_argument("--fixed-shape", help="of target coreml: ROWSxSOURCExTARGET, such as 1x64x64")
    build.add_argument("--precision", action="append", help=f"{', '.join(PRECISIONS)}; several: give it several times")
    build.add_argument(
        "--activations", help=f"of {', '.join(IN_BLOCKS)}: what weights are multiplied with, {' or '.join(ACTIVATIONS)}"
    )
    build.add_argument("--gate-source", type=Path, help="sentences on which lower precisions are judged")
    build.add_argument("--gate-reference", type=Path, help="their translations, line by line")
    build.add_argument("--force", action="store_true", help="replace another model; accept one that translates badly")
    build.add_argument(
        "--search", action="store_true", help="one file, OUT.onnx, with the search inside: ids in and out"
    )
    build.add_argument("--text", action="store_true", help="as --search, with the tokenizer inside: strings in and out")

    translate = commands.add_parser("translate", help="one line in, one line out")
    default = Options()
    translate.add_argument("model", type=Path, metavar="ONNX", help="exported folder")
    translate.add_argument("--input", type=Path, help="text, one sentence a line (default: standard input)")
    translate.add_argument("--output", type=Path, help="where to write (default: standard output)")
    translate.add_argument("--beam", type=int, default=default.beam, help="hypotheses kept a step; 1 is greedy")
    translate.add_argument("--length-penalty", type=float, default=default.length_penalty, help="alpha of the penalty")
    translate.add_argument(
        "--penalty-form",
        choices=tuple(PENALTY_OFFSETS),
        default=default.penalty_form,
        help="of n tokens: ((5+n)/6)^alpha (gnmt) or n^alpha (length)",
    )
    translate.add_argument("--n-best", type=int, default=default.n_best, help="translations a line, separated by tabs")
    translate.add_argument("--min-new-tokens", type=int, default=default.min_new_tokens, help="shortest output")
    translate.add_argument("--max-new-tokens", type=int, help="longest output (default: source length + 50)")
    translate.add_argument("--early-stopping", action="store_true", help="stop once BEAM hypotheses are finished")
    translate.add_argument("--sample", action="store_true", help="draw tokens at random instead of taking the best")
    translate.add_argument(
        "--temperature", type=float, default=default.temperature, help="of sampling; below 1 is safer"
    )
    translate.add_argument(
        "--top-k", type=int, default=default.top_k, help="sample from the k likeliest tokens; 0: all"
    )
    translate.add_argument("--top-p", type=float, default=default.top_p, help="sample from tokens of this probability")
    translate.add_argument("--seed", type=int, default=default.seed, help="seed of sampling")
    translate.add_argument("--overlong", choices=get_args(Overlong), default="error", help="lines that are too long")
    translate.add_argument("--stream", action="store_true", help="write text as soon as it is decided, line by line")
    translate.add_argument("--threads", type=int, help="threads of one operator (default: the machine's cores)")

    serve = commands.add_parser("serve", help="answer requests over HTTP, with dynamic batching")
    serve.add_argument("model", type=Path, metavar="ONNX", help="exported folder")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    serve.add_argument("--max-batch", type=int, default=32, help="most sentences computed together")
    serve.add_argument("--max-wait-ms", type=float, default=5.0, help="longest wait for others while nothing runs")
    serve.add_argument("--max-queue", type=int, default=1024, help="most sentences waiting; beyond: status 503")
    serve.add_argument("--threads", type=int, help="threads of one operator (default: the machine's cores)")
    serve.add_argument("--workers", type=int, default=1, help="batches computed at the same time")
    serve.add_argument("--precision", help="weights to use, one of the folder's (default: float32, or the only one)")
    serve.add_argument("--access-log", action="store_true", help="log every request")

    validate = commands.add_parser("validate", help="hold runtimes against the float64 reference (exit 1: mismatch)")
    validate.add_argument("checkpoint", type=Path, help="checkpoint folder")
    validate.add_argument("onnx", type=Path, help="folder exported from it, or somebody else's ONNX file or folder")
    validate.add_argument("--runtimes", help="separated by commas (default: mlx and onnxruntime, if installed)")
    validate.add_argument("--seed", type=int, help="of the inputs (default: a fresh one, printed)")
    validate.add_argument("--threads", type=int, help="threads of one operator (default: the machine's cores)")
    validate.add_argument(
        "--names", help="of somebody else's ONNX files: input_ids=NAME,logits=NAME (default: Hugging Face's)"
    )
    validate.add_argument("--json", type=Path, help="write the report to this file as JSON")
    validate.add_argument("--html", type=Path, help="write the report to this file as a page")
    validate.add_argument(
        "--explain",
        action=_Explain,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the rule and the runtimes, and end",
    )
    for command in (translate, serve, validate):
        unverified = "skip comparing the files with the digests in their manifest"
        command.add_argument("--no-verify", dest="verify", action="store_false", help=unverified)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _Explain(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .validate import explain

        print(explain())
        parser.exit()
