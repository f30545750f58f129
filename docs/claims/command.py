"""The rows of the table, computed now: as text, as a page, as a folder of figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_transformer.core.outputs import Kind, claim, page_kind
from mlx_transformer.system.durable import Output, replace_folder, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.process import printable

from . import page
from .drawing import Table, as_figure, inline_svg, png, style, svg
from .printing import as_text
from .row import Row
from .table import called, chosen, computed
from .trained import Trained, open_trained

QUICKSTART = "quickstart"
"""Where a trained model is looked for if none is named."""
FILE = re.compile(r"\d\d-[\w-]+\.(png|svg)")


def claims(
    rows: list[str],
    out: str | None,
    figures: str | None,
    force: bool,
    model: str | None = None,
    sentences: Sequence[str] = (),
) -> None:
    """Print the chosen rows (all without any), and with `out` write a page, with `figures` a folder of PNG and SVG.

    `model`: a checkpoint or a run's folder, for the rows about a trained one; `sentences`: what its attention is looked
    at in. `UserError` for a row that there isn't, a model that can't be read, a sentence that is too long for it,
    figures without matplotlib, and for anything in the way of what is written.
    """
    wanted = chosen(rows)
    read = None if model is None else Path(model)
    page_output = None if out is None else claim(out, page_kind("claims"), force, read)
    pictures = Kind("folder of figures", _ours, folder=True)
    folder = None if figures is None else claim(figures, pictures, force, read)
    if page_output is None and folder is None:
        for row, _, text, _ in _computed(wanted, model, sentences, drawn=False):
            print(printable(text), end="\n\n" if row is not wanted[-1] else "\n", flush=True)
        return
    with style():
        _write(wanted, model, sentences, page_output, folder)


def _write(
    wanted: list[Row], model: str | None, sentences: Sequence[str], out: Output | None, figures: Output | None
) -> None:
    """Both are computed first, so that nothing is written where something fails."""
    articles, files = [], {}
    for row, drawing, text, article in _computed(wanted, model, sentences, drawn=True):
        print(printable(text), end="\n\n", flush=True)
        articles.append(article)
        if drawing is not None and figures is not None:
            name = f"{row.number:02}-{row.picture.replace('_', '-')}"
            files[f"{name}.png"], files[f"{name}.svg"] = png(drawing), svg(drawing).encode()
    if out is not None:
        write_text(out, page.page(articles, wanted))
        print(f"{out}: {len(wanted)} row{'' if len(wanted) == 1 else 's'}")
    if figures is not None:
        if not files:
            raise UserError(f"{figures}: none of these rows has a figure; choose others")
        with replace_folder(figures) as folder:
            for name, data in files.items():
                (folder / name).write_bytes(data)
        print(f"{figures}: {len(files)} files")


def _computed(
    wanted: list[Row], model: str | None, sentences: Sequence[str], drawn: bool
) -> Iterator[tuple[Row, Any, str, str]]:
    """(row, its figure if no row before it had the same, text, article); one by one, for some take seconds."""
    trained, reason = _trained(wanted, model, sentences)
    first: dict[Any, int] = {}
    for row in wanted:
        found, why, shown, html = None, reason, None, ""
        arguments = [trained] if row.trained else []
        try:
            if not row.trained or trained is not None:
                found = computed(row, *arguments)
                if row.shown in first:
                    html = page.drawn_above(first[row.shown])
                elif row.shown is not None and (drawn or row.table):
                    first[row.shown] = row.number
                    shown = called(row.shown, *arguments)
        except UserError as error:  # this model doesn't do for this row
            if not row.trained:
                raise
            found, why = None, str(error)
        lines: tuple[tuple[str, ...], ...] = ()
        figure = shown
        if isinstance(shown, Table):
            lines = (shown.head, *shown.rows)
            html = page.table(shown.head, shown.rows, row.number)
            figure = as_figure(shown) if drawn else None
        elif shown is not None:
            html = page.drawn(inline_svg(shown, f"f{row.number}", row.claim), row.number)
        yield row, figure, as_text(row, found, lines, why), page.article(row, found, html, why)


def _trained(wanted: list[Row], model: str | None, sentences: Sequence[str]) -> tuple[Trained | None, str]:
    """The model that rows about a trained one look at, or why there is none."""
    if not any(row.trained for row in wanted):
        return None, ""
    if model is None and not Path(QUICKSTART, "model").is_dir():
        return None, f"needs a trained model: make quickstart, or --model RUN (there is no {QUICKSTART}/ here)"
    return open_trained(Path(model or QUICKSTART), sentences), ""


def _ours(folder: Path) -> bool:
    return all(path.is_file() and FILE.fullmatch(path.name) for path in folder.iterdir())
