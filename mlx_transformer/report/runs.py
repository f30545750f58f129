"""The record and the curves of a run, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.system.chart import Curve
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import open_regular, read_json
from mlx_transformer.training.run_folder import MAX_LOG_BYTES, METRICS, RECORD

DRAWN = 1e100
"""The largest number that is drawn: one above marks a damaged line, and no axis of floats holds twice the largest."""


@dataclass
class RunLog:
    """One run. `train`, `valid`: curves by name."""

    name: str
    record: dict[str, Any]
    parameters: int
    train: dict[str, Curve] = field(default_factory=dict)
    valid: dict[str, Curve] = field(default_factory=dict)
    samples: list[tuple[int, list[dict[str, str]]]] = field(default_factory=list)
    """(step, outputs for the first sentences of the validation text)."""
    skipped: int = 0
    """The number of steps whose gradient was not finite."""
    seconds: float | None = None
    """How long the run took; while it goes on, up to the last line of its log."""

    @property
    def steps(self) -> int:
        return max((curve[-1][0] for curve in (*self.train.values(), *self.valid.values()) if curve), default=0)


def read_run(folder: Path) -> RunLog:
    """Read a run; `UserError` for a folder that is no run, or a damaged one."""
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
    """Add a line to the log, unless a kill cut it short."""
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
