"""The commands train, quickstart, report and average, and the text of `train --help-recipe`."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from click.exceptions import Exit

from mlx_transformer.core.config import PRESETS
from mlx_transformer.core.folders import check_there
from mlx_transformer.core.heads import Head
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import field_docs, field_types
from mlx_transformer.system.lazy import needs, what_is_missing
from mlx_transformer.training.options import find_recipe

from .parameters import Argument, Option
from .settings import Force, RecipeKeys, Replace

HEAD = """\
# Every key of a recipe and its default; one without is unset. Take the # away from those you change:
#   mlx-transformer train --help-recipe > my.toml
#   mlx-transformer train my.toml --out FOLDER       flags win over the file
# Each is an option of train too, but for tables: --beta1 0.95 for beta1, --no-gated for gated = false.
"""
CORPORA = "[[data.corpora]]"
COLUMN, WIDTH = 32, 118
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def recipe_help() -> str:
    """Return a TOML file with every key of a recipe in a comment, read from the classes that check recipes."""
    from mlx_transformer.training import options

    sized = PRESETS[options.ModelOptions.preset]
    tables: dict[str, list[str]] = {table: [] for table in options.TABLES}
    for table, name, of in options.recipe_keys():
        default = {"norm_placement": options.NORM_PLACEMENT, **dict.fromkeys(sized)}.get(name, getattr(of, name))
        tables[table] += _lines(of, name, default, " Unset: the preset's." if name in sized else "")
    corpora = [line for f in fields(options.CorpusOptions) for line in _lines(options.CorpusOptions, f.name, f.default)]
    parts = {
        "[data]": tables["data"],
        f"# {CORPORA:{COLUMN - 3}} # Several corpora: such a table for each of them.": corpora,
        "[model]": tables["model"],
        "[training]": tables["training"],
    }
    return HEAD + "".join("\n".join(["", head, *lines, ""]) for head, lines in parts.items())


def _lines(of: type, name: str, default: Any, more: str = "") -> Iterator[str]:
    """Yield the comment lines of one key, from its dataclass field; nothing if the key is a table with keys of its
    own."""
    kind = field_types(of).get(name)
    if kind is not None:
        type_name = ", ".join(kind.choices) if kind.type is str and kind.choices else TYPES[kind.type]
    elif isinstance(default, Mapping):
        type_name, default = "table", dict(default)
    elif isinstance(default, Head):
        type_name, default = "table", default.to_dict()
    elif name == "layer_pattern":
        type_name, default = "list of tables", list(default)
    else:
        return
    key = f"# {name} =" + ("" if default is None else " " + json.dumps(default))
    missing = " " * (len(key) - COLUMN + 1)  # a long key takes room from the first line
    meaning = f"{field_docs(of).get(name, '')}{more} ({type_name})"
    text = textwrap.wrap(meaning, WIDTH - COLUMN - 2, initial_indent=missing)
    for left, right in itertools.zip_longest([key], text, fillvalue=""):
        yield f"{left:{COLUMN - 1}} # {right.lstrip()}"


def average(
    checkpoints: Annotated[list[Path], Argument(help="Two or more checkpoint folders of one run.", check=check_there)],
    out: Annotated[Path, Option("--out", "-o", help="Checkpoint folder to write, new or empty.")],
    force: Force = False,
) -> None:
    """Average the weights of several checkpoints of one run."""
    from mlx_transformer.training.weights import average_checkpoints

    print(f"{average_checkpoints(checkpoints, out, force)}: the average of {len(checkpoints)} checkpoints")


def quickstart(
    out: Annotated[Path, Option("--out", "-o", help="Folder for everything that it makes.")] = Path("quickstart"),
    minutes: Annotated[
        float | None, Option(help="Stop training after so many minutes.", show_default="after all steps")
    ] = None,
    seed: Annotated[int, Option(help="Random seed of the corpus, the first weights and dropout.")] = 1,
) -> None:
    """Try everything in minutes: make a corpus, train, score, export, prove that both runtimes agree, translate.

    Ctrl-C saves; the same command continues.
    """
    from .quickstart import run

    try:
        status = run(out, minutes, seed)
    except ModuleNotFoundError as error:
        if what_is_missing(error) is None:
            raise
        raise UserError(f"quickstart trains and exports: {needs('train,export')}") from None
    raise Exit(status)


def report(
    runs: Annotated[list[Path], Argument(help="Folders of training runs.", check=check_there)],
    out: Annotated[Path, Option("--out", "-o", help="HTML page to write.")] = Path("report.html"),
    force: Replace = False,
) -> None:
    """Write one page about training runs: curves side by side, samples over time, recipes and machines."""
    from mlx_transformer.core.outputs import claim, page_kind
    from mlx_transformer.report.training_page import page, read_run
    from mlx_transformer.system.durable import write_text

    output = claim(out, page_kind("report"), force, *runs)
    logs = [read_run(folder) for folder in runs]
    write_text(output, page(logs))
    print(f"{out}: {', '.join(f'{log.name} ({log.steps:,} steps)' for log in logs)}")


def _help_recipe(_: click.Context) -> None:

    print(recipe_help(), end="")


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How a run uses its machine."""

    device: Literal["cpu", "gpu"] | None = None
    """Where MLX computes; unset: the GPU, if any."""
    keep_awake: bool = False
    """Keep a Mac from sleeping while it trains (caffeinate)."""


