"""Which operation is the culprit: where a runtime first leaves its budget, each step is run again by itself.

A tap over budget says where an error shows. To say what made it, the reference's own values are put in at every point
before an operation (rounded to float32, which is what the runtime can hold), so that nothing but that operation is
between these inputs and what is computed. The truth is the same operation in float64 on the same inputs, its natural
error the same in float32, and the rule that of every tap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.engines.protocol import Engine
from export.validate.findings import tap_names
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth
from mlx_transformer.core.config import TransformerConfig

from .hypotheses import explain
from .inside import operation, positions_first, valid_at
from .isolate_mlx import run_mlx
from .isolate_onnx import run_onnx
from .isolated_inputs import IsolatedInputs, isolated_inputs

Array = NDArray


@dataclass(frozen=True)
class Culprit:
    """The finding of an isolated run. `tap`, `path`, `case`: where the error shows. `point`, `operation`: what makes
    it; empty where no single operation is over budget. `why`: what distinguishes it, as far as that can be told."""

    runtime: str
    path: str
    tap: str
    case: str
    point: str
    operation: str
    measurement: Measurement | None
    why: str = ""
    points: int = 0
    """How many operations were run by themselves."""

    @property
    def sentence(self) -> str:
        place = self.tap if self.point in ("", self.tap) else self.point.rpartition(".")[0]
        if self.point.endswith("norm") and not self.point.startswith(f"{self.tap}."):
            place = self.point
        return f"{place}: {self.operation or 'no single operation'}{f' ({self.why})' if self.why else ''}"


def isolate(
    engine: Engine, weights: Mapping[str, Array], case: Case, path: str, tap: str, position: int | None = None
) -> Culprit:
    """Run the operations behind a failing tap one by one. `position`: a failing one, which tells the cached pass."""
    config = engine.config
    part = None
    if path.startswith("cached") and not tap.startswith("encoder."):
        passes = case.passes()
        part = next((p for p in passes if position is not None and p.start <= position < p.stop), passes[-1])
    nobody = Culprit(engine.name, path, tap, case.name, "", "", None)
    setting = isolated_inputs(config, weights, case, part)
    if engine.is_training:
        return replace(nobody, operation="dropout", why="the model is in training mode")
    try:
        run = run_onnx if engine.capabilities.isolates == "onnx" else run_mlx
        computed = run(engine, setting, path, tap)
    except Exception as error:  # each runtime has its own exceptions
        return _named(nobody, " ".join(str(error).split()), list(setting.truth64), config)
    region = _region(list(setting.inputs), tap_names(config), tap)
    common = computed.keys() & setting.truth64.keys()
    values = {point: _aligned(point, computed[point], setting) for point in region if point in common}
    judged = [(point, _judge(point, *each, engine)) for point, each in values.items()]
    wrong = [(point, measurement) for point, measurement in judged if not measurement.passed]
    if not wrong:
        why = f"each of {len(judged)} operations is within its budget; their errors add up"
        return replace(nobody, why=why, points=len(judged))
    point, measurement = max(wrong, key=lambda pair: pair[1].share)
    got, t64, t32, valid = values[point]
    natural = float(np.abs(t32 - t64)[valid].sum())
    why = explain(point, config, weights, setting.inputs, got, t64, natural, valid)
    return replace(
        nobody, point=point, operation=operation(point, config), measurement=measurement, why=why, points=len(judged)
    )


def _region(points: list[str], taps: list[str], tap: str) -> list[str]:
    """Return the points after the tap before this one, up to it, and whatever belongs to it by name."""
    i = taps.index(tap)
    earlier = taps[i - 1] if i and taps[i - 1] in points else None
    start = points.index(earlier) + 1 if earlier is not None else 0
    stop = points.index(tap) + 1
    return [p for k, p in enumerate(points) if start <= k < stop or p.startswith(f"{tap}.")]


def _aligned(point: str, got: Array, s: IsolatedInputs) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return what was computed at a point, the truth in float64 and in float32, positions before heads, and which
    positions count."""
    got, t64, t32 = (positions_first(x) for x in (got, s.truth64[point], s.truth32[point]))
    return got, t64, t32, valid_at(point, s.case, s.part, t64.shape[1])


def _judge(point: str, got: Array, t64: Array, t32: Array, valid: NDArray[np.bool_], engine: Engine) -> Measurement:
    if got.shape != t64.shape:
        deviation = Deviation.of(got, Truth(t64, np.ones(t64.shape[:2], bool), ErrorScale(0.0, 0.0, 0.0, 0, 0.0)))
        return Measurement(False, np.inf, np.inf, np.inf, deviation)
    truth = Truth.of(t64, t32, valid, exact=".embedding" in point and engine.is_exact)
    return Measurement.of(Deviation.of(got, truth), truth.scale, truth.scale, engine.budget)


def _named(nobody: Culprit, message: str, points: list[str], config: TransformerConfig) -> Culprit:
    """Return the operation that a runtime's own error message names."""
    message = message.replace("/positions/", "/embedding/")
    spelled = {point.replace(".", "/").replace("layers/", "layers."): point for point in points}
    named = [point for scope, point in spelled.items() if f"{scope}/" in message]
    point = max(named, key=len) if named else ""
    return replace(nobody, point=point, operation=point and operation(point, config), why=f"fails: {message[:200]}")
