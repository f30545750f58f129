"""explain, compare, info, claims: what models are and do, and what is said of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from export.settings import ExplainSettings, PrecisionName
from mlx_transformer.core.folders import check_there
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation.arguments import Overlong
from mlx_transformer.system.errors import UserError

from .models import opener, runs_onnx
from .parameters import Argument, Option
from .settings import Shown, Source, chosen
from .text import BEST

if TYPE_CHECKING:
    from mlx_transformer.report.result import Comparison
    from mlx_transformer.report.worker import Served

EXPLAINED = "beam length_penalty max_new_tokens"
"""The options of the search that `explain` shows."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
"""Where the rows of `claims` lie, in `claims`: beside the package in a clone."""

First = Annotated[
    Path,
    Argument(
        help="A: a checkpoint folder (or a run's folder), an ONNX folder, or one file with the search.",
        check=check_there,
    ),
]
Second = Annotated[Path, Argument(help="Likewise, or the same folder with another precision.", check=check_there)]


def explain(
    model: Annotated[
        Path | None,
        Argument(help="A checkpoint or run's folder, or an ONNX folder; unset: three that ship.", check=check_there),
    ] = None,
    texts: Annotated[
        list[str] | None,
        Argument(
            help="The sentence, in quotes; for a decoder the prompt; an encoder also reads two.", show_default=False
        ),
    ] = None,
    *,
    settings: ExplainSettings,
    search: Annotated[Options, Shown("Search", EXPLAINED)],
) -> None:
    """Follow a word through a model on a page: every vector and sum, attention, predictions, and how it searches."""
    from export.explain.command import explain as run

    print(run(model, texts or [], settings, **chosen(search, EXPLAINED)))


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How both are opened and fed, and what else is written."""

    reference: Path | None = None
    """Translations of the source, line by line; without them there are no scores."""
    json: Path | None = None
    """Write it all to this file as JSON."""
    overlong: Overlong = "error"
    """The treatment of a line longer than the model takes."""
    batch: int = 32
    """Lines that both translate at once."""
    precision_a: PrecisionName | None = None
    """Which of A's precisions, where A is an ONNX folder; unset: float32, or the only one."""
    precision_b: PrecisionName | None = None
    """Which of B's; unset: float32, or the only one."""
    threads: int | None = None
    """Threads of one ONNX Runtime operator; unset: one for each core."""
    verify: bool = True
    """Compare the files with the digests in their manifests."""
    force: bool = False
    """Replace an earlier page, and earlier JSON."""


def compare(
    a: First,
    b: Second,
    *,
    source: Source,
    out: Annotated[Path, Option("--out", "-o", help="The HTML page to write.")] = Path("compare.html"),
    settings: CompareSettings,
    search: Annotated[Options, Shown("Search", BEST)],
) -> None:
    """Compare two models, precisions or runtimes on the same text: scores and whether they differ by chance, the lines
    that differ, speed, memory and sizes."""
    import json as to_json

    from mlx_transformer.core.outputs import Kind, claim, holds_object, page_kind
    from mlx_transformer.data.corpus import read_lines, read_parallel
    from mlx_transformer.report.comparing import compare as run
    from mlx_transformer.report.comparison_page import page
    from mlx_transformer.system.durable import write_text
    from mlx_transformer.system.progress import quiet_progress

    options, reference, json = chosen(search, BEST), settings.reference, settings.json
    if settings.batch < 1:
        raise UserError("{batch} must be at least 1", batch=settings.batch)
    if json is not None and json.resolve() == out.resolve():
        raise UserError(f"{out}: --out and --json need two names")
    read = (source, reference, a, b)
    page_output = claim(out, page_kind("compare"), settings.force, *read)
    as_json = Kind("comparison", holds_object("a", "b", "lines", "differing"))
    json_output = None if json is None else claim(json, as_json, settings.force, *read)
    first, second = _opener_of(a, "a", settings), _opener_of(b, "b", settings)
    if settings.threads is not None and not any(runs_onnx(model) for model in (a, b)):
        raise UserError("--threads is for ONNX Runtime, and both are checkpoints: leave it out")
    references = None
    if reference is None:
        lines = read_lines(source)
    else:
        pairs = read_parallel(source, reference)
        lines, references = pairs.source, pairs.target
    with quiet_progress("compare") as watch:
        comparison = run(
            first, second, lines, references, batch=settings.batch, overlong=settings.overlong, watch=watch, **options
        )
    write_text(page_output, page(comparison))
    if json_output is not None:
        write_text(json_output, to_json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False) + "\n")
    _print(comparison)
    print(f"{out}: {len(comparison.sentences):,} of {comparison.lines:,} lines differ")


def _opener_of(model: Path, letter: str, settings: CompareSettings) -> tuple[str, Callable[[], Served]]:
    precision = getattr(settings, f"precision_{letter}")
    if precision is not None and (model.is_file() or not runs_onnx(model)):
        raise UserError(f"{model}: --precision-{letter} chooses one of an ONNX folder's precisions: leave it out")
    return opener(model, precision, settings.threads if runs_onnx(model) else None, settings.verify)


def _print(comparison: Comparison) -> None:
    from rich.table import Table

    from mlx_transformer.report.result import rows, sentence_of
    from mlx_transformer.system.progress import Console

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", overflow="fold")
    for head in ("A", "B", "B beside A"):
        table.add_column(head, overflow="fold", justify="left" if head == "B beside A" else "right")
    for row in rows(comparison):
        table.add_row(*row)
    console = Console()
    console.print(sentence_of(comparison), markup=False)
    console.print(table)


def info(
    path: Annotated[Path, Argument(help="A checkpoint, a run's folder, an ONNX folder or file.", check=check_there)],
) -> None:
    """Describe a model: what it is, its config, sizes and parameters."""
    from export.package.plan import describe_graphs
    from mlx_transformer.system.progress import Console

    from .info import describe, problems_of

    try:
        Console().print(describe(path, describe_graphs))
    except UserError as error:
        if (problems := problems_of(error)) is not None:
            Console().print(problems)
        raise


def claims(
    rows: Annotated[
        list[str] | None, Argument(metavar="ROW", help="Numbers and ranges, 7 or 5-9.", show_default="all")
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="An HTML page to write.", show_default="none")] = None,
    figures: Annotated[Path | None, Option(help="Folder for the figures as PNG and SVG.", show_default="none")] = None,
    model: Annotated[
        Path | None, Option(help="The trained model that some rows look at.", show_default="quickstart")
    ] = None,
    sentences: Annotated[
        list[str] | None,
        Option("--sentence", help="Where to look at that model's attention.", show_default="dates"),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an earlier page, and earlier figures.")] = False,
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
