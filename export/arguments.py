"""Keyword arguments of this package's functions, for type checkers and editors; nothing imports this at run time.

They repeat the fields in `settings.py`; `tests/repository/test_arguments.py` keeps names and types equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from .settings import ActivationsName, PrecisionName, ScalesName, TargetName


class ExportArguments(TypedDict, total=False):
    """The fields of `ExportSettings`."""

    target: TargetName
    precision: Sequence[PrecisionName] | PrecisionName
    activations: ActivationsName | None
    int8_scales: ScalesName | None
    calibrate: Path | str | None
    float32_layers: Sequence[str]
    least_neighbours: float | None
    attention: bool
    attention_layer: int | None
    inputs_embeds: bool
    dimensions: int | None
    shortlist: Path | str | None
    gate_source: Path | str | None
    gate_reference: Path | str | None
    accept_loss: bool
    force: bool


class JudgeArguments(TypedDict, total=False):
    """The fields of `JudgeSettings`."""

    threads: int | None
    gradients: bool
    names: str | Mapping[str, str] | None
    against: Literal["transformers", "mlx-lm", "marian"] | None
    original: Path | str | None
    thorough: bool
    shortlist: Path | str | None


class ServeArguments(TypedDict, total=False):
    """The fields of `ServeSettings`."""

    host: str
    port: int
    max_batch: int
    max_wait_ms: float
    max_queue: int
    max_sentences: int
    prefix_megabytes: int
    max_connections: int
    threads: int | None
    workers: int
    precision: PrecisionName | None
    shortlist: Path | str | None
    date: str | None
    access_log: bool
    verify: bool
    cors: Sequence[str]
    api_key_file: Path | str | None
    header_seconds: float
    body_seconds: float
    idle_seconds: float
    grace_seconds: float


class WebArguments(TypedDict, total=False):
    """The fields of `WebSettings`."""

    title: str | None
    assets: Path | str | None
    force: bool
    shortlist: Path | str | None
    verify: bool
