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
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from export.precision.activations import ZERO, unit_of, zero_point
from export.precision.int8 import quantiser
from export.precision.rounding import from_int8_rows
from export.validate.cases import Case, reference_taps
from export.validate.findings import ON_INTEGERS, Point
from export.validate.judging import Sample, judged_points
from export.validate.reference import Reference
from export.validate.rule import BUDGETS, UNIT, Deviation, ErrorScale, Truth
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import SYMMETRIC, UNSIGNED, Int8Scales, ProductScales, multiplied_names
from mlx_transformer.core.parameters import embedding_names

from .second_look import DRAWS, Reordered

Array = NDArray
BUDGET = BUDGETS["float32", "cpu"]
INTEGERS = " (integers)"
"""Ends the name of a point that is what came to a product."""


class IntegerReference(Reference):
    """The network whose products are those of given integers. weights: of tables that are only looked up, those that
    a package holds (`with_tables`). `seen`: what came to each product."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Array],
        scales: Int8Scales,
        integers: Mapping[str, Array],
        dtype: DTypeLike,
    ) -> None:
        multiplied = multiplied_names(config)
        rounded = (name for name in scales.products if name in multiplied and not scales.of(name).float32)
        quantised = {name: quantiser(name, scales.of(name).weight)(weights[name]) for name in rounded}
        tables = {name: from_int8_rows(*parts) for name, parts in quantised.items()}
        super().__init__(config, {**weights, **tables}, dtype)
        self.quantised, self.scales, self.integers = quantised, scales, integers
        self.seen: dict[str, Array] = {}

    def _product(self, x: Array, weight: str) -> Array:
        if self.scales.of(weight).float32:
            return super()._product(x, weight)
        self.seen[weight] = x
        fixed, (w, scale) = self.scales.of(weight), self.quantised[weight]
        sums = (self.integers[weight].astype(np.float64) - zero_point(fixed)) @ w.T.astype(np.float64)  # exact
        return sums.astype(self.dtype) * (unit_of(fixed) * scale).astype(self.dtype)


class Redrawn(IntegerReference, Reordered):
    """The same with the sums of softmaxes in another order each time; its products are exact in any order."""


def on_its_integers(
    engine: Any, stored: Mapping[str, Array], cases: Sequence[Case], searching: bool = False
) -> Iterator[Point]:
    """Yield every named point of a runtime, and every product whose integers aren't the reference's; nothing for one
    that doesn't show its integers or where a product has a scale a token. searching: the
    products alone, in the passes of a search."""
    names = {name for name in multiplied_names(engine.config) if not engine.int8_scales.of(name).float32}
    if any(engine.int8_scales.of(name).activation is None for name in names):
        return
    stored = with_tables(engine, stored)
    samples: list[Sample] = []
    for case in cases:
        taps, integers = engine.taps_with_integers(case, searching)
        if not names <= integers.keys():
            return
        exact = {name + INTEGERS: integers[name] for name in names}
        exact |= {} if searching else {**engine.taps(case), **taps}
        what = engine.config, stored, engine.int8_scales, integers
        t64, t32 = (_values(IntegerReference(*what, kind), case) for kind in (np.float64, np.float32))
        for tap in (tap for tap in t64 if tap in exact):
            truth, got = Truth.of(t64[tap], t32[tap], _valid(tap, case)), exact[tap]
            if tap.endswith(INTEGERS):
                got = _nearest(got, truth, engine.int8_scales.of(tap.removesuffix(INTEGERS)))
            samples.append(Sample(engine, ON_INTEGERS, tap, case, Deviation.of(got, truth), truth.scale))
    by_name = {case.name: case for case in cases}
    drawn = cache(lambda name: _redrawn(engine, stored, by_name[name], searching))
    yield from judged_points(samples, lambda case, tap: drawn(case.name)[tap], BUDGET)


def with_tables(engine: Any, stored: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters with the tables that are only looked up as an engine's files have to hold them: how these
    were rounded, their names say."""
    tables = embedding_names(engine.config) - multiplied_names(engine.config)
    values = {
        name: engine.as_stored(where, name, stored[name]) for where, name, _ in engine.parameters() if name in tables
    }
    return {**stored, **values}


def _values(reference: IntegerReference, case: Case) -> dict[str, Array]:
    """Return every tap of a reference, and what came to its products."""
    taps = reference_taps(reference, case)
    return taps | {name + INTEGERS: x for name, x in reference.seen.items()}


def _redrawn(engine: Any, stored: Mapping[str, Array], case: Case, searching: bool) -> dict[str, ErrorScale]:
    """Return float32's own error of each of them, from several draws (`second_look.py`)."""
    what = engine.config, stored, engine.int8_scales, engine.taps_with_integers(case, searching)[1]
    t64, again = _values(IntegerReference(*what, np.float64), case), Redrawn(*what, np.float32)
    draws = [_values(again, case) for _ in range(DRAWS)]
    scales = {tap: [Truth.of(t64[tap], each[tap], _valid(tap, case)).scale for each in draws] for tap in t64}
    return {tap: ErrorScale.drawn(each) for tap, each in scales.items()}


def _valid(tap: str, case: Case) -> Array:
    """Return (B,L), the positions of a tap or of a product's activations that count."""
    if not tap.endswith(INTEGERS):
        return case.valid(tap)
    of_memory = ("cross_attention.key_proj.weight", "cross_attention.value_proj.weight")
    of_source = tap.startswith("encoder.") or tap.removesuffix(INTEGERS).endswith(of_memory)
    return case.source_real if of_source else case.valid("logits")


def _nearest(q: Array, x: Truth, fixed: ProductScales) -> Array:
    """Return the activations nearest to the reference's that a runtime's integers are of: the reference's own, but
    where they are of the other side of a middle. The division by 1/a rounds twice."""
    assert fixed.activation is not None
    least, most = {UNSIGNED: (0, UNSIGNED), SYMMETRIC: (-SYMMETRIC, SYMMETRIC)}.get(fixed.steps, (-ZERO, ZERO - 1))
    a, integer = np.float64(fixed.activation), q.astype(np.float64) - zero_point(fixed)
    steps = np.clip(x.t64 * a, least, most)
    beyond = np.where(np.rint(steps) == integer, 0.0, np.abs(steps - integer) - 0.5 - 2 * UNIT * np.abs(steps))
    return x.t64 + np.maximum(beyond, 0.0) / a
