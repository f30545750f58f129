"""quickstart, train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_transformer.spec.errors import UserError


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 3.5,
    seed: Annotated[int, typer.Option(help="Seed of corpus, weights and dropout.")] = 1,
) -> None:
    """The whole path in minutes: corpus, training, score, ONNX, proof, translations from both runtimes."""
    from .quickstart import run

    raise typer.Exit(run(out, minutes, seed))


def train(
    out: Annotated[Path, typer.Option(help="The run's folder; the trained model is OUT/model.")],
    recipe: Annotated[str | None, typer.Argument(help="A TOML recipe or the name of a built-in one.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Built-in corpus, e.g. cldr:en-de.")] = None,
    source: Annotated[str | None, typer.Option(help="Source sentences, one a line.")] = None,
    target: Annotated[str | None, typer.Option(help="Their translations, line by line.")] = None,
    valid_source: Annotated[str | None, typer.Option(help="Source sentences for validation.")] = None,
    valid_target: Annotated[str | None, typer.Option(help="Their translations.")] = None,
    preset: Annotated[str | None, typer.Option(help="Size: tiny, small, base or big.", show_default="small")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of the joint vocabulary.", show_default="8000")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Target tokens a batch.", show_default="2000")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Train for so many passes over the data.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for so many minutes.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, weights and dropout.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
) -> None:
    """Train an encoder-decoder on parallel text or on the built-in corpus."""
    from mlx_transformer.training.recipe import load_recipe
    from mlx_transformer.training.trainer import Trainer

    if corpus is not None and (source is not None or target is not None):
        raise UserError("--corpus and --source/--target exclude each other")
    files = {"source": source, "target": target, "valid_source": valid_source, "valid_target": valid_target}
    data = {"corpus": corpus, "vocab_size": vocab_size, "batch_tokens": batch_tokens, **files}
    training = {"steps": steps, "epochs": epochs, "minutes": minutes, "seed": seed}
    chosen = load_recipe(recipe, {"data": data, "model": {"preset": preset}, "training": training})
    result = Trainer(chosen, out, resume).run()
    state = result.state
    print(f"{result.model}: {result.parameters:,} parameters, {state.step} steps, {state.seconds:.0f} s")
    if result.interrupted is not None:
        print("interrupted; continue with --resume", file=sys.stderr)
        raise typer.Exit(128 + result.interrupted)
