"""generate, fill: decoders and encoders alone at work on text."""

from __future__ import annotations

import json as to_json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_transformer.system.errors import UserError

from .arguments import RuntimeSettings
from .models import open_folder
from .settings import with_settings

Language = Annotated[Path, typer.Argument(help="A checkpoint folder (or a run's folder), or an ONNX folder.")]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """The fields of `generation.options.Options` that have to do with one continuation."""

    max_new_tokens: int | None = None
    """Most new tokens; unset: those of the prompt + 50."""
    min_new_tokens: int = 0
    """Fewest new tokens, the end token counted."""
    sample: bool = False
    """Draw tokens at random instead of taking the best."""
    temperature: float = 1.0
    """Of sampling; below 1 is safer."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this probability."""
    seed: int = 0
    """Seed of sampling."""
    beam: int = 1
    """Hypotheses kept; 1 is greedy, and its text is shown as it is decided."""

    def options(self) -> dict[str, Any]:
        """For a search, checked: `UserError` says what is wrong with them."""
        from mlx_transformer.generation.options import Options

        Options(**vars(self))
        return dict(vars(self))


@with_settings
def generate(
    model: Language,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; none: all of standard input is one.", show_default=False)
    ] = None,
    *,
    search: GenerateSettings,
    stop: Annotated[list[str] | None, typer.Option(help="End before this word; may be given several times.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Write each prompt and its text as JSON.")] = False,
    runtime: RuntimeSettings,
) -> None:
    """Go on from a prompt, with a decoder alone; the text is written as it is decided."""
    options = search.options()  # checked before the model is read
    opened = open_folder(model, **vars(runtime))
    prompts = prompt or [_standard_input("the prompt")]
    if json:
        for given, text in zip(prompts, opened.complete(prompts, stop=stop or (), **options), strict=True):
            print(to_json.dumps({"prompt": given, "text": text}, ensure_ascii=False), flush=True)
    elif len(prompts) == 1 and options["beam"] == 1:
        for piece in opened.stream(prompts[0], stop=stop or (), **options):
            print(piece, end="", flush=True)
        print()
    else:
        print("\n".join(opened.complete(prompts, stop=stop or (), **options)))


@with_settings
def fill(
    model: Language,
    text: Annotated[
        list[str] | None, typer.Argument(help="Text with <mask> in it; none: lines of stdin.", show_default=False)
    ] = None,
    *,
    top_k: Annotated[int, typer.Option(help="Guesses for each <mask>.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Write each line's guesses as JSON.")] = False,
    runtime: RuntimeSettings,
) -> None:
    """Find hidden words, with an encoder: for each <mask> its likeliest tokens, with their probabilities."""
    opened = open_folder(model, **vars(runtime))
    lines = text or _standard_input("the text").split("\n")
    for line, masks in zip(lines, opened.fill(lines, top_k), strict=True):
        if json:
            masked = [[asdict(guess) for guess in guesses] for guesses in masks]
            print(to_json.dumps({"text": line, "masks": masked}, ensure_ascii=False), flush=True)
            continue
        for guesses in masks:
            for guess in guesses:
                print(f"{guess.probability:.4f}\t{guess.token.strip()}\t{guess.text}", flush=True)


def _standard_input(what: str) -> str:
    if sys.stdin is None:
        raise UserError(f"standard input is closed; give {what} as an argument")
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input, byte {error.start + 1}: not UTF-8; convert it, e.g. with iconv") from None
