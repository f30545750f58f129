"""generate, fill, embed: decoders and encoders alone at work on text."""

from __future__ import annotations

import json as to_json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mlx_transformer.generation.options import Options
from mlx_transformer.generation.text_options import EmbedOptions
from mlx_transformer.system.errors import UserError

from .models import open_folder, open_model, run_on_lines
from .parameters import Argument, Option
from .settings import Embedding, Folder, LineFiles, RuntimeSettings, Shown, Texts, chosen

SEARCH = "max_new_tokens min_new_tokens sample temperature top_k top_p seed beam"


def generate(
    model: Folder,
    prompt: Annotated[
        list[str] | None, Argument(help="Prompts; none: all of standard input is one.", show_default=False)
    ] = None,
    *,
    stop: Annotated[list[str] | None, Option(help="End before this word; may be given several times.")] = None,
    json: Annotated[bool, Option("--json", help="Write each prompt and its text as JSON.")] = False,
    search: Annotated[Options, Shown("Search", SEARCH)],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Go on from a prompt, with a decoder alone; the text is written as it is decided."""
    options = chosen(search, SEARCH)  # checked before the model is read
    opened = open_folder(model, **vars(runtime))
    prompts = prompt or [_standard_input("the prompt")]
    if json:
        for beginning, text in zip(prompts, opened.complete(prompts, stop=stop or (), **options), strict=True):
            print(to_json.dumps({"prompt": beginning, "text": text}, ensure_ascii=False), flush=True)
    elif len(prompts) == 1 and search.beam == 1:
        for piece in opened.stream(prompts[0], stop=stop or (), **options):
            print(piece, end="", flush=True)
        print()
    else:
        print("\n".join(opened.complete(prompts, stop=stop or (), **options)))


def fill(
    model: Folder,
    text: Annotated[
        list[str] | None,
        Argument(help="Text with <mask> or [MASK] in it, each argument a line.", show_default=False),
    ] = None,
    *,
    files: LineFiles,
    top_k: Annotated[int, Option(help="Guesses for each <mask>.")] = 5,
    json: Annotated[bool, Option("--json", help="Write each line's guesses as JSON; OUT has them so.")] = False,
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Find hidden words, with an encoder: for each <mask> its likeliest tokens, with their probabilities."""
    from mlx_transformer.generation.files import fill_lines

    run_on_lines(
        "fill", model, text, files, runtime, lambda opened, out: fill_lines(opened, top_k, json or out is not None)
    )


@dataclass(frozen=True, kw_only=True)
class VectorFiles(LineFiles):
    """The same of `embed`."""

    out: Path | None = field(default=None, metadata={"option": ("--out", "-o")})
    """The file to write, JSON lines, or an array if it ends in .npy; it appears whole or not at all; unset: stdout."""


def embed(
    model: Embedding,
    text: Texts = None,
    *,
    files: VectorFiles,
    options: Annotated[EmbedOptions, Shown()],
    runtime: Annotated[RuntimeSettings, Shown("Runtime")],
) -> None:
    """Turn text into vectors, with an encoder: one line in, one vector out."""
    from mlx_transformer.generation.files import embed_lines

    make = lambda opened, out: embed_lines(opened, options, out)  # noqa: E731
    run_on_lines("embed", model, text, files, runtime, make, open_model)


def _standard_input(what: str) -> str:
    if sys.stdin is None:
        raise UserError(f"standard input is closed; give {what} as an argument")
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input, byte {error.start + 1}: not UTF-8; convert it, e.g. with iconv") from None
