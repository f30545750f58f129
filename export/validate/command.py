"""The command `validate` of both packages' command lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import console as rich_console

from export.runtime.folder import verify_export
from export.settings import ValidateSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import Console, quiet_progress

from .compare import compare
from .report import claim_reports
from .report.data import note_in_cards


def runtime_names(chosen: str | Sequence[str] | None) -> list[str] | None:
    """Split runtime names at commas, e.g. "mlx,onnxruntime". Lists are copied; None means the default runtimes."""
    if chosen is None or not isinstance(chosen, str):
        return None if chosen is None else list(chosen)
    names = [name.strip() for name in chosen.split(",")]
    twice = [name for name in names if names.count(name) > 1]
    if not all(names) or twice:
        what = f"{twice[0]!r} twice" if all(names) else "an empty name"
        raise UserError(f"--runtimes {chosen!r}: {what}; give names separated by commas")
    return names


def validate_command(
    checkpoint: str | Path,
    onnx: str | Path,
    *,
    console: rich_console.Console | None = None,
    **settings: Any,
) -> int:
    """Compare, print the report and return the exit status (see `report`).

    Writes the report as JSON and HTML if asked, and the verdict into the model cards of both folders. By default files
    are first verified by their manifest's digests, so a damaged file is an error (status 2) and no mismatch. Errors are
    printed in a single line on standard error.

    settings: fields of `export.settings.ValidateSettings`, e.g. runtimes=["mlx"], json="report.json".
    """
    try:
        chosen = ValidateSettings(**settings)
        json, html = chosen.json, chosen.html
        if json is not None and html is not None and os.path.realpath(json) == os.path.realpath(html):
            raise UserError(f"{json}: can't be both, JSON and a page; give --json and --html different names")
        first, second = claim_reports(json, html, chosen.force, Path(checkpoint), Path(onnx))
        if chosen.verify:
            verify_export(Path(onnx))
        with quiet_progress("validate") as watch:
            report = compare(checkpoint, onnx, runtime_names(chosen.runtimes), chosen.seed, chosen, watch=watch)
        if first is not None:
            report.write(first)
        if second is not None:
            report.write_html(second)
        try:
            note_in_cards(report)
        except UserError as error:  # e.g. a read-only folder: it can still be equal
            Console(stderr=True, soft_wrap=True).print(f"validate: {error}", style="yellow", markup=False)
        report.print(console)  # last: the reader may have closed the pipe, e.g. `| head`
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"validate: {error}", style="red", markup=False)
        return error.status
    return report.exit_code
