"""Arguments and options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Backend = Literal["mlx", "onnx"]
PenaltyForm = Literal["gnmt", "length"]
Overlong = Literal["error", "truncate", "split", "skip"]
OverlongPair = Literal["error", "skip"]

Model = Annotated[
    Path, typer.Argument(help="A checkpoint folder (or a run's folder), an ONNX folder, or one file with the search.")
]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder, or the folder of a training run.")]
Onnx = Annotated[Path, typer.Argument(help="A folder written by `export`.")]
Force = Annotated[bool, typer.Option("--force", help="Replace another model that OUT holds.")]


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The fields of `generation.options.Options` that have to do with the best translation; not that class, as help
    needs no NumPy."""

    beam: int = 1
    """Hypotheses kept a sentence; 1 is greedy."""
    length_penalty: float = 0.6
    """Alpha of the length penalty; 0 compares bare probabilities."""
    penalty_form: PenaltyForm = "gnmt"
    """Of n tokens: ((5+n)/6)^alpha (gnmt) or n^alpha (length), as in transformers."""
    max_new_tokens: int | None = None
    """Most new tokens a sentence; unset: source length + 50."""

    def options(self) -> dict[str, Any]:
        """For a search, checked: `UserError` says what is wrong with them."""
        from mlx_transformer.generation.options import Options

        Options(**vars(self))
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class TranslateSettings(SearchSettings):
    """All fields of `generation.options.Options` but its bound on a batch's memory."""

    n_best: int = 1
    """Translations a sentence, tab-separated on its line, best first."""
    min_new_tokens: int = 0
    """Fewest new tokens a sentence, its end token counted."""
    early_stopping: bool = False
    """Stop a sentence once BEAM hypotheses are finished."""
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


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Where text comes from and goes to, and in which form; arguments of `generation.files.translate_stream`."""

    input: Path | None = None
    """Text, one sentence a line; unset: stdin."""
    output: Path | None = None
    """Where to write; a file appears whole or not at all; unset: stdout."""
    overlong: Overlong = "split"
    """What to do with a line longer than the model takes: translate its pieces, its beginning, nothing, or end."""
    scores: bool = False
    """Write each translation's score after it, separated by a tab: log p by the length penalty."""
    json: bool = False
    """Write each line as JSON, with source, translations and scores."""
    alignment: bool = False
    """Write after each translation which source word each of its words was made of: 0-0 1-2."""
    stream: bool = False
    """Write text as it is decided, line by line."""
    resume: bool = False
    """Continue what was interrupted on its way to OUTPUT."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """What runs a model."""

    backend: Backend | None = None
    """Runtime; unset: what MODEL is made for."""
    threads: int | None = None
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    precision: str | None = None
    """Which of an ONNX folder's precisions; unset: float32, or the only one."""
    verify: bool = True
    """Compare the files with the digests in their manifest."""
