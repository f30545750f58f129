"""import, to-huggingface, to-marian, quantize, merge: from checkpoint to checkpoint; push: to the Hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from mlx_transformer.core.folders import Place, check_there
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import check_text

from .parameters import Argument, Option
from .settings import Checkpoint, Folder, Force, OutArgument, Reference

if TYPE_CHECKING:
    from mlx_transformer.system.durable import Output


def import_command(
    model: Annotated[
        Path,
        Argument(
            help="A Hugging Face folder (config.json and weights), or a name on the Hub: ORG/NAME; or Marian's own "
            ".npz or .bin, or its folder.",
            check=check_there,
        ),
    ],
    out: Annotated[Path, OutArgument("The checkpoint folder to write, new or empty.")],
    keep_float16: Annotated[
        bool, Option("--keep-float16", help="Leave float16 as it is, not widened to float32.")
    ] = False,
    revision: Annotated[
        str | None, Option(help="Of a name on the Hub: a branch, tag or commit.", show_default="main")
    ] = None,
    force: Force = False,
) -> None:
    """Make a checkpoint of a published model, in the form of `transformers` or in Marian's own."""
    from mlx_transformer.convert import import_huggingface, import_marian

    if Place.of(model).what == "a Marian model":
        notes = import_marian(model, out, force)
    else:
        notes = import_huggingface(model, out, force, keep_float16, revision)
    print("; ".join([f"{out}: imported", *notes]))


def to_huggingface_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("Folder to write, new or empty.")],
    force: Force = False,
) -> None:
    """Write a checkpoint as a published model is kept, for `transformers`, and so for PyTorch and Optimum."""
    from mlx_transformer.convert import pads_either_side, to_huggingface

    written = to_huggingface(checkpoint, out, force=force)
    note = "" if pads_either_side(written) else "; pad its inputs on the right"
    print(f"{written}: written{note}")


def to_marian_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("Folder to write, new or empty.")],
    calibrate: Annotated[
        Path | None,
        Option(
            help="Text to take the scales of int8 from.",
            show_default="the model's int8_scales.json, or its run's validation text",
        ),
    ] = None,
    shortlist: Annotated[
        Path | None, Option(help="A shortlist to write beside it.", show_default="that of an imported model")
    ] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint as Marian's own files, for Marian, Bergamot and Firefox."""
    from mlx_transformer.convert import to_marian
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.core.int8_scales import INT8_SCALES
    from mlx_transformer.core.shortlist import read_shortlist

    scales, listed = None, None if shortlist is None else read_shortlist(shortlist)
    if calibrate is not None or not (open_checkpoint(checkpoint).folder / INT8_SCALES).is_file():
        from export import marian_scales

        scales = marian_scales(checkpoint, calibrate, print)
    print("; ".join([f"{out}: written", *to_marian(checkpoint, out, force, scales, listed)]))


def push(
    folder: Annotated[
        Path, Argument(help="What a command here wrote: a checkpoint or a run, an ONNX folder, ...", check=check_there)
    ],
    repository: Annotated[str, Argument(help="Its name on the Hugging Face Hub: ORG/NAME.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Send without asking.")] = False,
) -> None:
    """Send a model's folder to the Hugging Face Hub, after it has said what it would send, and asked."""
    from mlx_transformer.families.push import check_repository, shipment
    from mlx_transformer.families.push import push as send

    files = shipment(folder)
    check_repository(repository)
    print(files)
    kind = "private" if private else "public"
    if not yes:
        if not sys.stdin or not sys.stdin.isatty():
            raise UserError(f"nothing was sent to {repository}: there is nobody to ask; --yes sends without asking")
        if not click.confirm(f"Send this to {repository} on the Hugging Face Hub, {kind} if it is new?"):
            raise UserError(f"nothing was sent to {repository}")
    print(send(files, repository, private))


