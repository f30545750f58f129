"""export, validate, info."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.terminal import Console

from .arguments import Checkpoint, NoVerify, Onnx, Threads


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder to write; consumers load it as it is. With --search a file.")],
    target: Annotated[
        str, typer.Option(help="What the graphs are made for: portable (any runtime), cpu, web, cuda, coreml.")
    ] = "portable",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, float16, bfloat16, int8, int8-weights, int4, packed; several: give the option several times."
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="Of int8-weights, int4 and packed: int8 or float32, what their weights are multiplied with."),
    ] = None,
    fixed_shape: Annotated[
        str | None, typer.Option(help="Of target coreml: ROWSxSOURCExTARGET, such as 1x64x64.")
    ] = None,
    gate_source: Annotated[Path | None, typer.Option(help="Sentences on which lower precisions are judged.")] = None,
    gate_reference: Annotated[Path | None, typer.Option(help="Their translations, line by line.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another model at OUT; accept one that translates badly.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Write one file, OUT.onnx, that holds the search too: ids in, n best out.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="As --search, with the tokenizer inside: strings in, strings out.")
    ] = False,
) -> None:
    """Write a checkpoint as ONNX models for ONNX Runtime, Optimum and transformers.js."""
    from export import export_onnx, export_search

    more: dict[str, Any] = {"target": target, "activations": activations, "force": force, "told": print}
    more |= {"gate_source": gate_source, "gate_reference": gate_reference}
    if search or text:
        if fixed_shape is not None or len(precision or []) > 1:
            raise UserError("--search and --text write one file: of one precision, and of no fixed shape")
        export_search(checkpoint, out, precision=(precision or ["float32"])[0], text=text, **more)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
        return
    export_onnx(checkpoint, out, precision=precision or "float32", fixed_shape=fixed_shape, **more)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB")


def _explain(wanted: bool) -> None:
    if wanted:
        from export.validate import explain

        print(explain())
        raise typer.Exit()


def validate(
    checkpoint: Checkpoint,
    onnx: Onnx,
    runtimes: Annotated[
        str | None,
        typer.Option(
            help="Runtimes to judge, separated by commas; one that isn't there is exit 3. See --explain.",
            show_default="mlx,onnxruntime",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs.", show_default="fresh")] = None,
    threads: Threads = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Check MLX's gradients against finite differences too.")
    ] = False,
    names: Annotated[
        str | None,
        typer.Option(
            help="Inputs and outputs of somebody else's ONNX files: input_ids=NAME,logits=NAME.",
            show_default="Hugging Face's",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report to this file as a page.")] = None,
    no_verify: NoVerify = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", callback=_explain, is_eager=True, help="Print the rule and the runtimes, and end."),
    ] = False,
) -> None:
    """Prove that MLX, ONNX Runtime and a float64 reference compute the same function.

    Exit status: 0 equal, 1 mismatch, 2 bad input, 3 a requested runtime is not available, 70 a bug.
    """
    from export.validate import runtime_names, validate_command

    raise typer.Exit(
        validate_command(
            checkpoint,
            onnx,
            json_file,
            runtime_names(runtimes),
            seed,
            threads,
            html=html_file,
            gradients=gradients,
            names=names,
            verify=not no_verify,
        )
    )


def info(path: Annotated[Path, typer.Argument(help="A checkpoint, a run's folder or an ONNX folder.")]) -> None:
    """Describe a folder: what it is, its config, sizes and parameters."""
    from export.package.facts import graph_facts

    from .info import describe

    Console().print(describe(path, graph_facts))