def train(
    recipe: Annotated[
        str | None, Argument(help="A TOML recipe, or the name of a built-in one; with --resume, the run's folder.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder of the run; the trained model will be OUT/model.")
    ] = None,
    *,
    keys: RecipeKeys,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue the run in OUT with its recorded settings; --steps, --epochs or --minutes may lengthen it.",
        ),
    ] = False,
    force: Annotated[bool, Option("--force", help="Replace another run in OUT.")] = False,
    machine: MachineSettings,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Show what would be trained, forecast its time from 20 steps, and write nothing."),
    ] = False,
    help_recipe: Annotated[
        bool,
        Option("--help-recipe", help="Print all keys of a recipe with their defaults, and exit.", prints=_help_recipe),
    ] = False,
) -> None:
    """Train a translator on parallel text or on the built-in corpus, or another kind of model with --objective."""
    if resume and out is None and recipe is not None:
        out, recipe = Path(recipe), None
    if dry_run and resume:
        raise UserError("--dry-run forecasts a run from its start: leave out --resume")
    if dry_run:
        out = None  # the folder is neither written nor read
    elif out is None:
        raise UserError("Missing option '--out', the run's folder (see mlx-transformer train --help)")
    keys.check_files()
    if recipe is not None:
        find_recipe(recipe)
    # Imported only now, so that mistakes above show at once.
    if machine.device is not None:
        os.environ["MLX_TRANSFORMER_DEVICE"] = machine.device  # read at MLX's first import
    from mlx_transformer.system.machine import keep_awake
    from mlx_transformer.training.group import joined
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.run_folder import check_folder
    from mlx_transformer.training.trainer import Trainer

    group = joined()
    if out is not None and group.leads:
        check_folder(out, resume, force)
    chosen = load_recipe(recipe, keys.tables, run=out if resume else None)
    if out is None:
        chosen = replace(chosen, training=replace(chosen.training, wandb=None))
        with tempfile.TemporaryDirectory() as folder:
            print(Trainer(chosen, Path(folder), group=group).rehearse())
        return
    with keep_awake() if machine.keep_awake else nullcontext():
        result = Trainer(chosen, out, resume, force=force, group=group).run()
    state = result.state
    if not group.leads:
        raise Exit(0 if result.interrupted is None else 128 + result.interrupted)
    print(f"{result.model}: {result.parameters:,} parameters, {state.step} steps, {state.seconds:.0f} s")
    if result.interrupted is not None:
        print(f"saved; continue with --resume {shlex.quote(str(out))}", file=sys.stderr)
        raise Exit(128 + result.interrupted)
