"""Tensors of runtimes judged together: how much an error may be depends on all inputs of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cases import Case
from .checks.second_look import WORTH_A_SECOND_LOOK
from .engines.protocol import Engine
from .findings import Point, worse
from .rule import Budget, Deviation, ErrorScale, Measurement


@dataclass(frozen=True)
class Sample:
    """One tensor of one runtime for one input, not judged yet: that takes the error scales of all inputs."""

    engine: Engine
    path: str
    tap: str
    case: Case
    deviation: Deviation
    scale: ErrorScale


def judged_points(
    samples: Sequence[Sample], second_look: Callable[[Case, str], ErrorScale], budget: Budget | None = None
) -> list[Point]:
    """Judge the samples; points come in the order of the data. Samples slightly over the budget are judged by a second
    look. budget: in place of the engines' own."""
    parts: dict[str, list[ErrorScale]] = {}
    for sample in samples:
        parts.setdefault(sample.tap, []).append(sample.scale)
    pools = {tap: ErrorScale.pooled(scales) for tap, scales in parts.items()}
    points: dict[tuple[str, str, str], Point] = {}
    for sample in samples:
        engine, tap = sample.engine, sample.tap
        limits = engine.budget if budget is None else budget
        measurement = Measurement.of(sample.deviation, sample.scale, pools[tap], limits)
        if not measurement.passed and measurement.share <= WORTH_A_SECOND_LOOK and sample.deviation.same_bits is None:
            scale = second_look(sample.case, tap)
            measurement = Measurement.of(sample.deviation, scale, pools[tap], limits)
        case = sample.case.name
        point = Point(engine.name, sample.path, tap, measurement, case, 1, () if measurement.passed else (case,))
        key = (engine.name, sample.path, tap)
        points[key] = worse(points[key], point) if key in points else point
    return list(points.values())


def largest_error(engine: Engine, scales: Sequence[ErrorScale]) -> float:
    """Return the largest error that a logit of this runtime may have, by the error scales of all inputs' logits."""
    budget, pool = engine.budget, ErrorScale.pooled(scales)
    return max(budget.max * one.limits(pool, budget.unit)[1] for one in scales)
