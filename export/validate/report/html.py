"""The report as a self-contained HTML page: verdict, error against budget, worst elements, tokens, machines.

The plots show error against budget along the network, an inline SVG for each runtime. The height of a dot is the share
of the budget used up by the worst input, on a logarithmic axis; the dashed line is the budget. Each path through the
model (e.g. the full pass, cached passes) has its own line; lines that look the same are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from export.validate.checks.gradients import BUDGET, worst_of_each
from export.validate.findings import Point, Tokens
from export.validate.rule import explain
from mlx_transformer import page as kit
from mlx_transformer.system.chart import colour

from .data import ReportData, short

WORST = 6  # elements shown for each runtime


def page(report: ReportData) -> str:
    """Return the report as a self-contained HTML page."""
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
    if r.chat_template:
        notes += f'<p class="note">Chat template: SHA-256 {r.chat_template}.</p>'
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
        "The share of its budget that each point of the network used up, on the worst of all inputs. The unit is the "
        "reference's own error in float32. Shaded: the decoder. Point at a dot to read it. "
        "Paths through the model with nearly the same values share a line."
    )
    return f'<h2>Error against budget</h2><p class="note">{note}</p>{"".join(cards)}'


def _worst(r: ReportData) -> str:
    worst: list[Point] = []
    for runtime in r.runtimes:
        points = [p for p in r.points if p.runtime == runtime.name and p.worst.deviation.index]
        points.sort(key=lambda p: (not p.passed, p.worst.share))
        each = {p.tap: p for p in points}  # each tap's worst path (the last in this order)
        worst += sorted(each.values(), key=_worst_first)[:WORST]
    # The column for sorting comes first, as a narrow screen shows only the first columns without scrolling.
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
    note = "Parameters in every file and in memory, compared with the checkpoint bit for bit, and their SHA-256."
    head = ("runtime", "where", "parameters", "digest", "result")
    return _section("Weights", note, head, rows, (2,))


def _structure(r: ReportData) -> str:
    rows = []
    for s in r.structures:
        result = _mark(not s.problem, "as designed", escape(s.problem))
        used = f"{s.parameters - len(s.unused)} of {s.parameters}"
        rows.append([escape(s.runtime), str(s.products), str(s.softmaxes), used, str(s.attributes or ""), result])
    note = (
        "MLX's trace and the ONNX graphs against the architecture: every parameter must have a path to the output, and "
        "the numbers of matrix products and softmaxes must be right. A fused attention counts as two products and one "
        "softmax. Attributes, e.g. an epsilon or an axis, must be exactly the architecture's in every graph."
    )
    head = ("runtime", "matrix products", "softmaxes", "parameters used", "attributes", "result")
    return _section("Structure", note, head, rows, (1, 2, 3, 4))


def _data_files(r: ReportData) -> str:
    rows = []
    for file in r.data_files:
        result = _mark(file.passed, "every byte", "<br>".join(map(escape, file.problems[:WORST])))
        rows.append([escape(file.file), f"{file.size:,}", *map(str, (file.graphs, file.tensors, file.padding)), result])
    note = "Every byte of a data file must belong to a tensor of some graph, or be a zero that aligns the next tensor."
    head = ("data file", "bytes", "graphs", "tensors", "padding", "read")
    return _section("Data files", note, head, rows, (1, 2, 3, 4))


def _files(r: ReportData) -> str:
    if r.files is None:
        return ""
    result = _mark(r.files.passed, "all equal", "<br>".join(map(escape, r.files.problems)))
    note = (
        "Settings, tokenizer, labels, limits and other runtimes' files: each file around the graphs is made again "
        "from the checkpoint, with the choices in the package's record."
    )
    return _section("Files", note, ("files", "result"), [[str(r.files.compared), result]], (0,))


def _tokens(r: ReportData) -> str:
    rows = []
    for check in r.tokens:
        cells = [escape(check.runtime), escape(check.search), str(check.sentences), str(check.tokens)]
        rows.append([*cells, _mark(check.passed, check.result)])
    note = "Tokens of each search. Another choice than the reference's is accepted only if the reference sees a tie."
    head = ("runtime", "search", "sentences", "tokens", "result")
    return _section("Tokens", note, head, rows, (2, 3)) + "".join(_parting(check) for check in r.tokens)


def _gradients(r: ReportData) -> str:
    rows = []
    for g in worst_of_each(list(r.gradients)):
        share = _mark(g.passed, f"{g.error / BUDGET:.2g}")
        rows.append([*map(escape, (g.parameter, g.direction, f"{g.got:.9g}", f"{g.expected:.9g}")), share])
    note = "MLX's derivatives of the training loss against finite differences of the reference: the worst of each kind."
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
        f"<h2>Inputs</h2><p class=note>Random inputs of seed {r.seed}: "
        "name (rows x tokens, then the target's tokens).</p>"
        f"{kit.card(f'<ul>{inputs}</ul>')}<h2>Versions</h2>{kit.card(versions)}"
        f"<h2>The rule</h2><details><summary>in words</summary><pre>{escape(explain())}</pre></details>"
    )


def _section(title: str, note: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """A title, a note and a table; "" without rows."""
    return f'<h2>{title}</h2><p class="note">{note}</p>{_table(head, rows, numbers)}' if rows else ""


def _mark(passed: bool, good: str, bad: str = "") -> str:
    """A text in the colour of the verdict. bad: another text for failures."""
    return f'<span class="good">{good}</span>' if passed else f'<span class="bad">{bad or good}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    return kit.card(kit.data_table(head, rows, numbers))


WIDTH, HEIGHT = 1000, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 16, 92
LOWEST = 0.01
SAME = 1.04  # lines within this factor look the same: two pixels on an axis of two decades
ASIDE = 7.0  # between two lines' dots at the same tap
WIDEST, NARROWEST = 6.0, 1.6


@dataclass(frozen=True)
class Series:
    """A line of a plot: the points of a path, and the names of all paths with the same heights."""

    index: int
    paths: tuple[str, ...]
    points: Sequence[Point]


def series_of(points: Sequence[Point], paths: Sequence[str]) -> list[Series]:
    """Make a runtime's lines. paths: all runtimes' paths, so that a path has the same colour in every plot."""
    series: list[Series] = []
    for index, path in enumerate(paths):
        own = [p for p in points if p.path == path]
        known = next((i for i, s in enumerate(series) if _same_line(s.points, own)), None)
        if known is not None:
            series[known] = Series(series[known].index, (*series[known].paths, path), series[known].points)
        elif own:
            series.append(Series(index, (path,), own))
    return series


def _same_line(a: Sequence[Point], b: Sequence[Point]) -> bool:
    if not b or [(p.tap, p.passed) for p in a] != [(p.tap, p.passed) for p in b]:
        return False
    heights = [sorted(max(p.worst.share, LOWEST) for p in pair) for pair in zip(a, b, strict=True)]
    return all(low == high or low * SAME >= high for low, high in heights)


def plot(series: Sequence[Series], taps: Sequence[str]) -> str:
    """Draw a runtime's lines as SVG. taps: from left to right."""
    points = [p for s in series for p in s.points]
    column = {tap: i for i, tap in enumerate(taps)}
    shares = [p.worst.share for p in points if math.isfinite(p.worst.share)]
    top = 10 ** math.ceil(math.log10(max([*shares, 1.0]) * 1.5))
    finite = [share for share in shares if share > 0]
    low = max(LOWEST, 10 ** math.floor(math.log10(min([*finite, 0.1]))))
    step = (WIDTH - LEFT - RIGHT) / max(len(taps), 1)

    def x(tap: str) -> float:
        return LEFT + (column[tap] + 0.5) * step

    def y(share: float) -> float:
        part = math.log10(min(max(share, low), top) / low) / math.log10(top / low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error against budget along the network">']
    for i, tap in enumerate(taps):
        if tap.startswith("decoder."):
            parts.append(
                f'<rect class="stack" x="{LEFT + i * step:.1f}" y="{TOP}" width="{step:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"/>'
            )
    for k in range(round(math.log10(low)), round(math.log10(top)) + 1):
        level = 10.0**k
        css = "budget" if k == 0 else "grid"
        parts.append(f'<line class="{css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        word = "budget" if k == 0 else f"{level:g}"
        style = ' class="budget-word"' if k == 0 else ""
        parts.append(f'<text{style} x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{word}</text>')
    parts += _lines(series, x, y)
    at: dict[str, list[int]] = {tap: [s.index for s in series if any(p.tap == tap for p in s.points)] for tap in taps}
    for s in series:
        # Dots at the same tap stand side by side, else the last would hide the others.
        apart = {tap: min(ASIDE, step / (len(at[tap]) + 1)) for tap in taps}
        offsets = {p.tap: (at[p.tap].index(s.index) - (len(at[p.tap]) - 1) / 2) * apart[p.tap] for p in s.points}
        parts += [_dot(p, ", ".join(s.paths), x(p.tap) + offsets[p.tap], y(p.worst.share), s.index) for p in s.points]
    every = max(1, math.ceil(len(taps) / 60))
    for tap in taps[::every]:
        place = f"{x(tap):.1f}"
        parts.append(
            f'<text x="{place}" y="{HEIGHT - BOTTOM + 14}" text-anchor="end" '
            f'transform="rotate(-42 {place} {HEIGHT - BOTTOM + 14})">{escape(short(tap))}</text>'
        )
    return "".join([*parts, "</svg>"])


def _lines(series: Sequence[Series], x: Callable[[str], float], y: Callable[[float], float]) -> list[str]:
    """Draw each line narrower than the lines below it, so that all can be seen if they overlap."""
    long = [s for s in series if len(s.points) > 1]
    parts = []
    for place, s in enumerate(long):
        width = NARROWEST + (WIDEST - NARROWEST) * (len(long) - 1 - place) / max(3, len(long) - 1)
        line = " ".join(f"{x(p.tap):.1f},{y(p.worst.share):.1f}" for p in s.points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour(s.index)}" stroke-width="{width:.1f}" '
            'stroke-linejoin="round" opacity="0.75"/>'
        )
    return parts


def _dot(p: Point, paths: str, x: float, y: float, index: int) -> str:
    m = p.worst
    ratios = "bits equal" if m.deviation.same_bits else f"rms {m.rms_ratio:.3g}, max {m.max_ratio:.3g}"
    title = f"{p.tap} ({paths}): {m.deviation.detail or ratios}; {m.share:.3g} of the budget, on {p.case}"
    # Over budget: red, with a rim in the line's colour.
    style = f'fill="{colour(index)}"' if p.passed else f'class="over" style="stroke:{colour(index)}"'
    radius = 3.4 if p.passed else 4.4
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}><title>{escape(title)}</title></circle>'
