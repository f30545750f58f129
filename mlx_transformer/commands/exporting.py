"""Commands that make and check ONNX models: export, validate, web."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import click
from click.exceptions import Exit

from export.settings import ExportSettings, ValidateSettings, WebSettings
from mlx_transformer.core.folders import check_there

from .parameters import Argument, Option
from .settings import Checkpoint, Onnx, OutArgument


@dataclass(frozen=True, kw_only=True)
class FormSettings:
    """Other outputs of `export` than a folder of graphs."""

    search: bool = False
    """Write a single file, OUT.onnx, with the search inside: token ids in, n-best token ids out."""
    embed_tokenizer: bool = False
    """Write a single file as with --search, and with the tokenizer inside: strings in, strings out (for an encoder of
    texts, vectors out)."""
    triton: bool = False
    """Write a Triton model with the search inside: OUT/config.pbtxt and OUT/1/model.onnx; with --embed-tokenizer it
    takes strings."""


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("Folder to write, or with --search a file, e.g. model.onnx.")],
    *,
    settings: ExportSettings,
    form: FormSettings,
) -> None:
    """Write a checkpoint as ONNX models for ONNX Runtime, Optimum and transformers.js."""
    from export import export_onnx, export_search
    from export.search.triton import export_triton
    from mlx_transformer.system.progress import quiet_progress

    one_file = form.search or form.embed_tokenizer
    lines: list[str] = []
    try:
        with quiet_progress("export") as watch:
            if form.triton:
                export_triton(checkpoint, out, settings, text=form.embed_tokenizer, log=lines.append, watch=watch)
            elif one_file:
                export_search(checkpoint, out, settings, text=form.embed_tokenizer, log=lines.append, watch=watch)
            else:
                export_onnx(checkpoint, out, settings, log=lines.append, watch=watch)
    finally:
        print(*lines, sep="\n", end="\n" if lines else "")  # now, since the progress bar would overwrite them
    if one_file and not form.triton:
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    else:
        print(_folder(out))


def web(
    models: Annotated[
        list[Path],
        Argument(
            help="Folders written by `export --target web`, or files written by `export --search`.", check=check_there
        ),
    ],
    out: Annotated[Path, Option("--out", "-o", help="Folder to write; any web server can host it.")] = Path("site"),
    taps: Annotated[
        bool,
        Option(
            "--taps",
            help="Also write inside.html, which follows one word through the graphs and shows their inner values.",
        ),
    ] = False,
    *,
    settings: WebSettings,
) -> None:
    """Write a static page that translates or chats in the browser with onnxruntime-web, on WebGPU or wasm."""
    from export.explain.inside import inside
    from export.web import write_site

    write_site(models, out, settings, log=print, inside=inside if taps else None)
    print(f"{_folder(out)}; see it: {click.get_current_context().find_root().info_name} serve --web {quote(str(out))}")


def _folder(out: Path) -> str:
    files = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return f"{out}: {len(files)} files, {size / 1e6:.1f} MB"


def _explain(_: click.Context) -> None:
    from export.validate import explain

    print(explain())


def validate(
    checkpoint: Checkpoint,
    onnx: Onnx,
    settings: ValidateSettings,
    explain: Annotated[
        bool,
        Option("--explain", prints=_explain, help="Print the rule of equality and the known runtimes, and exit."),
    ] = False,
) -> None:
    """Prove that MLX, ONNX Runtime and a float64 reference compute the same function.

    Exit status: 0 equal, 1 mismatch, 2 bad input, 3 a requested runtime is not available, 70 a bug.
    """
    from export.validate import validate_command

    raise Exit(validate_command(checkpoint, onnx, **vars(settings)))
