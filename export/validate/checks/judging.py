"""Judge tensors, and choices along given tokens, after all inputs have run.

The allowed error of a tensor depends on the error scales of all inputs. So samples and choices are collected first.

The float32 reference's error is a single random draw of rounding errors. If a sensitive token decides a tensor (few
tokens, sharp attention, a norm of small numbers), draws differ by a factor of ten. A lucky draw then makes a correct
runtime look wrong. The same sums in another order are float32 results just as good, so their errors are further draws;
the rule then uses the mean of their squares. Draws take time, so only points slightly over their budget get this second
look. A point far over its budget stays over it with any draw.

A runtime that adds all the terms of a product, or of a norm's mean, to a single accumulator (`Engine.single_sums`) may
also have the error of that order. Each addition rounds the sum reached so far. In SmolLM2, where a single number of a
vector is 17,478, the error is 2 to 6 times a BLAS's. The mean of 2,048 squares has 19 times the error of NumPy's
pairwise sum, and the norm 7 times. This shows in the first layer, where nothing else has been rounded yet.

Float32's error predicts a lower precision's if the network passes on both in proportion. Rounding to int8 is sometimes
too coarse for that: in SmolLM2 it turns a 413 in the residual stream into 2,519. The next layer cancels 92 % of a small
error there, so float32 errs little after it. But the exact layer turns 2,519 into -3,544, and 413 into 23. So a tap of
a lower precision that is still over its budget is judged again. Each step's own error (the runtime's value less the
reference's from the runtime's earlier values) is made as small as float32's and added to the float64 reference at that
step. The resulting deviation, scaled up again, is judged by the same budget. A runtime's mistake is part of a step's
own error and shows as before. Only the exact network's disproportionate response to large errors no longer counts.

Choices:

    top-1, teacher-forced   the likeliest next token at every position, against the float64 reference's
    cached against full     the likeliest token by a runtime's cached passes, against its own full pass

Another choice than expected is accepted only at a certified tie: a gap within twice the logits' budget, or four times
the budget for cached against full, where both have errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import DTypeLike, NDArray

from export.validate.cases import TAPS_ALONE, Case, Extras, reference_outputs
from export.validate.engines.protocol import Engine
from export.validate.findings import PLAIN, TAPPED, Point, Tokens, worse
from export.validate.reference import Parameters, Reference
from export.validate.rule import UNIT, Budget, Deviation, ErrorScale, Measurement, Truth
from mlx_transformer.core.config import TransformerConfig


@dataclass(frozen=True)
class Sample:
    """A runtime's tensor for an input, not judged yet."""

    engine: Engine
    path: str
    tap: str
    case: Case
    deviation: Deviation
    scale: ErrorScale


def judged_points(
    samples: Sequence[Sample],
    second_look: Callable[[Case, str, Engine], ErrorScale],
    budget: Budget | None = None,
    in_proportion: Callable[[Sample], Deviation | None] = lambda sample: None,
) -> list[Point]:
    """Judge the samples; points come in the order of their first samples.

    second_look: draws float32's error again, for samples slightly over their budget. budget: replaces the engines' own.
    in_proportion: a lower precision's deviation if the network were linear in its errors; None where that is unknown.
    """
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
            scale = second_look(sample.case, tap, engine)
            measurement = Measurement.of(sample.deviation, scale, pools[tap], limits)
            linear = in_proportion(sample) if not measurement.passed and limits.unit > UNIT else None
            if linear is not None and Measurement.of(linear, scale, pools[tap], limits).passed:
                measurement = replace(measurement, passed=True, in_proportion=linear)
        case = sample.case.name
        point = Point(engine.name, sample.path, tap, measurement, case, 1, () if measurement.passed else (case,))
        key = (engine.name, sample.path, tap)
        points[key] = worse(points[key], point) if key in points else point
    return list(points.values())


def largest_error(budget: Budget, scales: Sequence[ErrorScale]) -> float:
    """Return the largest allowed error of a runtime's logits. scales: error scales of the logits, for all inputs."""
    pool = ErrorScale.pooled(scales)
    return max(budget.max * one.limits(pool, budget.unit)[1] for one in scales)


Array = NDArray