def shortlist(
    model: Folder,
    out: Annotated[Path, OutArgument("The file to write; it appears whole or not at all.")],
    *,
    source: Annotated[Path, Option(help="Source sentences, one a line: the training text.", check=check_text)],
    reference: Reference,
    best: Annotated[int, Option(type=click.IntRange(min=1), help="Most tokens that one source token may become.")] = 50,
    first: Annotated[
        int, Option(type=click.IntRange(min=1), help="Tokens of lower ids may be written in every sentence.")
    ] = 50,
    verify: Annotated[bool, Option(help="Compare the files with the digests in their manifest.")] = True,
    force: Force = False,
) -> None:
    """Count which tokens a model aligns with each source token, for translate --shortlist: fewer to choose among."""
    from mlx_transformer.core.outputs import claim
    from mlx_transformer.generation.shortlists import SHORTLIST_FILE

    output = claim(out, SHORTLIST_FILE, force, model, source, reference)
    write_shortlist(model, output, source=source, reference=reference, first=first, best=best, verify=verify)


def write_shortlist(
    model: Path, out: Output, *, source: Path, reference: Path, first: int, best: int = 50, verify: bool = True
) -> None:
    """Count, write the shortlist, and say what is in it."""
    from export.validate.opening import cross_weights, open_model
    from mlx_transformer.core.shortlist import shortlist_bytes
    from mlx_transformer.data.corpus import read_parallel
    from mlx_transformer.generation.shortlists import built_shortlist
    from mlx_transformer.system.durable import write_bytes
    from mlx_transformer.system.progress import quiet_progress

    text = read_parallel(source, reference)
    opened = open_model(model, verify=verify)
    weights = cross_weights(opened)
    with quiet_progress("shortlist") as report:
        built, skipped = built_shortlist(
            *(opened.config, opened.tokenizer, weights, text),
            first=first,
            best=best,
            done=lambda share: report(share, f"{round(share * len(text)):,} of {len(text):,} pairs"),
        )
    write_bytes(out, shortlist_bytes(built))
    kinds = int((built.offsets[1:] > built.offsets[:-1]).sum())
    left_out = f"; {skipped:,} pairs longer than the model takes left out" if skipped else ""
    print(
        f"{out}: {len(built.ids):,} candidates of {kinds:,} source tokens, from {len(text) - skipped:,} pairs{left_out}"
    )


def quantize(
    checkpoint: Checkpoint,
    out: Annotated[Path, OutArgument("The quantised checkpoint's folder, new or empty.")],
    bits: Annotated[int, Option(help="Bits of one weight: 2, 3, 4, 5, 6 or 8.")] = 4,
    group_size: Annotated[int, Option(help="Weights that share a scale and a bias: 32, 64 or 128.")] = 64,
    force: Force = False,
) -> None:
    """Store a checkpoint's matrices as small integers, as MLX does; every other command takes the result."""
    from mlx_transformer.convert.quantize import quantize_checkpoint
    from mlx_transformer.core.quantization import Scheme
    from mlx_transformer.system.progress import quiet_progress

    with quiet_progress("quantize") as watch:
        done = quantize_checkpoint(checkpoint, out, Scheme(group_size, bits), force, watch)
    print(f"{out}: {done}")


def merge(
    base: Annotated[Path, Argument(help="The checkpoint that the adapter was trained from.", check=check_there)],
    adapter: Annotated[
        Path, Argument(help="The adapter's folder, or that of the run which trained it.", check=check_there)
    ],
    out: Annotated[Path, Option("--out", "-o", help="The checkpoint folder to write, new or empty.")],
    requantize: Annotated[
        bool, Option("--requantize", help="Round the matrices again that BASE has as integers.")
    ] = False,
    keep: Annotated[
        bool, Option("--keep-adapter", help="Leave BASE's integers as they are, and put ADAPTER beside them.")
    ] = False,
    force: Force = False,
) -> None:
    """Merge an adapter into its base: a checkpoint in float32, which every other command takes."""
    from mlx_transformer.convert.merge import keep_adapter, merge_adapter

    if keep and requantize:
        raise UserError("--keep-adapter leaves the integers that --requantize makes anew: give one of them")
    if keep:
        print(f"{out}: {keep_adapter(base, adapter, out, force)}")
        return
    rounding = merge_adapter(base, adapter, out, requantize, force)
    print(f"{out}: merged" + (f"; {rounding}" if rounding is not None else ""))
