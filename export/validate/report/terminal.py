"""The report on the terminal: verdict, failures, weights, taps, tokens."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from export.validate.checks.gradients import BUDGET, worst_of_each
from export.validate.findings import TAPPED, Point

from .data import ReportData, short

GAP = 2  # characters between two columns
NARROWEST_NAMES = 26


def print_report(report: ReportData, console: Console) -> None:
    """Print the report, the verdict and failures first."""
    colour = "green" if report.equal else "red"
    console.print(Text.assemble(("validate: ", "bold"), (report.verdict, f"bold {colour}"), f"   seed {report.seed}"))
    for line in report.failures():
        console.print(Text(f"  {line}", style="red"), soft_wrap=True)
    for line in report.against:
        console.print(Text(f"  {line}"), soft_wrap=True)
    for line in report.notes:
        console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)
    if report.weights:
        console.print(_weights_table(report))
    if report.points:
        for table in _points_tables(report, console.width):
            console.print(table)
    for s in report.structures:
        counts = (
            f"{s.products} matrix products, {s.softmaxes} softmaxes, {s.parameters - len(s.unused)} parameters used"
        )
        counts += f", {s.attributes} attributes" if s.attributes else ""
        console.print(_mark(s.passed, f"{s.runtime}: {counts}"))
    for file in report.data_files:
        console.print(_mark(file.passed, file.summary))
    if report.files is not None:
        console.print(_mark(report.files.passed, report.files.result))
    if report.gradients:
        kinds = list(worst_of_each(list(report.gradients)))
        text = f"mlx: gradients of {len(kinds)} kinds of parameters, {len(report.gradients)} derivatives"
        passed = all(g.passed for g in kinds)
        console.print(_mark(passed, f"{text}; worst {max(g.error for g in kinds) / BUDGET:.2f} of the budget"))
    if report.tokens:
        console.print(_tokens_table(report))
    for place in report.placements:
        console.print(Text(place.summary, style="dim"), soft_wrap=True)
    if report.chat_template:
        console.print(Text(f"chat template: SHA-256 {report.chat_template}", style="dim"), soft_wrap=True)
    for name in report.absent:
        console.print(Text(f"not compared, because it isn't installed here: {name}", style="yellow"))
    console.print(Text(f"{len(report.inputs)} inputs: {'; '.join(report.inputs)}; {report.seconds:.1f} s", style="dim"))


def _weights_table(report: ReportData) -> Table:
    table = _table(["weights, bit for bit", "where"], ["parameters", "result"])
    for check in report.weights:
        table.add_row(check.runtime, check.where, str(check.count), _mark(check.passed, check.result))
    return table


def _points_tables(report: ReportData, width: int) -> list[Table]:
    """Make tables with a row for each tap and a column for each runtime: the worst rms and max ratio over all inputs.

    Rows with a mismatch come first, then taps, then other paths, e.g. the plain logits. Runtimes that don't fit side by
    side get another table.
    """
    worst: dict[tuple[str, str], Point] = {}
    for point in report.points:
        label = _label(point)
        known = worst.get((label, point.runtime))
        if known is None or point.worst.share > known.worst.share:
            worst[label, point.runtime] = point
    rows: dict[str, dict[str, Point]] = {}
    for (label, runtime), point in worst.items():
        rows.setdefault(label, {})[runtime] = point
    ordered = sorted(rows, key=lambda label: (all(p.passed for p in rows[label].values()), ", " in label))
    names = max(map(cell_len, ordered))
    columns = {r.name: {label: _ratios(rows[label].get(r.name)) for label in ordered} for r in report.runtimes}
    needed = {name: max(cell_len(cell.plain) for cell in cells.values()) + GAP for name, cells in columns.items()}
    tables, left = [], list(columns)
    while left:
        here = [left.pop(0)]
        while left and min(names, NARROWEST_NAMES) + sum(needed[name] for name in (*here, left[0])) + GAP <= width:
            here.append(left.pop(0))
        table = _table(["tap"], [f"{name}, rms and max" for name in here], wrapped_head=True)
        for label in ordered:
            cells = [columns[name][label] for name in here]
            if any(cell.plain for cell in cells):
                table.add_row(label, *cells)
        tables.append(table)
    budgets = ", ".join(f"{r.name} ({r.arithmetic}) {r.budget.rms:g} and {r.budget.max:g}" for r in report.runtimes)
    tables[-1].caption = f"in units of float32's own error; budget: {budgets}"
    return tables


def _ratios(point: Point | None) -> Text:
    if point is None:
        return Text()
    m = point.worst
    return _mark(
        point.passed, "bits equal" if m.deviation.same_bits else f"{_figure(m.rms_ratio)} {_figure(m.max_ratio)}"
    )


def _figure(ratio: float) -> str:
    return f"{ratio:5.2f}" if ratio < 1000 else f"{ratio:.2e}"


def _label(point: Point) -> str:
    """Label a row. Tapped points of cached passes share a row with the worst of them; points over budget don't."""
    name = short(point.tap)
    if point.path == TAPPED:
        return name
    tapped = point.path.endswith(f", {TAPPED}")
    return f"all points, {point.path}" if tapped and point.passed else f"{name}, {point.path}"


def _table(names: list[str], figures: list[str], wrapped_head: bool = False) -> Table:
    """Make an empty table. On a narrow terminal names wrap, and figures are never cut.

    names, figures: heads of the columns. wrapped_head: heads of figures may wrap too, and figures are right-aligned.
    """
    table = Table(box=None, header_style="bold")
    for head in names:
        table.add_column(head, overflow="fold")
    for head in figures:
        if wrapped_head:
            table.add_column(head, justify="right", overflow="fold")
        else:
            table.add_column(head, no_wrap=True)
    return table


def _tokens_table(report: ReportData) -> Table:
    table = _table(["tokens", "search"], ["sentences", "tokens", "result"])
    for check in report.tokens:
        counts = str(check.sentences), str(check.tokens)
        table.add_row(check.runtime, check.search, *counts, _mark(check.passed, check.result))
    return table


def _mark(passed: bool, text: str) -> Text:
    return Text(f"{'✓' if passed else '✗'} {text}", style="green" if passed else "red")
