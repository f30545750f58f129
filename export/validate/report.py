"""What a validation found: plain data, as JSON, and as a table on the terminal.

`Report.verdict` is "equal" or "mismatch". Exit codes of the command: 0 equal, 1 mismatch, 2 bad input, 3 a requested
runtime is not available.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mlx_transformer.spec.errors import UserError

from .engines import Placement
from .rule import Budget, Measurement

EQUAL, MISMATCH = "equal", "mismatch"
TAPPED, PLAIN = "tapped", "plain"
EXIT_EQUAL, EXIT_MISMATCH, EXIT_BAD_INPUT, EXIT_UNAVAILABLE = 0, 1, 2, 3


@dataclass(frozen=True)
class Runtime:
    """One engine that took part, its budget and where it ran."""

    name: str
    precision: str
    device: str
    budget: Budget
    details: dict[str, str]


@dataclass(frozen=True)
class Weights:
    """One holder of parameters (a model in memory, a file) against the checkpoint, bit for bit."""

    runtime: str
    where: str
    count: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Point:
    """One tap of one runtime over all inputs: `worst` is the measurement that came nearest to its budget, or went past.

    `path`: tapped (a copy of the model that shows its inside), plain (the model as it is used), or a name with "cached"
    (plain, step by step). `failures`: the inputs on which it was over budget.
    """

    runtime: str
    path: str
    tap: str
    worst: Measurement
    case: str
    inputs: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Tokens:
    """Free-running tokens of one runtime and one kind of search, each choice held against the float64 reference.

    `ties`: sentences that part from the reference where it sees a tie within the budget. `problems`: real divergences.
    """

    runtime: str
    search: str
    sentences: int
    tokens: int
    ties: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Report:
    """The whole of one run. `points` are in the order of the data's way through the network."""

    checkpoint: str
    onnx: str
    seed: int
    runtimes: tuple[Runtime, ...]
    absent: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[Weights, ...]
    points: tuple[Point, ...]
    tokens: tuple[Tokens, ...]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    placements: tuple[Placement, ...] = ()
    """Where each runtime ran: execution provider of every node, copies between memories, TF32, threads."""

    @property
    def equal(self) -> bool:
        checks = (*self.weights, *self.points, *self.tokens)
        return bool(checks) and all(check.passed for check in checks)

    @property
    def verdict(self) -> str:
        return EQUAL if self.equal else MISMATCH

    @property
    def exit_code(self) -> int:
        return EXIT_EQUAL if self.equal else EXIT_MISMATCH

    def first_over_budget(self, runtime: str) -> Point | None:
        """Where a runtime first leaves the budget, following the data; None if it never does."""
        return next((p for p in self.points if p.runtime == runtime and not p.passed), None)

    def failures(self) -> list[str]:
        """One line for each thing that went wrong, the most telling first."""
        lines = [f"{w.runtime}: {w.where}: {problem}" for w in self.weights for problem in w.problems]
        for runtime in self.runtimes:
            point = self.first_over_budget(runtime.name)
            if point is not None:
                lines.append(f"{runtime.name}: first over budget: {_place(point)}")
        lines += [f"{t.runtime}: {t.search}: {problem}" for t in self.tokens for problem in t.problems]
        return lines

    def to_dict(self) -> dict[str, Any]:
        first = {r.name: self.first_over_budget(r.name) for r in self.runtimes}
        return _plain(
            {
                "verdict": self.verdict,
                "first_over_budget": {name: point and point.tap for name, point in first.items()},
                "failures": self.failures(),
                **dataclasses.asdict(self),
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the JSON, making folders as needed; `UserError` if the place can't be written to."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: the report can't be written ({error.strerror})") from error

    def print(self, console: Console | None = None) -> None:
        """Verdict first, then what supports it."""
        console = console or Console()
        colour = "green" if self.equal else "red"
        console.print(Text.assemble(("validate: ", "bold"), (self.verdict, f"bold {colour}"), f"   seed {self.seed}"))
        for line in self.failures():
            console.print(Text(f"  {line}", style="red"), soft_wrap=True)
        console.print(_weights_table(self), _points_table(self))
        if self.tokens:
            console.print(_tokens_table(self))
        for name in self.absent:
            console.print(Text(f"not compared, because it isn't installed here: {name}", style="yellow"))
        console.print(Text(f"{len(self.inputs)} inputs: {'; '.join(self.inputs)}; {self.seconds:.1f} s", style="dim"))


def _weights_table(report: Report) -> Table:
    table = Table("weights, bit for bit", "where", "parameters", "result", box=None, header_style="bold")
    for check in report.weights:
        result = "equal" if check.passed else f"{len(check.problems)} differ"
        table.add_row(check.runtime, check.where, str(check.count), _mark(check.passed, result))
    return table


def _points_table(report: Report) -> Table:
    """A row a tap, a column a runtime: worst rms and max ratio over all inputs; then the logits of the other paths."""
    runtimes = [r.name for r in report.runtimes]
    table = Table(Column("tap", no_wrap=True), box=None, header_style="bold")
    for name in runtimes:
        table.add_column(f"{name}, rms and max", justify="right", no_wrap=True)
    rows: dict[str, dict[str, Text]] = {}
    for point in report.points:
        label = point.tap if point.path == TAPPED else f"{point.tap}, {point.path}"
        m = point.worst
        ratios = "bits equal" if m.deviation.same_bits else f"{m.rms_ratio:5.2f} {m.max_ratio:5.2f}"
        rows.setdefault(label, {})[point.runtime] = _mark(point.passed, ratios)
    for label in sorted(rows, key=lambda label: ", " in label):
        table.add_row(label, *(rows[label].get(name, "") for name in runtimes))
    budgets = ", ".join(f"{r.name} {r.budget.rms:g} and {r.budget.max:g}" for r in report.runtimes)
    table.caption = f"in units of float32's own error; budget: {budgets}"
    return table


def _tokens_table(report: Report) -> Table:
    table = Table("tokens", "search", "sentences", "tokens", "result", box=None, header_style="bold")
    for check in report.tokens:
        result = "equal" if not check.ties else f"equal, {len(check.ties)} at a certified tie"
        text = result if check.passed else f"{len(check.problems)} differ"
        table.add_row(check.runtime, check.search, str(check.sentences), str(check.tokens), _mark(check.passed, text))
    return table


def _mark(passed: bool, text: str) -> Text:
    return Text(f"{'✓' if passed else '✗'} {text}", style="green" if passed else "red")


def _place(point: Point) -> str:
    d = point.worst.deviation
    ratios = f"rms {point.worst.rms_ratio:.3g} and max {point.worst.max_ratio:.3g} times float32's own error"
    where = f" at {list(d.index)}: {d.got:.9g}, expected {d.expected:.9g} ({d.ulp:.3g} ulp)" if d.index else ""
    return f"{point.tap} ({point.path}, {point.case}): {d.detail or ratios}{where}"


def _plain(value: Any) -> Any:
    """JSON's own types: no tuples, no infinities."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value