DRAWS = 8
SUMS = 1 << 16
"""Most sums that are advanced together, term by term: as many as fit into a CPU's level 2 cache."""
WORTH_A_SECOND_LOOK = 16.0
"""Points above this share of their budget get no second look.

In 12,113 taps of tiny random models the mean of nine draws was at most 2.6 times the least draw in 99 % of taps, 4.9
times in 99.9 %. In a model whose queries were norms of single numbers near zero it was 10 times the least, and every
runtime had the same error.
"""


class Reordered(Reference):
    """The reference with sums in a new random order each time, in linear maps and softmaxes.

    Softmax terms are added one after another: NumPy's pairwise sum is several times as exact over a thousand keys, and
    runtimes needn't sum pairwise. Products with the matrices `single_sums`, and means of the norms named there, add
    their terms one after another, too, but in the given order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Parameters,
        dtype: DTypeLike,
        inner_points: bool = False,
        single_sums: Collection[str] = (),
    ) -> None:
        super().__init__(config, weights, dtype, inner_points)
        self._rng, self._single_sums = np.random.default_rng(0), single_sums

    def _product(self, x: Array, weight: str) -> Array:
        if weight in self._single_sums:
            return self._single_sum(x, weight)
        order = self._rng.permutation(x.shape[-1])
        return x[..., order] @ self.weights[weight][:, order].T

    def _single_sum(self, x: Array, weight: str) -> Array:
        """Compute x W^T with y += x_k w_k for k = 0, 1, ..., for a few rows of W at a time."""
        terms = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)  # (K,N)
        parts = []
        for rows in self.weights.parts(weight):
            for first in range(0, len(rows), count := max(1, SUMS // terms.shape[1])):
                W = np.ascontiguousarray(rows[first : first + count].T)  # (K,M)
                y, term = (np.zeros((terms.shape[1], W.shape[1]), self.dtype) for _ in range(2))
                for x_k, w_k in zip(terms, W, strict=True):
                    y += np.multiply(x_k[:, None], w_k, out=term)
                parts.append(y)
        return np.concatenate(parts, axis=1).reshape(*x.shape[:-1], -1)

    def _mean_of(self, name: str) -> Callable[[Array], Array]:
        if f"{name}.weight" not in self._single_sums:
            return super()._mean_of(name)
        return lambda x: np.add.accumulate(x, axis=-1)[..., -1:] / x.dtype.type(x.shape[-1])

    def _weights(self, scores: Array) -> Array:
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        order = self._rng.permutation(e.shape[-1])
        return e / np.add.accumulate(e[..., order], axis=-1)[..., -1:]


class SecondLook:
    """float32's own error at every tap of a case, from `DRAWS` draws; a case is computed on first use.

    For an engine with `single_sums` one more draw sums in the engine's order, and counts in full if it errs more.
    """

    def __init__(self, config: TransformerConfig, weights: Parameters, extras: Extras = TAPS_ALONE) -> None:
        self._config, self._weights, self._extras = config, weights, extras
        self._errors: dict[tuple[str, frozenset[str]], dict[str, ErrorScale]] = {}
        self._linear: dict[tuple[str, str, str], dict[str, Deviation]] = {}

    def __call__(self, case: Case, tap: str, engine: Engine) -> ErrorScale:
        usual = self._of(case, frozenset())[tap]
        return usual.or_larger(self._of(case, engine.single_sums)[tap]) if engine.single_sums else usual

    def in_proportion(self, sample: Sample) -> Deviation | None:
        """A tap's deviation if the network were linear in the errors of the steps up to it; None without taps.

        Where the network is linear, this is the sample's own deviation.
        """
        *way, tapped = sample.path.rsplit(", ", 1)
        if tapped != TAPPED:
            return None
        key = sample.engine.name, sample.path, sample.case.name
        if key not in self._linear:
            cached = sample.engine.cached_taps(sample.case)[way[0]] if way else {}
            values = sample.engine.taps(sample.case) | cached
            self._linear[key] = self._small_errors(sample.case, values, UNIT / sample.engine.budget.unit)
        return self._linear[key].get(sample.tap)

    def _small_errors(self, case: Case, values: Mapping[str, Array], factor: float) -> dict[str, Deviation]:
        """Deviations of a run's taps if each step's own error were `factor` times as large, divided by `factor`."""
        exact, own = Reference(self._config, self._weights), dict[str, Array]()

        def as_in_run(name: str, value: Array) -> Array:
            got = values.get(name)
            if got is None or got.shape != value.shape:
                return value
            own[name] = np.where(case.counted(name, value)[..., None], got - value, 0.0)
            return value + own[name]

        def with_small_error(name: str, value: Array) -> Array:
            return value + factor * own[name] if name in own else value

        truth = reference_outputs(exact, case, TAPS_ALONE)
        reference_outputs(exact, case, TAPS_ALONE, as_in_run)
        small = reference_outputs(exact, case, TAPS_ALONE, with_small_error)
        return {
            name: Deviation.of(
                truth[name] + (small[name] - truth[name]) / factor,
                Truth.of(truth[name], truth[name], case.counted(name, truth[name])),
            )
            for name in own
        }

    def _of(self, case: Case, single_sums: frozenset[str]) -> dict[str, ErrorScale]:
        if (case.name, single_sums) not in self._errors:
            self._errors[case.name, single_sums] = self._drawn(case, single_sums)
        return self._errors[case.name, single_sums]

    def _drawn(self, case: Case, single_sums: frozenset[str]) -> dict[str, ErrorScale]:
        what, inner = (self._config, self._weights), self._extras.layer is not None
        truth = reference_outputs(Reference(*what, inner_points=inner), case, self._extras)
        draws: dict[str, list[ErrorScale]] = {name: [] for name in truth}
        reordered = Reordered(*what, np.float32, inner, single_sums)
        for _ in range(1 if single_sums else DRAWS):
            for name, t32 in reference_outputs(reordered, case, self._extras).items():
                valid = case.counted(name, t32)
                t64 = truth[name][valid]
                draws[name].append(ErrorScale.of(t32[valid] - t64, t64))
        return {name: ErrorScale.drawn(errors) for name, errors in draws.items()}


CHOOSING = ("vocabulary", "classes", "token-classes")
"""Kinds of heads whose largest logit is a choice."""
MOST_NOTED = 1000  # for each runtime: a broken runtime disagrees everywhere


@dataclass
class _Noted:
    """`sentences`: rows. `tokens`: valid positions. `parted`: (gap of the logits, message) of differing choices."""

    sentences: int = 0
    tokens: int = 0
    parted: list[tuple[float, str]] = field(default_factory=list)


class Agreement:
    """Collects the choices of a comparison, by runtime and kind of choice."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], _Noted] = {}
        self._full: dict[str, Array] = {}

    def add(self, runtime: str, path: str, case: Case, logits: Array | None, truth: Truth) -> None:
        """Add the logits (B,L,V) of a path. A case's plain path must come first."""
        if path == PLAIN:
            self._full.pop(runtime, None)
        if logits is None or logits.shape != truth.t64.shape:
            return
        if path == PLAIN:
            self._full[runtime] = logits
            self._note(runtime, "top-1, teacher-forced", case, logits, truth.t64, truth)
        elif path == "cached" and runtime in self._full:
            self._note(runtime, "cached against full", case, logits, self._full[runtime], truth)

    def _note(self, runtime: str, kind: str, case: Case, got: Array, expected: Array, truth: Truth) -> None:
        noted = self._noted.setdefault((runtime, kind), _Noted())
        noted.sentences += len(got)
        noted.tokens += int(truth.valid.sum())
        chosen, best = got.argmax(axis=-1), expected.argmax(axis=-1)
        for place in np.argwhere((chosen != best) & truth.valid)[: MOST_NOTED - len(noted.parted)]:
            at = tuple(map(int, place))
            gap = float(expected[at][best[at]]) - float(expected[at][chosen[at]])
            where = ", position ".join(map(str, at))
            message = f"{case.name}, row {where}: {chosen[at]}, expected {best[at]}, gap {gap:.3g}"
            noted.parted.append((gap, message))

    def judged(self, limits: Mapping[str, float]) -> Iterator[Tokens]:
        """Judge all choices. limits: the largest allowed error of a logit, by runtime."""
        for (runtime, kind), noted in self._noted.items():
            # Cached against full: both tensors have errors, so the gap may be twice as large.
            tie = limits[runtime] * (2 if kind.startswith("top-1") else 4)
            problems = [
                f"{message} (a tie would be at most {tie:.3g})" for gap, message in noted.parted if not gap <= tie
            ]
            ties = [message for gap, message in noted.parted if gap <= tie]
            yield Tokens(runtime, kind, noted.sentences, noted.tokens, tuple(ties), tuple(problems))
