"""A report as one page that needs nothing else: verdict, error against budget, worst elements, tokens, machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from export.validate.checks.gradients import BUDGET, worst_of_each
from export.validate.explain import explain
from export.validate.findings import Point, Tokens
from mlx_transformer import page as kit
from mlx_transformer.system.chart import colour

from .data import ReportData
from .plot import plot, series_of, short

WORST = 6  # elements shown for each runtime


def page(report: ReportData) -> str:
    """Return a self-contained HTML page."""
    sections = (_verdict, _plots, _worst, _weights, _structure, _data_files, _files, _tokens, _gradients, _runs)
    body = "".join(section(report) for section in sections)
    return kit.page("validate", f"validate: {report.verdict}", body, kit.neighbour_texts(__file__, "report.css"))


def _verdict(r: ReportData) -> str:
    names = " and ".join(runtime.name for runtime in r.runtimes)
    if r.equal:
        verb = "compute" if len(r.runtimes) > 1 else "computes"
        body = f"<p>{escape(names)} {verb} the same function as the float64 reference: {_summary(r)}.</p>"
        title = "Equal"
    else:
        lines = "".join(
            f"<li{' class=culprit' if ': culprit: ' in line else ''}>{escape(line)}</li>" for line in r.failures()
        )
        body = f"<p>{escape(names)} against the float64 reference.</p><ul>{lines}</ul>"
        title = "Mismatch"
    notes = "".join(f'<p class="note">{escape(line)}.</p>' for line in (*r.against, *r.notes))
    absent = "".join(f"<p>Not compared, because it isn't installed here: {escape(name)}.</p>" for name in r.absent)
    place = f"{escape(r.checkpoint)} against {escape(r.onnx)}" if r.onnx not in ("", "None") else escape(r.checkpoint)
    return (
        f'<div class="verdict {r.verdict}"><h1>{title}</h1>{body}{notes}{absent}'
        f'<p class="soft">{place} · seed {r.seed} · {r.seconds:.1f} s</p></div>'
    )


def _summary(r: ReportData) -> str:
    parts = []
    if r.weights:
        parts.append(f"{sum(check.count for check in r.weights)} parameters bit for bit")
    parts.append(f"{sum(point.inputs for point in r.points)} tensors within their budgets")
    if r.tokens:
        parts.append(f"{sum(check.tokens for check in r.tokens)} tokens the same")
    return ", ".join(parts)


def _plots(r: ReportData) -> str:
    taps = list(dict.fromkeys(point.tap for point in r.points))
    paths = list(dict.fromkeys(point.path for point in r.points))
    cards = []
    for runtime in r.runtimes:
        points = [p for p in r.points if p.runtime == runtime.name]
        if not points:
            continue
        drawn = series_of(points, paths)
        names = kit.key((colour(s.index), " = ".join(s.paths)) for s in drawn)
        budget = f"{runtime.arithmetic} on {runtime.device}: rms {runtime.budget.rms:g}, max {runtime.budget.max:g}"
        cards.append(
            kit.card(
                f'<h3>{escape(runtime.name)} <span class="soft">budget {escape(budget)} times the '
                f"reference's own error in that precision</span></h3>{names}{plot(drawn, taps)}"
            )
        )
    note = (
        "How much of its budget each point of the network used up, on the worst of all inputs. The measure is the "
        "error that the reference itself makes in single precision. Shaded: the decoder. Point at a dot to read it. "
        "Ways through the model that are too near each other to be told apart are one line."
    )
    return f'<h2>Error against budget</h2><p class="note">{note}</p>{"".join(cards)}'


def _worst(r: ReportData) -> str:
    worst: list[Point] = []
    for runtime in r.runtimes:
        points = [p for p in r.points if p.runtime == runtime.name and p.worst.deviation.index]
        points.sort(key=lambda p: (not p.passed, p.worst.share))
        each = {p.tap: p for p in points}  # of each tap the path on which it is worst
        worst += sorted(each.values(), key=_worst_first)[:WORST]
    # The column that the table is sorted by comes first: it is on a narrow screen too, where the rest is a finger's
    # move away.
    head = ("of its budget", "runtime", "point", "input", "element", "computed", "reference", "ulp")
    rows = map(_element, sorted(worst, key=_worst_first))
    return "<h2>Worst elements</h2>" + _table(head, rows, numbers=(0, 5, 6, 7))


def _worst_first(p: Point) -> tuple[bool, float]:
    return p.passed, -p.worst.share


def _element(p: Point) -> list[str]:
    d = p.worst.deviation
    share = _mark(p.passed, f"{p.worst.share:.2g}")
    place = f'<span title="{escape(p.tap)}">{escape(short(p.tap))}</span> ({escape(p.path)})'
    cells = [p.case, str(list(d.index)), f"{d.got:.9g}", f"{d.expected:.9g}", f"{d.ulp:.3g}"]
    return [share, escape(p.runtime), place, *map(escape, cells)]


def _weights(r: ReportData) -> str:
    rows = []
    for check in r.weights:
        result = "<br>".join([_mark(check.passed, "equal", "differ"), *map(escape, check.problems[:WORST])])
        digest = f'<code title="SHA-256 of names, types, shapes and values">{check.digest[:16]}</code>'
        rows.append([escape(check.runtime), escape(check.where), str(check.count), digest, result])
    note = "Every place that holds parameters, bit for bit against the checkpoint, and the SHA-256 of what it holds."
    head = ("runtime", "where", "parameters", "digest", "result")
    return _section("Weights", note, head, rows, (2,))


def _structure(r: ReportData) -> str:
    rows = []
    for s in r.structures:
        result = _mark(not s.problem, "as designed", escape(s.problem))
        used = f"{s.parameters - len(s.unused)} of {s.parameters}"
        rows.append([escape(s.runtime), str(s.products), str(s.softmaxes), used, str(s.attributes or ""), result])
    note = (
        "MLX's own trace and the ONNX graph against the architecture: every parameter on a way to the output, as many "
        "matrix products and softmaxes as there have to be. A fused attention counts as two products and one softmax. "
        "Attributes, such as an epsilon or an axis, are those of the architecture, exactly, in every graph."
    )
    head = ("runtime", "matrix products", "softmaxes", "parameters used", "attributes", "result")
    return _section("Structure", note, head, rows, (1, 2, 3, 4))


def _data_files(r: ReportData) -> str:
    rows = []
    for file in r.data_files:
        result = _mark(file.passed, "every byte", "<br>".join(map(escape, file.problems[:WORST])))
        rows.append([escape(file.file), f"{file.size:,}", *map(str, (file.graphs, file.tensors, file.padding)), result])
    note = "Every byte of a data file is a tensor's of some graph, or a zero that aligns the next tensor."
    head = ("data file", "bytes", "graphs", "tensors", "padding", "read")
    return _section("Data files", note, head, rows, (1, 2, 3, 4))


def _files(r: ReportData) -> str:
    if r.files is None:
        return ""
    result = _mark(r.files.passed, "all equal", "<br>".join(map(escape, r.files.problems)))
    note = (
        "Settings, tokenizer, labels, limits and what other runtimes read: each file around the graphs is made of the "
        "checkpoint again, by the choices that the package records."
    )
    return _section("Files", note, ("files", "result"), [[str(r.files.compared), result]], (0,))


def _tokens(r: ReportData) -> str:
    rows = []
    for check in r.tokens:
        cells = [escape(check.runtime), escape(check.search), str(check.sentences), str(check.tokens)]
        rows.append([*cells, _mark(check.passed, check.result)])
    note = "Tokens of each search below; another choice than the reference's is accepted only where it sees a tie."
    head = ("runtime", "search", "sentences", "tokens", "result")
    return _section("Tokens", note, head, rows, (2, 3)) + "".join(_parting(check) for check in r.tokens)


def _gradients(r: ReportData) -> str:
    rows = []
    for g in worst_of_each(list(r.gradients)):
        share = _mark(g.passed, f"{g.error / BUDGET:.2g}")
        rows.append([*map(escape, (g.parameter, g.direction, f"{g.got:.9g}", f"{g.expected:.9g}")), share])
    note = "MLX's derivatives of the training loss against differences of the float64 reference, each kind's worst."
    head = ("parameter", "direction", "MLX", "differences", "of its budget")
    return _section("Gradients", note, head, rows, (2, 3, 4))


def _parting(check: Tokens) -> str:
    if not check.divergences:
        lines = [*check.problems, *check.ties]
        items = "".join(f"<li>{escape(line)}</li>" for line in lines[:WORST])
        title = f"<h3>{escape(check.runtime)}, {escape(check.search)}</h3>"
        return kit.card(f"{title}<ul>{items}</ul>") if lines else ""
    cards = []
    for p in check.divergences[:WORST]:
        first = next((i for i, (a, b) in enumerate(zip(p.got, p.expected, strict=False)) if a != b), None)
        if first is None:
            first = min(len(p.got), len(p.expected))
        tie = "" if p.problem else " (a certified tie)"
        rows = [["computed", _row(p.got, first)], ["reference", _row(p.expected, first)]]
        title = f"<h3>{escape(check.runtime)}, {escape(check.search)}, sentence {p.sentence}{tie}</h3>"
        cards.append(kit.card(f'{title}<p class="key">{escape(p.summary)}</p>{kit.data_table((), rows)}'))
    return "".join(cards)


def _row(tokens: Sequence[str], first: int) -> str:
    spans = (f"<span{' class=parts' if i == first else ''}>{escape(token)}</span>" for i, token in enumerate(tokens))
    return f'<div class="tokens mono">{"".join(spans)}</div>'


def _runs(r: ReportData) -> str:
    rows = []
    for place in r.placements:
        nodes = ", ".join(f"{count} on {provider}" for provider, count in place.providers.items()) or place.device
        copies = ", ".join(f"{count} in {graph}" for graph, count in place.copies.items()) or "none"
        rows.append([*map(escape, (place.runtime, nodes, copies, place.tf32, place.threads))])
    head = ("runtime", "operations", "copies between memories", "TF32", "threads")
    inputs = "".join(f"<li>{escape(text)}</li>" for text in r.inputs)
    versions = kit.data_table((), [(escape(name), escape(version)) for name, version in r.versions.items()])
    return (
        f"<h2>Where it ran</h2>{_table(head, rows)}"
        f"<h2>Inputs</h2><p class=note>Fresh random numbers of seed {r.seed}: "
        "name (rows x tokens, and those of the target).</p>"
        f"{kit.card(f'<ul>{inputs}</ul>')}<h2>Versions</h2>{kit.card(versions)}"
        f"<h2>The rule</h2><details><summary>in words</summary><pre>{escape(explain())}</pre></details>"
    )


def _section(title: str, note: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """Return a table under its title and a note; nothing where it would be empty."""
    return f'<h2>{title}</h2><p class="note">{note}</p>{_table(head, rows, numbers)}' if rows else ""


def _mark(passed: bool, good: str, bad: str = "") -> str:
    """Return HTML in the colour of the verdict; bad: the other text of one that failed."""
    return f'<span class="good">{good}</span>' if passed else f'<span class="bad">{bad or good}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    return kit.card(kit.data_table(head, rows, numbers))
