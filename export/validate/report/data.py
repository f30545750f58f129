"""A validation's report as plain data, as JSON, and as lines in model cards.

`verdict` is "equal" or "mismatch". Exit codes of the command: 0 equal, 1 mismatch, 2 bad input, 3 a requested runtime
isn't available (`UserError.status`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export.validate.checks.gradients import Gradient, worst_of_each
from export.validate.checks.structure import Structure
from export.validate.checks.weights import DataFile
from export.validate.engines.protocol import Placement
from export.validate.findings import PackageFiles, Point, Runtime, Tokens, Weights
from export.validate.locate import Culprit
from mlx_transformer.core.card import note_proof
from mlx_transformer.system.errors import first_of

EQUAL, MISMATCH = "equal", "mismatch"
FAILURES = 6  # lines of a summary


@dataclass(frozen=True)
class ReportData:
    """A whole run. `points` go from embedding to logits."""

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
    """For each runtime over budget, the operation behind its first error."""

    structures: tuple[Structure, ...] = ()
    """Counts of operations and parameters in each runtime's graph."""
    data_files: tuple[DataFile, ...] = ()
    """The graphs' data files, and which bytes are read."""
    files: PackageFiles | None = None
    """The files around the package's graphs; None for another exporter's files, and without ONNX."""
    gradients: tuple[Gradient, ...] = ()
    """With --gradients: MLX's derivatives against finite differences."""
    share: float = 1.0
    """The share of the usual rows, sentences and tokens; below 1 for a large model."""
    chat_template: str = ""
    """SHA-256 of the checkpoint's chat templates, which belong to the model as its weights do; "" without any."""
    against: tuple[str, ...] = ()
    """With --against: lines with the original's version and files, and the inputs compared."""

    @property
    def equal(self) -> bool:
        checks = [*self.weights, *self.structures, *self.data_files, *self.points, *self.tokens, *self.gradients]
        checks += [] if self.files is None else [self.files]
        return bool(checks) and all(check.passed for check in checks)

    @property
    def verdict(self) -> str:
        return EQUAL if self.equal else MISMATCH

    @property
    def notes(self) -> list[str]:
        """Lines about runtimes compared only in part, nearest neighbours measured by the export, and extra files."""
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
            f"{r.name}: not compared, because the fused graphs have no such value: {', '.join(_brief(r.missing_taps))}"
            for r in self.runtimes
            if r.missing_taps
        ]
        exported = [f"{r.name}: when it was exported, {r.retrieval}" for r in self.runtimes if r.retrieval]
        fewer = []
        if self.share < 1:
            fewer = [f"a large model: {self.share:.0%} of the usual rows, sentences and tokens (--thorough: all)"]
        linear = [
            f"{p.runtime}: {p.tap} ({p.path}, {p.case}) is at {p.worst.share:.3g} of its budget, as its network isn't "
            f"linear there: of the runtime's own errors, scaled to float32's, come {p.worst.in_proportion.max:.3g} at "
            f"most, in place of {p.worst.deviation.max:.3g}"
            for p in self.points
            if p.worst.in_proportion is not None
        ]
        return logits_only + search_only + fused + exported + fewer + linear + self._notes_on_files()

    def _notes_on_files(self) -> list[str]:
        if self.files is None:
            return []
        notes = [f"{self.onnx}: nobody reads {first_of(self.files.unread)}"] if self.files.unread else []
        if self.files.misleading:
            notes.append(
                f"{self.onnx}: nothing else was compared: with its record runtimes would run the graphs wrongly"
            )
        return notes

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def first_over_budget(self, runtime: str) -> Point | None:
        """Return a runtime's first point over budget, from embedding to logits; None if all are within."""
        return next((p for p in self.points if p.runtime == runtime and not p.passed), None)

    def failures(self) -> list[str]:
        """Return a line for each failure, wrong weights first."""
        lines = [f"{w.runtime}: {w.where}: {problem}" for w in self.weights for problem in w.problems]
        for runtime in self.runtimes:
            point = self.first_over_budget(runtime.name)
            if point is not None:
                lines.append(f"{runtime.name}: first over budget: {place_of(point)}")
            lines += [f"{c.runtime}: culprit: {c.sentence}" for c in self.culprits if c.runtime == runtime.name]
        lines += [f"{s.runtime}: structure: {s.problem}" for s in self.structures if s.problem]
        lines += [f"{file.file}: {problem}" for file in self.data_files for problem in file.problems]
        lines += [] if self.files is None else self.files.problems
        lines += [f"mlx: gradient of {g.summary}" for g in worst_of_each(list(self.gradients)) if not g.passed]
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


