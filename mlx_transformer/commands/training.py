"""quickstart, train, average."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from mlx_transformer.system.errors import UserError

from .arguments import Force


def average(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoint folders of one run, two or more.")],
    out: Annotated[Path, typer.Option(help="The checkpoint folder to write, new or empty.")],
    force: Force = False,
) -> None:
    """Average the weights of several checkpoints of one run."""
    from mlx_transformer.convert.average import average_checkpoints

    print(f"{average_checkpoints(checkpoints, out, force)}: the average of {len(checkpoints)} checkpoints")


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 3.5,
    seed: Annotated[int, typer.Option(help="Seed of corpus, weights and dropout.")] = 1,
) -> None:
    """The whole path in minutes: corpus, training, score, ONNX, proof, translations from both runtimes."""
    from .quickstart import run

    raise typer.Exit(run(out, minutes, seed))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.")],
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("report.html"),
) -> None:
    """Write one page about training runs: curves side by side, samples over time, recipes, what they ran on."""
    from mlx_transformer.report.runs import read_run
    from mlx_transformer.report.training_page import page
    from mlx_transformer.system.durable import write_text

    if out.is_dir():
        raise UserError(f"{out}: is a folder; --out needs the name of a page")
    logs = [read_run(folder) for folder in runs]
    write_text(out, page(logs))
    print(f"{out}: {', '.join(f'{log.name} ({log.steps:,} steps)' for log in logs)}")


def _help_recipe(asked: bool) -> None:
    if asked:
        from .recipe_help import recipe_help

        print(recipe_help(), end="")
        raise typer.Exit


def _gigabytes(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.strip().upper().removesuffix("GB"))
    except ValueError:
        raise UserError(f"--memory {text}: give gigabytes, such as 16GB") from None


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML recipe or the name of a built-in one; with --resume, a run's folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; the trained model is OUT/model.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Built-in corpus, e.g. cldr:en-de.")] = None,
    source: Annotated[str | None, typer.Option(help="Source sentences, one a line.")] = None,
    target: Annotated[str | None, typer.Option(help="Their translations, line by line.")] = None,
    pairs: Annotated[
        str | None, typer.Option(help="One file of both: .tsv, .jsonl, .parquet, .arrow, or a folder of datasets.")
    ] = None,
    languages: Annotated[
        str | None, typer.Option(help="Its two columns, e.g. en-de.", show_default="source and target")
    ] = None,
    valid_source: Annotated[str | None, typer.Option(help="Source sentences for validation.")] = None,
    valid_target: Annotated[str | None, typer.Option(help="Their translations.")] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="What is learned: translation, or of plain text language-model, masked-language-model or denoising.",
            show_default="translation",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Plain text: a file, a folder, or a pattern of files.")] = None,
    valid_text: Annotated[str | None, typer.Option(help="Plain text for validation.")] = None,
    valid_pairs: Annotated[str | None, typer.Option(help="One file of both for validation.")] = None,
    preset: Annotated[str | None, typer.Option(help="Size: tiny, small, base or big.", show_default="small")] = None,
    norm_placement: Annotated[
        str | None,
        typer.Option(help="Norms before each sub-layer (pre) or, as in the paper, behind (post).", show_default="pre"),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the joint vocabulary.", show_default="8000")] = None,
    separate_vocabularies: Annotated[
        bool, typer.Option("--separate-vocabularies", help="A vocabulary for each language in place of a joint one.")
    ] = False,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Target tokens a batch.", show_default="500 to 2000, by the size of the text")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps; or give --epochs or --minutes.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Train for so many passes over the data.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for so many minutes.")] = None,
    warmup: Annotated[
        int | None,
        typer.Option(help="Steps over which the learning rate rises.", show_default="a quarter of the run, up to 4000"),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate.", show_default="the paper's, (d_model * warm-up)^-0.5")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Learning rate after warm-up: inverse-square-root, noam, constant, linear, cosine or "
            "warmup-stable-decay.",
            show_default="inverse-square-root",
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adam, adamw, adafactor, lion or muon.", show_default="muon; adam with --from")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Batches a step; the gradient is that of all their tokens.", show_default="1")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Compute in float32, bfloat16 or float16.", show_default="float32")
    ] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", metavar="CHECKPOINT", help="Go on from its weights, config and vocabulary.")
    ] = None,
    freeze: Annotated[
        str | None, typer.Option(metavar="PATTERNS", help="Parameters that stay, e.g. 'encoder.*,*embedding.*'.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Train a low-rank change of --from alone: lora or dora.")] = None,
    adapter_rank: Annotated[int | None, typer.Option("--rank", help="Of the adapter.", show_default="8")] = None,
    adapter_alpha: Annotated[
        float | None, typer.Option("--alpha", help="Its change counts alpha / rank times.", show_default="16")
    ] = None,
    adapter_targets: Annotated[
        str | None,
        typer.Option(
            "--targets",
            metavar="PATTERNS",
            help="Linear maps that it changes; '*': all inside the layers.",
            show_default="*.query_proj,*.value_proj",
        ),
    ] = None,
    adapter_dropout: Annotated[float | None, typer.Option(help="Dropout of its inputs.", show_default="0")] = None,
    best: Annotated[
        str | None, typer.Option(help="Keep the best checkpoint by loss, perplexity, bleu, chrf or exact_match.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="End after so many validations without a better one.", show_default="no end")
    ] = None,
    final: Annotated[
        str | None,
        typer.Option(help="Weights of OUT/model: last, best, average or moving-average.", show_default="last"),
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout.", show_default="0.1; big 0.3")] = None,
    save_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Seconds between checkpoints.", show_default="300")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, weights and dropout.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in OUT, as its run.json says; flags may lengthen it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that OUT holds.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="GB", help="What a step may take, e.g. 16GB: how batches are cut follows from it."),
    ] = None,
    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Where MLX computes.", show_default="the GPU, if there is one")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained, take 20 steps to forecast, write nothing.")
    ] = False,
    help_recipe: Annotated[
        bool,
        typer.Option("--help-recipe", help="Show all keys of a recipe and exit.", callback=_help_recipe, is_eager=True),
    ] = False,
) -> None:
    """Train a translator on parallel text or the built-in corpus, or by --objective another model on plain text."""
    if device is not None:
        os.environ["MLX_TRANSFORMER_DEVICE"] = device  # read when MLX is imported first
    from mlx_transformer.training.group import joined
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.run_folder import check_folder
    from mlx_transformer.training.trainer import Trainer

    if corpus is not None and (source is not None or target is not None):
        raise UserError("--corpus and --source/--target exclude each other")
    if pairs is not None and (corpus is not None or source is not None or target is not None):
        raise UserError("--pairs and --corpus or --source/--target exclude each other")
    if resume and out is None and recipe is not None:
        out, recipe = Path(recipe), None
    if dry_run and resume:
        raise UserError("--dry-run forecasts a run from its start: leave out --resume")
    if dry_run:
        out = None  # nothing is written there, nor looked at
    elif out is None:
        raise UserError("Missing option '--out', the run's folder (see mlx-transformer train --help)")
    group = joined()
    if out is not None and group.leads:
        check_folder(out, resume, force)
    files = {"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target}
    files |= {"pairs": pairs, "valid_pairs": valid_pairs, "languages": languages}
    files |= {"text": text, "valid_text": valid_text}
    flags = {
        "data": {"corpus": corpus, "vocab_size": vocab_size, "batch_tokens": batch_tokens, **files}
        | {"separate_vocabularies": separate_vocabularies or None},
        "model": {"preset": preset, "norm_placement": norm_placement, "dropout": dropout},
        "training": {"objective": objective, "steps": steps, "epochs": epochs, "minutes": minutes, "seed": seed}
        | {"warmup_steps": warmup, "learning_rate": learning_rate, "checkpoint_seconds": save_every}
        | {"schedule": schedule, "optimizer": optimizer, "accumulate": accumulate, "precision": precision}
        | {"memory": _gigabytes(memory)}
        | {"adapter": adapter, "adapter_rank": adapter_rank, "adapter_alpha": adapter_alpha}
        | {"adapter_targets": adapter_targets, "adapter_dropout": adapter_dropout}
        | {"start_from": start_from, "freeze": freeze, "best": best, "patience": patience, "final": final},
    }
    chosen = load_recipe(recipe, flags, run=out if resume else None)
    if out is None:
        chosen = replace(chosen, training=replace(chosen.training, wandb=None))
        with tempfile.TemporaryDirectory() as folder:
            print(Trainer(chosen, Path(folder), group=group).rehearse())
        return
    result = Trainer(chosen, out, resume, force=force, group=group).run()
    state = result.state
    if not group.leads:
        raise typer.Exit(0 if result.interrupted is None else 128 + result.interrupted)
    print(f"{result.model}: {result.parameters:,} parameters, {state.step} steps, {state.seconds:.0f} s")
    if result.interrupted is not None:
        print(f"saved; continue with --resume {shlex.quote(str(out))}", file=sys.stderr)
        raise typer.Exit(128 + result.interrupted)
