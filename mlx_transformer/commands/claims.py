"""claims: what is said of the Transformer, row by row. The rows lie in docs/claims, beside the package in a clone."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from mlx_transformer.system.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs"

Rows = Annotated[
    list[str] | None, typer.Argument(metavar="ROW", help="Numbers and ranges, 7 or 5-9.", show_default="all")
]


def claims(
    rows: Rows = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="An HTML page to write.", show_default="none")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the figures as PNG and SVG.", show_default="none")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The trained model that some rows look at.", show_default="quickstart")
    ] = None,
    sentences: Annotated[
        list[str] | None,
        typer.Option("--sentence", help="Where to look at that model's attention.", show_default="dates"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier page, and earlier figures.")] = False,
) -> None:
    """Compute what is said of the Transformer, row by row, beside what is claimed; in a clone of the repository."""
    if not (DOCS / "claims" / "command.py").is_file():
        raise UserError(
            "claims lie in docs/claims of the project's repository and are not installed with the package: run this in "
            "a clone"
        )
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    page, folder, looked_at = (None if path is None else str(path) for path in (out, figures, model))
    import_module("claims.command").claims(rows or [], page, folder, force, looked_at, sentences or [])
