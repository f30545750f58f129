"""The lines that a comparison leaves in the model cards of the folders that it compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from mlx_transformer.core.card import note_proof

from .data import ReportData, summary

UNITS = ("mlx", "onnxruntime", "onnxruntime-gpu", "numpy")


def note_in_cards(report: ReportData, date: str | None = None) -> None:
    """Write the verdict into the cards of the checkpoint and of the ONNX folder. A folder without a card, or whose card
    has no place for it, is left as it is. date: of today, in UTC, by default. `UserError` if one can't be written."""
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
