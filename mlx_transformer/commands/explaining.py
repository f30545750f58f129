"""explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from export.settings import ExplainSettings
from mlx_transformer.generation.options import Options

from .settings import Shown

SEARCH = "beam length_penalty max_new_tokens"


def explain(
    model: Annotated[Path, typer.Argument(help="A checkpoint or run's folder, or an ONNX folder.")],
    texts: Annotated[
        list[str] | None, typer.Argument(help="The sentence, in quotes; for a decoder the prompt.", show_default=False)
    ] = None,
    *,
    settings: ExplainSettings,
    search: Annotated[Options, Shown("Search", SEARCH)],
) -> None:
    """Show what a model does with a sentence, on a page: attention, predictions, and how it searches."""
    from export.explain.command import explain as run

    print(run(model, texts or [], settings, search))
