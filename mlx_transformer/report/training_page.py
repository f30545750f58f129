"""The HTML page of training runs: their facts, curves, sample translations and recipes. Works offline.

`read_run` reads a run's record and curves from its folder, `page` draws one or more runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from mlx_transformer import page as kit
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.system.chart import Curve, colour, figure
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_regular, read_json
from mlx_transformer.training.run_folder import MAX_LOG_BYTES, METRICS, RECORD, flat

DRAWN = 1e100
"""Largest number to draw. Larger numbers come from damaged lines, and would overflow the floats of an axis."""


@dataclass
class RunLog:
    """A run. train, valid: {name: curve}, e.g. "loss"."""

    name: str
    record: dict[str, Any]
    parameters: int
    train: dict[str, Curve] = field(default_factory=dict)
    valid: dict[str, Curve] = field(default_factory=dict)
    samples: list[tuple[int, list[dict[str, str]]]] = field(default_factory=list)
    """(step, sample translations of the validation text) of each validation."""
    skipped: int = 0
    """Steps whose gradient was not finite."""
    seconds: float | None = None
    """How long the run took, up to the last line of its log."""

    @property
    def steps(self) -> int:
        return max((curve[-1][0] for curve in (*self.train.values(), *self.valid.values()) if curve), default=0)


def read_run(folder: Path) -> RunLog:
    """Read a run's folder. Raises UserError if it isn't a run, or run.json is damaged."""
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder}: no run (no {RECORD} in it); give the folder of a training run")
    record = read_json(folder / RECORD)
    try:
        parameters = parameter_count(TransformerConfig.from_dict(record["config"]))
        recipe = record["recipe"]
        if not (isinstance(recipe["data"], dict) and isinstance(recipe["training"], dict)):
            raise UserError("no recipe in it")
    except (LookupError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{folder / RECORD}: damaged ({error}); restore it from a copy") from error
    log = RunLog(folder.resolve().name, record, parameters)
    if (folder / METRICS).exists():
        with open_regular(folder / METRICS, MAX_LOG_BYTES) as file:
            for line in file:
                _add(log, line)
    return log


def _add(log: RunLog, line: bytes) -> None:
    """Add a line of metrics.jsonl to the log; skip damaged lines, e.g. a last line that a kill cut short."""
    try:
        entry = json.loads(line)
        kind, step = entry.pop("kind"), int(entry.pop("step"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return
    seconds = entry.get("seconds")
    if kind in ("train", "end") and _is_number(seconds):
        log.seconds = float(seconds)
    if kind == "skipped":
        log.skipped += 1
    elif kind == "samples" and isinstance(entry.get("samples"), list):
        samples = [{k: str(v) for k, v in each.items()} for each in entry["samples"] if isinstance(each, dict)]
        log.samples.append((step, samples))
    elif kind in ("train", "valid"):
        curves = log.train if kind == "train" else log.valid
        for name, value in entry.items():
            if _is_number(value):
                curves.setdefault(name, []).append((step, float(value)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= DRAWN


TITLES = {
    "loss": "loss, nats a target token",
    "perplexity": "perplexity of the validation text",
    "bleu": "BLEU of the validation text",
    "chrf": "chrF of the validation text",
    "exact_match": "exact match of the validation text, %",
    "learning_rate": "learning rate",
    "gradient_norm": "norm of the gradient",
    "tokens_per_second": "target tokens/s",
    "peak_memory_mb": "peak of MLX's memory, MB",
    "compilations": "times the step was compiled",
}
LOGARITHMIC = ("perplexity", "gradient_norm")
NONE = "–"
HIGH_IS_GOOD = ("bleu", "chrf", "exact_match")


def page(runs: Sequence[RunLog]) -> str:
    """Make a self-contained HTML page."""
    names = ", ".join(run.name for run in runs)
    body = "".join([_head(runs), _facts(runs), _charts(runs), *map(_samples, runs), _recipes(runs)])
    return kit.page("report", f"training: {names}", body, kit.neighbour_texts(__file__, "curves.css"))


def _head(runs: Sequence[RunLog]) -> str:
    names = kit.key((colour(i), run.name) for i, run in enumerate(runs))
    return f"<h1>{'One run' if len(runs) == 1 else f'{len(runs)} runs'}</h1>{names}"


def _facts(runs: Sequence[RunLog]) -> str:
    rows = [_row(run) for run in runs]
    return kit.card(_table(runs, rows, list(dict.fromkeys(name for row in rows for name in row))))


def _table(
    runs: Sequence[RunLog], columns: Sequence[dict[str, str]], names: Sequence[str], marked: Collection[str] = ()
) -> str:
    """A table with a column for each run; rows in `marked` are highlighted."""
    head = ["", *(escape(run.name) for run in runs)]
    rows = [[escape(name), *(escape(column.get(name, NONE)) for column in columns)] for name in names]
    return kit.data_table(head, rows, marked=[i for i, name in enumerate(names) if name in marked], named=True)


def _row(run: RunLog) -> dict[str, str]:
    record, training = run.record, run.record["recipe"]["training"]
    row = {
        "learns": str(training.get("objective", "translation")),
        "parameters": f"{run.parameters:,}",
        "steps": f"{run.steps:,}" + (f" ({run.skipped} skipped)" if run.skipped else ""),
    }
    if run.seconds is not None:
        row["seconds"] = f"{run.seconds:,.0f}"
    for name, curve in run.valid.items():
        if name in TITLES:
            step, best = (max if name in HIGH_IS_GOOD else min)(curve, key=lambda point: point[1])
            row[f"{name.replace('_', ' ')}: last, best"] = f"{curve[-1][1]:.4g}, {best:.4g} at step {step:,}"
    if isinstance(record.get("model"), dict):
        row["model/"] = f"{record['model'].get('final')}, of step {_steps(record['model'].get('steps'))}"
    versions = record.get("versions", {})
    row["ran on"] = f"{record.get('device')}, {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}"
    return row


def _steps(steps: Any) -> str:
    return ", ".join(f"{step:,}" for step in steps if isinstance(step, int)) if isinstance(steps, list) else "?"


def _charts(runs: Sequence[RunLog]) -> str:
    drawn = []
    for part, of in (("training", "train"), ("validation", "valid")):
        for name, title in TITLES.items():
            curves: list[tuple[int, str, Curve]] = [
                (i, run.name, curve) for i, run in enumerate(runs) if (curve := getattr(run, of).get(name))
            ]
            if curves:
                label = f"{part} {title}" if name == "loss" else title
                drawn.append(figure(label, curves, name in LOGARITHMIC))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _samples(run: RunLog) -> str:
    if not run.samples:
        return ""
    count = max(len(samples) for _, samples in run.samples)
    parts = []
    for i in range(count):
        outputs = [(step, samples[i]) for step, samples in run.samples if i < len(samples)]
        first = outputs[0][1]
        rows = [(f"{step:,}", escape(each.get("output", ""))) for step, each in outputs]
        parts.append(
            kit.card(
                f"<p><b>{escape(first.get('source', ''))}</b><br>"
                f'<span class="soft">{escape(first.get("reference", ""))}</span></p>'
                f"{kit.data_table(('step', 'output'), rows, numbers=(0,))}"
            )
        )
    return f"<h2>{escape(run.name)}: what it says of the first lines of the validation text</h2>{''.join(parts)}"


def _recipes(runs: Sequence[RunLog]) -> str:
    """The recipes of all runs; keys that differ come first."""
    recipes = [_flat(run.record["recipe"]) for run in runs]
    names = list(dict.fromkeys(name for each in recipes for name in each))
    differing = [name for name in names if len({each.get(name) for each in recipes}) > 1]
    rows = [*differing, *(name for name in names if name not in differing)]
    state = " open" if differing else ""
    table = _table(runs, recipes, rows, differing)
    return "<h2>Recipe</h2>" + kit.card(f"<details{state}><summary>all keys</summary>{table}</details>")


def _flat(recipe: dict[str, Any]) -> dict[str, str]:
    values = {name: value for name, value in flat(recipe).items() if value is not None}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
