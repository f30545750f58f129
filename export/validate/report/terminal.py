"""A report on the terminal: verdict, what went wrong, weights, taps, tokens."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from export.validate.checks.gradients import BUDGET, worst_of_each
from export.validate.findings import TAPPED, Point

from .data import ReportData


def print_report(report: ReportData, console: Console) -> None:
    """Print the verdict first, then what supports it."""
    colour = "green" if report.equal else "red"
    console.print(Text.assemble(("validate: ", "bold"), (report.verdict, f"bold {colour}"), f"   seed {report.seed}"))
    for line in report.failures():
        console.print(Text(f"  {line}", style="red"), soft_wrap=True)
    for line in report.notes:
        console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)
    if report.weights:
        console.print(_weights_table(report))
    if report.points:
        console.print(_points_table(report))
    for s in report.structures:
        counts = (
            f"{s.products} matrix products, {s.softmaxes} softmaxes, {s.parameters - len(s.unused)} parameters used"
        )
        console.print(_mark(s.passed, f"{s.runtime}: {counts}"))
    if report.gradients:
        kinds = list(worst_of_each(list(report.gradients)))
        text = f"mlx: gradients of {len(kinds)} kinds of parameters, {len(report.gradients)} derivatives"
        passed = all(g.passed for g in kinds)
        console.print(_mark(passed, f"{text}; worst {max(g.error for g in kinds) / BUDGET:.2f} of the budget"))
    if report.tokens:
        console.print(_tokens_table(report))
    for place in report.placements:
        console.print(Text(place.summary, style="dim"), soft_wrap=True)
    for name in report.absent:
        console.print(Text(f"not compared, because it isn't installed here: {name}", style="yellow"))
    console.print(Text(f"{len(report.inputs)} inputs: {'; '.join(report.inputs)}; {report.seconds:.1f} s", style="dim"))


def _weights_table(report: ReportData) -> Table:
    table = Table("weights, bit for bit", "where", "parameters", "result", box=None, header_style="bold")
    for check in report.weights:
        result = "equal" if check.passed else f"{len(check.problems)} differ"
        table.add_row(check.runtime, check.where, str(check.count), _mark(check.passed, result))
    return table


def _points_table(report: ReportData) -> Table:
    """A row for each tap, a column for each runtime: worst rms and max ratio over all inputs; then the logits of the
    other paths."""
    runtimes = [r.name for r in report.runtimes]
    table = Table(Column("tap", no_wrap=True), box=None, header_style="bold")
    for name in runtimes:
        table.add_column(f"{name}, rms and max", justify="right", no_wrap=True)
    worst: dict[tuple[str, str], Point] = {}
    for point in report.points:
        label = _label(point)
        known = worst.get((label, point.runtime))
        if known is None or point.worst.share > known.worst.share:
            worst[label, point.runtime] = point
    rows: dict[str, dict[str, Text]] = {}
    for (label, runtime), point in worst.items():
        m = point.worst
        ratios = "bits equal" if m.deviation.same_bits else f"{m.rms_ratio:5.2f} {m.max_ratio:5.2f}"
        rows.setdefault(label, {})[runtime] = _mark(point.passed, ratios)
    for label in sorted(rows, key=lambda label: ", " in label):
        table.add_row(label, *(rows[label].get(name, "") for name in runtimes))
    budgets = ", ".join(f"{r.name} ({r.arithmetic}) {r.budget.rms:g} and {r.budget.max:g}" for r in report.runtimes)
    table.caption = f"in units of float32's own error; budget: {budgets}"
    return table


def _label(point: Point) -> str:
    """The points of cached passes share a row, the worst of them in it, except those over budget."""
    if point.path == TAPPED:
        return point.tap
    tapped = point.path.endswith(f", {TAPPED}")
    return f"all points, {point.path}" if tapped and point.passed else f"{point.tap}, {point.path}"


def _tokens_table(report: ReportData) -> Table:
    table = Table("tokens", "search", "sentences", "tokens", "result", box=None, header_style="bold")
    for check in report.tokens:
        result = "equal" if not check.ties else f"equal, {len(check.ties)} at a certified tie"
        text = result if check.passed else f"{len(check.problems)} differ"
        table.add_row(check.runtime, check.search, str(check.sentences), str(check.tokens), _mark(check.passed, text))
    return table


def _mark(passed: bool, text: str) -> Text:
    return Text(f"{'✓' if passed else '✗'} {text}", style="green" if passed else "red")
