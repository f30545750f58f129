"""Commands that show models without changing them: explain, compare, info, claims."""

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
from mlx_transformer.generation.text_options import Overlong
from mlx_transformer.system.errors import UserError

from .models import opener, runs_onnx
from .parameters import Argument, Option
from .settings import Shown, Source, chosen
from .text import BEST

if TYPE_CHECKING:
    from mlx_transformer.report.result import Comparison
    from mlx_transformer.report.worker import Served

EXPLAINED = "beam length_penalty max_new_tokens"
"""Search options of `explain`."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
"""The docs folder of a clone, with the code of `claims`."""

First = Annotated[
    Path,
    Argument(
        help="Model A: a checkpoint, a run's folder, an ONNX folder, or a file from `export --search`.",
        check=check_there,
    ),
]
Second = Annotated[Path, Argument(help="Model B, likewise; it may be A in another precision.", check=check_there)]


def explain(
    model: Annotated[
        Path | None,
        Argument(
            help="A checkpoint, a run's folder or an ONNX folder; without it, three built-in examples.",
            check=check_there,
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        Argument(
            help="Sentence in quotes; for a decoder the prompt, for an encoder one or two texts.", show_default=False
        ),
    ] = None,
    *,
    settings: ExplainSettings,
    search: Annotated[Options, Shown("Search", EXPLAINED)],
) -> None:
    """Write a page that follows a sentence through a model: every vector and sum, attention, predictions, and the
    search."""
    from export.explain.command import explain as run

    print(run(model, texts or [], settings, **chosen(search, EXPLAINED)))


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How both models are opened and fed, and which extra files are written."""

    reference: Path | None = None
    """Reference translations of the source, line by line; without them nothing is scored."""
    json: Path | None = None
    """JSON file to write all results to."""
    overlong: Overlong = "error"
    """What to do with a line longer than a model takes."""
    batch: int = 32
    """Lines per batch."""
    precision_a: PrecisionName | None = None
    """Precision of A. ONNX folder: any that it holds (unset: float32, or the only one). Checkpoint: float32, float16 or
    bfloat16 (unset: as stored)."""
    precision_b: PrecisionName | None = None
    """Precision of B, likewise."""
    threads: int | None = None
    """ONNX Runtime's threads per operator; unset: one per core."""
    verify: bool = True
    """Check the models' files against the SHA-256 digests in their manifests."""
    force: bool = False
    """Overwrite an earlier page and JSON file."""


def compare(
    a: First,
    b: Second,
    *,
    source: Source,
    out: Annotated[Path, Option("--out", "-o", help="HTML page to write.")] = Path("compare.html"),
    settings: CompareSettings,
    search: Annotated[Options, Shown("Search", BEST)],
) -> None:
    """Compare two models, precisions or runtimes on the same text.

    Reports scores with a significance test, differing lines, speed, memory and sizes.
    """
    import json as to_json

    from mlx_transformer.core.outputs import Kind, claim, holds_object, page_kind
    from mlx_transformer.data.corpus import read_lines, read_parallel
    from mlx_transformer.report.comparing import compare as run
    from mlx_transformer.report.comparing import page
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
        raise UserError("--threads is for ONNX Runtime, but both models are checkpoints: leave it out")
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
    if precision is not None and model.is_file():
        raise UserError(f"{model}: --precision-{letter} is for folders: leave it out")
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
    path: Annotated[
        Path, Argument(help="A checkpoint, a run's folder, an ONNX folder or an ONNX file.", check=check_there)
    ],
    *,
    as_json: Annotated[bool, Option("--json", help="Print it as a JSON object.")] = False,
) -> None:
    """Describe a model: its kind, config, files, sizes and parameters."""
    from export.package.plan import describe_graphs
    from mlx_transformer.system.progress import Console

    from .info import describe, problems_of

    try:
        description = describe(path, describe_graphs)
    except UserError as error:
        if (problems := problems_of(error)) is not None:
            Console().print(problems)
        raise
    if as_json:
        print(description.json())
    else:
        Console().print(description)


def claims(
    rows: Annotated[
        list[str] | None,
        Argument(metavar="ROW", help="Rows to compute: numbers or ranges, e.g. 7 or 5-9.", show_default="all"),
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="HTML page to write.", show_default="none")] = None,
    figures: Annotated[
        Path | None, Option(help="Folder for the figures as PNG and SVG files.", show_default="none")
    ] = None,
    model: Annotated[
        Path | None, Option(help="Trained model, which some rows need.", show_default="quickstart")
    ] = None,
    sentences: Annotated[
        list[str] | None,
        Option("--sentence", help="Sentence for the model's attention; repeat it for several.", show_default="dates"),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an earlier page, and earlier figures.")] = False,
) -> None:
    """Compute well-known claims about the Transformer, one row each, and show them beside the results.

    Needs a clone of the repository.
    """
    if not (DOCS / "claims" / "command.py").is_file():
        raise UserError(
            "the code of claims is not installed with the package, only in docs/claims of the repository: run this in "
            "a clone"
        )
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    page, folder, looked_at = (None if path is None else str(path) for path in (out, figures, model))
    import_module("claims.command").claims(rows or [], page, folder, force, looked_at, sentences or [])
