"""explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_transformer.system.errors import UserError

from .claims import show


def explain(
    model: Annotated[str, typer.Argument(help="A checkpoint or run's folder, or an ONNX folder; or the word claims.")],
    texts: Annotated[
        list[str] | None, typer.Argument(help="The sentence, in quotes; of a decoder the prompt.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A translation to look at.", show_default="the model's own")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML page to write.", show_default="explain.html")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the same figures as PNG and SVG.", show_default="none")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--with", metavar="OTHER", help="Show beside it another folder, or the same one in another runtime."
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="What runs MODEL, as in validate --runtimes.", show_default="MLX or ONNX Runtime"),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Which of an ONNX folder's precisions.", show_default="float32, or the only one")
    ] = None,
    beam: Annotated[int, typer.Option(help="Hypotheses kept; 1 is greedy; above, the page draws their tree.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Alpha of the length penalty.")] = 0.6,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Most new tokens.", show_default="source length + 50; of a decoder 20"),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Tokens shown at each step, the likeliest ones.")] = 5,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one ONNX Runtime operator.", show_default="one for each core")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the files with the digests in their manifest.")
    ] = False,
    trained: Annotated[
        Path | None,
        typer.Option("--model", help="Of claims: the trained model that some rows look at.", show_default="quickstart"),
    ] = None,
    sentences: Annotated[
        list[str] | None,
        typer.Option("--sentence", help="Of claims: where to look at that model's attention.", show_default="dates"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier page, and earlier figures.")] = False,
) -> None:
    """Show what a model does with a sentence, on a page; explain claims is the command claims."""
    if model == "claims" and not Path(model).exists():
        return show(texts or (), out=out, figures=figures, model=trained, sentences=sentences or (), force=force)
    if trained is not None:
        raise UserError("--model goes with claims; the model that is explained is the first argument")
    if sentences:
        raise UserError("--sentence goes with claims; the sentence that is explained follows the model")
    from export.explain.command import explain as run

    written = run(
        Path(model),
        texts or [],
        target=target,
        out=out or Path("explain.html"),
        figures=figures,
        beside=beside,
        runtime=runtime,
        precision=precision,
        beam=beam,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        threads=threads,
        verify=not no_verify,
        force=force,
    )
    print(written)
