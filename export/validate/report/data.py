"""What a validation found: plain data, and as JSON. `terminal` and `html` show it.

`Report.verdict` is "equal" or "mismatch". Exit codes of the command: 0 equal, 1 mismatch, 2 bad input, 3 a requested
runtime is not available.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from export.validate.checks.gradients import Gradient, worst_of_each
from export.validate.checks.structure import Structure
from export.validate.engines import Placement
from export.validate.locate.isolate import Culprit
from export.validate.rule import Budget, Measurement
from mlx_transformer.spec.errors import UserError

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
    logits_only: bool = False
    """Somebody else's ONNX file: nothing inside it has a name that could be compared."""
    unseen: tuple[str, ...] = ()
    """Taps that aren't values of its graphs."""
    search_only: bool = False
    """One file with the search inside: it returns tokens and scores."""


@dataclass(frozen=True)
class Weights:
    """One holder of parameters (a model in memory, a file) against the checkpoint, bit for bit."""

    runtime: str
    where: str
    count: int
    problems: tuple[str, ...]
    digest: str = ""
    """SHA-256 of names, types, shapes and values of all that it holds."""

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
class Parting:
    """One sentence whose tokens aren't the reference's: both outputs, as text where there is a tokenizer."""

    sentence: int
    got: tuple[str, ...]
    expected: tuple[str, ...]
    said: str
    problem: bool


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
    partings: tuple[Parting, ...] = ()

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
    culprits: tuple[Culprit, ...] = ()
    """For each runtime over budget, the operation that made its first error."""

    structures: tuple[Structure, ...] = ()
    """Operations and parameters of each runtime's graph, counted."""
    gradients: tuple[Gradient, ...] = ()
    """MLX's derivatives against finite differences, where they were asked for."""

    @property
    def equal(self) -> bool:
        checks = (*self.weights, *self.structures, *self.points, *self.tokens, *self.gradients)
        return bool(checks) and all(check.passed for check in checks)

    @property
    def verdict(self) -> str:
        return EQUAL if self.equal else MISMATCH

    @property
    def notes(self) -> list[str]:
        """One line for each runtime of which only a part was compared."""
        logits_only = [
            f"{r.name}: only logits of one full pass were compared; the file isn't from this project's export, "
            "so there are no taps, and weights, caches and searches weren't compared"
            for r in self.runtimes
            if r.logits_only
        ]
        search_only = [
            f"{r.name}: weights, tokens and scores were compared; a file with the search inside returns nothing else"
            for r in self.runtimes
            if r.search_only
        ]
        fused = [
            f"{r.name}: not compared, because the fused graphs have no such value: {', '.join(_brief(r.unseen))}"
            for r in self.runtimes
            if r.unseen
        ]
        return logits_only + search_only + fused

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
                lines.append(f"{runtime.name}: first over budget: {place_of(point)}")
            lines += [f"{c.runtime}: culprit: {c.sentence}" for c in self.culprits if c.runtime == runtime.name]
        lines += [f"{s.runtime}: structure: {s.problem}" for s in self.structures if s.problem]
        lines += [f"mlx: gradient of {g.said}" for g in worst_of_each(list(self.gradients)) if not g.passed]
        for t in self.tokens:
            more = f" (and {len(t.problems) - 1} more)" if len(t.problems) > 1 else ""
            lines += [f"{t.runtime}: {t.search}: {problem}{more}" for problem in t.problems[:1]]
        return lines

    def to_dict(self) -> dict[str, Any]:
        first = {r.name: self.first_over_budget(r.name) for r in self.runtimes}
        return _plain(
            {
                "verdict": self.verdict,
                "first_over_budget": {name: point and point.tap for name, point in first.items()},
                "failures": self.failures(),
                "notes": self.notes,
                **dataclasses.asdict(self),
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the JSON, making folders as needed; `UserError` if the place can't be written to."""
        _write(path, self.to_json())

    def write_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else; `UserError` if the place can't be written to."""
        from .html import page

        _write(path, page(self))

    def print(self, console: Console | None = None) -> None:
        """On the terminal: verdict first, then what supports it."""
        from .terminal import show

        show(self, console or Console())


def _brief(taps: Iterable[str]) -> list[str]:
    """The layers of a stack as one: encoder.layers.*.feed_forward."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", tap) for tap in taps))


def _write(path: str | Path, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the report can't be written ({error.strerror})") from error


def place_of(point: Point) -> str:
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
