"""int8 with fixed scales, judged as the float32 network that it is between its integers.

A rounding to integers is a step: an error of 1e-7 in front of it becomes a whole one behind it now and then, and the
next layers carry that on. So the reference takes over the integers that a runtime shows, and is the truth of what that
runtime computes of them: then every named point is within float32's budget, not int8's. And the integers are those of
the reference's own activations, but where these are as near to the middle of two steps as float32 may err: a flip.

    reference x64 --> x64 a --> rounded --- equal to, or a flip of ---> the runtime's q
                                                                          |
                     reference's next x64 <-- (q W) scale / a + bias <----+
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from export.precision.int8 import ZERO, quantiser, unit_of, zero_point
from export.precision.rounding import from_int8_rows
from export.validate.cases import Case, reference_outputs
from export.validate.findings import ON_INTEGERS, Point
from export.validate.reference import Reference
from export.validate.rule import BUDGETS, UNIT, Deviation, ErrorScale, Measurement, Truth
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import SYMMETRIC, UNSIGNED, Int8Scales, ProductScales, multiplied_names

Array = NDArray
BUDGET = BUDGETS["float32", "cpu"]


class IntegerReference(Reference):
    """The network whose products are those of given integers. `seen`: what came to each product."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Array],
        scales: Int8Scales,
        integers: Mapping[str, Array],
        dtype: DTypeLike,
    ) -> None:
        quantised = {name: quantiser(name, scales.of(name).weight)(weights[name]) for name in scales.products}
        tables = {name: from_int8_rows(*parts) for name, parts in quantised.items()}
        super().__init__(config, {**weights, **tables}, dtype)
        self.quantised, self.scales, self.integers = quantised, scales, integers
        self.seen: dict[str, Array] = {}

    def _product(self, x: Array, weight: str) -> Array:
        self.seen[weight] = x
        fixed, (w, scale) = self.scales.of(weight), self.quantised[weight]
        sums = (self.integers[weight].astype(np.float64) - zero_point(fixed)) @ w.T.astype(np.float64)  # exact
        return sums.astype(self.dtype) * (unit_of(fixed) * scale).astype(self.dtype)


def on_its_integers(engine: Any, stored: Mapping[str, Array], cases: Sequence[Case]) -> Iterator[Point]:
    """Yield every named point of a runtime, and every product whose integers aren't the reference's; nothing for one
    that doesn't show its integers or where a product has a scale a token."""
    scales, config = engine.int8_scales, engine.config
    names = multiplied_names(config)
    if any(scales.of(name).activation is None for name in names):
        return
    found: list[tuple[Case, str, Deviation, ErrorScale]] = []
    for case in cases:
        integers = engine.integers(case)
        if not names <= integers.keys():
            return
        double, single = (IntegerReference(config, stored, scales, integers, kind) for kind in (np.float64, np.float32))
        t64, t32 = (reference_outputs(reference, case, None) for reference in (double, single))
        taps = engine.taps(case)
        for tap in t64.keys() & taps.keys():
            truth = Truth.of(t64[tap], t32[tap], case.valid(tap))
            found.append((case, tap, Deviation.of(taps[tap], truth), truth.scale))
        for name in sorted(names):
            seen = Truth.of(double.seen[name], single.seen[name], _valid(name, case))
            found.append((case, f"{name} (integers)", _flips(integers[name], seen, scales.of(name)), seen.scale))
    pools = {tap: ErrorScale.pooled([each for _, t, _, each in found if t == tap]) for _, tap, *_ in found}
    points: dict[str, Point] = {}
    for case, tap, deviation, scale in found:
        worst = Measurement.of(deviation, scale, pools[tap], BUDGET)
        failures = () if worst.passed else (case.name,)
        point = Point(engine.name, ON_INTEGERS, tap, worst, case.name, 1, failures)
        before = points.get(tap, point)
        kept = max(before, point, key=lambda each: (not each.worst.passed, each.worst.share))
        inputs = before.inputs + 1 if tap in points else 1
        points[tap] = replace(
            kept, inputs=inputs, failures=(*before.failures, *failures) if tap in points else failures
        )
    yield from points.values()


def _valid(name: str, case: Case) -> Array:
    """Return (B,L), the positions of a product's activations that count."""
    of_source = name.startswith("encoder.") or name.endswith(
        ("cross_attention.key_proj.weight", "cross_attention.value_proj.weight")
    )
    return case.source_real if of_source else case.valid("logits")


def _flips(q: Array, x: Truth, fixed: ProductScales) -> Deviation:
    """Return how far the reference's activations are from the middle that a runtime's integers have on their other
    side. The division by 1/a rounds twice."""
    assert fixed.activation is not None
    least, most = {UNSIGNED: (0, UNSIGNED), SYMMETRIC: (-SYMMETRIC, SYMMETRIC)}.get(fixed.steps, (-ZERO, ZERO - 1))
    a, integer = np.float64(fixed.activation), q.astype(np.float64) - zero_point(fixed)
    steps = np.clip(x.t64 * a, least, most)
    beyond = np.where(np.rint(steps) == integer, 0.0, np.abs(steps - integer) - 0.5 - 2 * UNIT * np.abs(steps))
    return Deviation.of(x.t64 + np.maximum(beyond, 0.0) / a, x)
