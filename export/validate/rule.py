"""The rule: a runtime may err about as much as single precision must, at every named point, and no more.

For a tensor t64 of the float64 reference, a runtime's error e against it, and the error e32 of the same reference
computed in float32 (u = 2^-24, half a unit in the last place of 1.0):

    rms(e)   <= 4 * max(rms(e32),   u * rms(t64))
    max|e|   <= 8 * max(max|e32|,   u * rms(t64))

The criterion of `torch._dynamo.same`: error against float64, times a small factor. A fixed allclose passes real bugs: a
norm's epsilon of 1e-6 for 1e-5 stays below 1e-3 everywhere, and so do values scaled by 0.99 in one layer.
Only valid positions count: what a padding token's row holds is nobody's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.spec.errors import UserError

Array = NDArray

UNIT = 2.0**-24  # relative rounding error of float32, which no tensor escapes


@dataclass(frozen=True)
class Budget:
    """Factors of the rule for one precision on one device."""

    rms: float
    max: float


# (precision, device) -> factors. Calibrated: worst of all measured runs, times about 1.3.
BUDGETS: dict[tuple[str, str], Budget] = {
    ("float32", "cpu"): Budget(rms=4.0, max=8.0),
}


def budget_for(precision: str, device: str) -> Budget:
    """The declared budget; `UserError` where none was calibrated."""
    try:
        return BUDGETS[precision, device]
    except KeyError:
        known = ", ".join(f"{p} on {d}" for p, d in BUDGETS)
        raise UserError(f"validate: no calibrated budget for {precision} on {device} (known: {known})") from None


@dataclass(frozen=True)
class Truth:
    """One tap of one input as the reference sees it: (B,L,...) in float64, what float32 makes of it, and who is real.

    `rms` and `max`: the two right-hand sides of the rule before its factors. `bits`: the float32 tensor, where the
    tap is a gather and a runtime has to show the same bits.
    """

    t64: Array
    valid: NDArray[np.bool_]
    rms: float
    max: float
    bits: Array | None = None

    @classmethod
    def of(cls, t64: Array, t32: Array, valid: NDArray[np.bool_], exact: bool = False) -> Truth:
        real, error = t64[valid], t32[valid].astype(np.float64) - t64[valid]
        least = UNIT * _rms(real)
        largest = float(np.abs(error).max(initial=0.0))
        return cls(t64, valid, max(_rms(error), least), max(largest, least), t32 if exact else None)


@dataclass(frozen=True)
class Measurement:
    """A runtime's tensor against a `Truth`; a ratio is its error over the error that float32 makes by itself.

    `ulp`: the largest error in units in the last place of the true value there. `index`: where it is. `bits`: judged
    bit for bit.
    """

    passed: bool
    rms_ratio: float
    max_ratio: float
    max_error: float
    ulp: float
    index: tuple[int, ...]
    got: float
    expected: float
    bits: bool = False
    detail: str = ""

    def share(self, budget: Budget) -> float:
        """How much of the budget is used up: above 1 it is exceeded."""
        return max(self.rms_ratio / budget.rms, self.max_ratio / budget.max)


def measure(got: Array | None, truth: Truth, budget: Budget) -> Measurement:
    """Judge one tensor by the rule, or bit for bit where the truth holds bits."""
    if got is None or got.shape != truth.t64.shape:
        detail = "the runtime doesn't show it" if got is None else f"shape {got.shape}, expected {truth.t64.shape}"
        return Measurement(False, np.inf, np.inf, np.inf, np.inf, (), np.nan, np.nan, detail=detail)
    error = np.where(truth.valid.reshape(*truth.valid.shape, *[1] * (got.ndim - 2)), got - truth.t64, 0.0)
    if not error.size:
        return Measurement(True, 0.0, 0.0, 0.0, 0.0, (), 0.0, 0.0)
    worst = np.where(np.isfinite(error), np.abs(error), np.inf)
    index = np.unravel_index(int(worst.argmax()), worst.shape)
    expected, largest = float(truth.t64[index]), float(worst[index])
    rms_ratio = _ratio(_rms(worst[truth.valid]), truth.rms)
    max_ratio = _ratio(largest, truth.max)
    detail, bits, passed = "", False, rms_ratio <= budget.rms and max_ratio <= budget.max
    if not np.isfinite(largest):
        detail, passed = "not finite", False
    elif truth.bits is not None and got.dtype == np.float32:
        here, there = got[truth.valid], truth.bits[truth.valid]
        differing = np.count_nonzero(here.view(np.uint32) != there.view(np.uint32))
        bits, passed = True, differing == 0
        detail = "" if passed else f"{differing} of {here.size} values differ in their bits"
    ulp = largest / float(np.spacing(np.float32(abs(expected)))) if np.isfinite(largest) else np.inf
    place = tuple(int(i) for i in index)
    return Measurement(passed, rms_ratio, max_ratio, largest, ulp, place, float(got[index]), expected, bits, detail)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _ratio(error: float, natural: float) -> float:
    if error == 0:
        return 0.0
    return error / natural if natural > 0 else float("inf")