def _brief(taps: Iterable[str]) -> list[str]:
    """Join a stack's layers, e.g. encoder.layers.0.feed_forward -> encoder.layers.*.feed_forward."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", tap) for tap in taps))


def summary(r: ReportData) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for failures, runtimes and the whole run, e.g. for notebooks."""
    for line in r.failures()[:FAILURES]:
        yield "failure", line
    for runtime in r.runtimes:
        weights = [check for check in r.weights if check.runtime == runtime.name]
        points = [point for point in r.points if point.runtime == runtime.name]
        tokens = [check for check in r.tokens if check.runtime == runtime.name]
        sentences = []
        if weights:
            equal = "bit for bit" if all(check.passed for check in weights) else "some differ"
            sentences.append(f"{sum(check.count for check in weights):,} weights {equal}")
        if points:
            worst = max(point.worst.share for point in points)
            sentences.append(f"{sum(point.inputs for point in points):,} tensors, at most {worst:.2g} of the budget")
        if tokens:
            same = "the same" if all(check.passed for check in tokens) else "not all the same"
            sentences.append(f"{sum(check.tokens for check in tokens):,} tokens {same}")
        yield runtime.name, ", ".join(sentences)
    if r.files is not None:
        yield "files", r.files.result
    for line in (*r.against, *r.notes):
        yield "note", line
    if r.chat_template:
        yield "chat template", f"SHA-256 {r.chat_template}"
    yield "seed", f"{r.seed}, {len(r.inputs)} inputs, {r.seconds:.1f} s"


def place_of(point: Point) -> str:
    d = point.worst.deviation
    ratios = f"rms {point.worst.rms_ratio:.3g} and max {point.worst.max_ratio:.3g} times float32's own error"
    where = f" at {list(d.index)}: {d.got:.9g}, expected {d.expected:.9g} ({d.ulp:.3g} ulp)" if d.index else ""
    return f"{point.tap} ({point.path}, {point.case}): {d.detail or ratios}{where}"


def _plain(value: Any) -> Any:
    """Convert values to JSON's types: tuples become lists, infinities and NaN become strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


UNITS = ("mlx", "onnxruntime", "onnxruntime-gpu", "numpy")


def note_in_cards(report: ReportData, date: str | None = None) -> None:
    """Write the verdict into the model cards of the checkpoint and the ONNX folder.

    A folder isn't changed if it has no card, or if the card has no place for the verdict. date: by default today, UTC.
    Raises UserError if a card can't be written.
    """
    date = time.strftime("%Y-%m-%d", time.gmtime()) if date is None else date
    text = "\n".join(_lines(report, date))
    for folder in (Path(report.checkpoint), Path(report.onnx)):
        if folder.is_dir():
            note_proof(folder, text)


def _lines(r: ReportData, date: str) -> Iterator[str]:
    packages = ", ".join(f"{name} {r.versions[name]}" for name in UNITS if name in r.versions)
    if not r.equal:
        yield f"**Not equal**: `mlx-transformer validate` found a difference on {date} ({packages})."
        return
    yield f"**Equal**, said `mlx-transformer validate` on {date}: every runtime and a float64 reference ({packages})."
    yield ""
    for runtime in r.runtimes:
        text = dict(summary(r))[runtime.name]
        most = f"{runtime.budget.rms:g} (rms) and {runtime.budget.max:g} (largest)"
        yield f"- {runtime.name}, {runtime.precision}: {text}. Budget: {most} times the error of float32 itself"


def short(tap: str) -> str:
    """Shorten a tap's name, e.g. encoder.layers.0.self_attention -> enc 0 self-attention."""
    words = tap.replace(".layers.", " ").replace("encoder", "enc").replace("decoder", "dec")
    return words.replace(".", " ").replace("_", "-")
