"""export, validate, info."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from export.precision.table import ACTIVATIONS, IN_BLOCKS, PRECISIONS
from export.settings import TARGET_NAMES, ValidateSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.terminal import Console

from .arguments import Checkpoint, Force, Onnx
from .settings import with_settings

if TYPE_CHECKING:

    class PrecisionName(Enum):
        """One of `PRECISIONS`."""

    TargetName = ActivationsName = str
else:
    PrecisionName = Enum("PrecisionName", {name: name for name in PRECISIONS})  # typer takes no list of Literals
    TargetName, ActivationsName = Literal[TARGET_NAMES], Literal[tuple(ACTIVATIONS)]


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Folder to write; consumers load it as it is. With --search a file.")],
    target: Annotated[
        TargetName,
        typer.Option(metavar="TARGET", help=f"What the graphs are made for: {', '.join(TARGET_NAMES)}."),
    ] = "portable",
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(
            metavar="PRECISION",
            help=f"{', '.join(PRECISIONS)}; several: give the option several times.",
            show_default="float32",
        ),
    ] = None,
    activations: Annotated[
        ActivationsName | None,
        typer.Option(help=f"What the weights of {', '.join(IN_BLOCKS)} are multiplied with.", show_default="int8"),
    ] = None,
    fixed_shape: Annotated[
        str | None, typer.Option(help="Of target coreml: ROWSxSOURCExTARGET, such as 1x64x64.")
    ] = None,
    attention: Annotated[
        bool, typer.Option("--attention", help="Return from which source tokens each token was written, too.")
    ] = False,
    attention_layer: Annotated[
        int | None, typer.Option(help="Of which decoder layer, from 0.", show_default="the one that aligns best")
    ] = None,
    inputs_embeds: Annotated[
        bool, typer.Option("--inputs-embeds", help="The encoder reads vectors, inputs_embeds, in place of input_ids.")
    ] = False,
    gate_source: Annotated[Path | None, typer.Option(help="Sentences on which lower precisions are judged.")] = None,
    gate_reference: Annotated[Path | None, typer.Option(help="Their translations, line by line.")] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Write it even if the quality gate says that it translates worse.")
    ] = False,
    force: Force = False,
    search: Annotated[
        bool, typer.Option("--search", help="Write one file, OUT.onnx, that holds the search too: ids in, n best out.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="As --search, with the tokenizer inside: strings in, strings out.")
    ] = False,
) -> None:
    """Write a checkpoint as ONNX models for ONNX Runtime, Optimum and transformers.js."""
    from export import export_onnx, export_search
    from mlx_transformer.system.progress import quiet_progress

    precisions = [name.value for name in precision or []] or ["float32"]
    one_file = search or text
    if one_file and (fixed_shape is not None or len(precisions) > 1):
        raise UserError("--search and --text write one file: of one precision, and of no fixed shape")
    if one_file and inputs_embeds:
        raise UserError("--search and --text write one file that reads ids: leave out --inputs-embeds")
    lines: list[str] = []
    more: dict[str, Any] = {"target": target, "activations": activations, "force": force, "told": lines.append}
    more |= {"attention": attention, "attention_layer": attention_layer}
    more |= {"gate_source": gate_source, "gate_reference": gate_reference, "accept_loss": accept_loss}
    try:
        with quiet_progress("export") as watch:
            if one_file:
                export_search(checkpoint, out, precision=precisions[0], text=text, watch=watch, **more)
            else:
                more |= {"fixed_shape": fixed_shape, "inputs_embeds": inputs_embeds}
                export_onnx(checkpoint, out, precision=precisions, watch=watch, **more)
    finally:
        print(*lines, sep="\n", end="\n" if lines else "")  # not before: a bar on the same terminal would wipe them out
    if one_file:
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
        return
    files = sorted(path for path in out.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:.1f} MB")


def _explain(wanted: bool) -> None:
    if wanted:
        from export.validate import explain

        print(explain())
        raise typer.Exit()


@with_settings
def validate(
    checkpoint: Checkpoint,
    onnx: Onnx,
    settings: ValidateSettings,
    explain: Annotated[
        bool,
        typer.Option("--explain", callback=_explain, is_eager=True, help="Print the rule and the runtimes, and end."),
    ] = False,
) -> None:
    """Prove that MLX, ONNX Runtime and a float64 reference compute the same function.

    Exit status: 0 equal, 1 mismatch, 2 bad input, 3 a requested runtime is not available, 70 a bug.
    """
    from export.validate import validate_command

    raise typer.Exit(validate_command(checkpoint, onnx, **vars(settings)))


def info(path: Annotated[Path, typer.Argument(help="A checkpoint, a run's folder, an ONNX folder or file.")]) -> None:
    """Describe a model: what it is, its config, sizes and parameters."""
    from export.package.facts import graph_facts

    from .info import describe

    Console().print(describe(path, graph_facts))
