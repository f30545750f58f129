"""The command `validate`, for the command line of either side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich import console as rich_console

from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.manifest import verify_file, verify_files
from mlx_transformer.spec.terminal import Console

from .compare import compare
from .engines.foreign_engine import parse_names


def runtime_names(given: str | None) -> list[str] | None:
    """Names separated by commas, as on a command line; None, the default ones, stays None."""
    if given is None:
        return None
    names = [name.strip() for name in given.split(",")]
    twice = [name for name in names if names.count(name) > 1]
    if not all(names) or twice:
        what = f"{twice[0]!r} twice" if all(names) else "an empty name"
        raise UserError(f"--runtimes {given!r}: {what}; give names separated by commas")
    return names


def validate_command(
    checkpoint: str | Path,
    onnx: str | Path,
    json: str | Path | None = None,
    runtimes: Sequence[str] | None = None,
    seed: int | None = None,
    threads: int | None = None,
    console: rich_console.Console | None = None,
    html: str | Path | None = None,
    gradients: bool = False,
    names: str | None = None,
    verify: bool = True,
) -> int:
    """Compare, print the report, write it as JSON and HTML where asked; the exit status (see `report`).

    verify: first compare the files with their manifest's digests, if they have any: damage is no mismatch.
    Errors are one line on standard error.
    """
    try:
        if json is not None and html is not None and os.path.realpath(json) == os.path.realpath(html):
            raise UserError(f"{json}: can't be both, JSON and a page; give --json and --html different names")
        if verify:
            _verify(Path(onnx))
        report = compare(
            checkpoint, onnx, runtimes, seed, threads=threads, gradients=gradients, names=parse_names(names)
        )
        report.print(console)
        if json is not None:
            report.write(json)
        if html is not None:
            report.write_html(html)
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"validate: {error}", style="red", markup=False)
        return error.status
    return report.exit_code


def _verify(onnx: Path) -> None:
    """Of a folder all that its manifest lists; of a file what one beside it says of it."""
    if onnx.is_file():
        verify_file(onnx)
    else:
        verify_files(onnx / "onnx" if (onnx / "onnx").is_dir() else onnx)
