"""The rule: at every named point a runtime's error may be a small multiple of float32's own rounding error.

t64: a tensor of the float64 reference. e: a runtime's error against t64. e32: the error of the same reference computed
in float32. u = 2^-24, half a unit in the last place of 1.0.

    rms(e)   <= 4 * max(rms(e32),   u * rms(t64))
    max|e|   <= 8 * max(max|e32|,   u * rms(t64))

A lower precision has a larger u, and e32 is scaled by the same factor. Only valid positions count, as nobody reads the
rows of padding. README.md gives the reasons for this form and the origin of the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

Array = NDArray

UNIT = 2.0**-24  # relative rounding error of float32


@dataclass(frozen=True)
class Budget:
    """Factors of the rule for a precision on a device.

    `unit`: the precision's relative rounding error. e32 shows how a network amplifies rounding errors, so the errors of
    another precision may be `unit / 2^-24` times as large. `origin`: the source of the factors.
    """

    rms: float
    max: float
    unit: float = UNIT
    origin: str = ""


_CPU = "worst of all measured runs on x86 CPUs, times about 1.3"
_LOW = "worst of 60 random models in MLX on an x86 CPU, about doubled"
_QUANTISED = "worst of 24 random models in ONNX Runtime on an x86 CPU, times about 1.4"
_PACKED = "worst of 36 random models in ONNX Runtime on an x86 CPU, about doubled"
_WEBGPU = "the CPU's: what WebGPU allows exp, division and roots stays within them"
_DECLARED = "declared; not measured on this device"

# (precision, device) -> factors. Devices not listed here use the CPU's, reported as "declared".
BUDGETS: dict[tuple[str, str], Budget] = {
    ("float32", "cpu"): Budget(4.0, 8.0, UNIT, _CPU),
    ("float32", "webgpu"): Budget(4.0, 8.0, UNIT, _WEBGPU),
    ("float16", "cpu"): Budget(2.0, 5.0, 2.0**-11, _LOW),
    ("bfloat16", "cpu"): Budget(2.0, 5.0, 2.0**-8, _LOW),
    ("tf32", "cpu"): Budget(2.0, 5.0, 2.0**-11, _DECLARED),
    ("int8", "cpu"): Budget(4.0, 9.0, 2.0**-8, _QUANTISED),
    ("int8-weights", "cpu"): Budget(4.0, 9.0, 2.0**-8, _QUANTISED),
    ("int4", "cpu"): Budget(3.0, 6.0, 2.0**-4, _LOW),
    ("packed", "cpu"): Budget(1.5, 2.0, 2.0**-8, _PACKED),
}


def budget_for(precision: str, device: str, activations: str | None = None) -> Budget:
    """The budget of a precision on a device. Raises UserError for an unknown precision.

    activations: "float32" gives float32's budget: the reference then reads the quantised weights as they are stored, so
    that only float32's rounding errors are left.
    """
    if activations == "float32":
        precision = "float32"
    budget = BUDGETS.get((precision, device))
    if budget is None and (precision, "cpu") in BUDGETS:
        budget = replace(BUDGETS[precision, "cpu"], origin=_DECLARED)
    if budget is None:
        known = ", ".join(dict.fromkeys(p for p, _ in BUDGETS))
        raise UserError(f"no budget for {precision} on {device} (known precisions: {known})")
    return budget


def stored_as(array: Array, precision: str) -> Array:
    """Round a float32 parameter to nearest even in this precision, as a runtime must hold it bit for bit.

    NumPy has no bfloat16, so bfloat16 values are returned as float32.
    """
    if precision == "float16":
        return array.astype(np.float16)
    if precision != "bfloat16":
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True)
class ErrorScale:
    """The size of float32's own error e32 at a tap, the yardstick for runtimes' errors.

    `rms`, `max`: of e32. `size`: rms(t64). `tokens`: how many valid tokens. `worst`: rms of the worst token's error.
    `largest`: max|t64| of rows looked up in a table, 0 for computed values.
    """

    rms: float
    max: float
    size: float
    tokens: int
    worst: float
    largest: float = 0.0

    @classmethod
    def of(cls, error: Array, t64: Array) -> ErrorScale:
        """The scale of a single input, from the errors and true values (N,D) of its valid tokens."""
        squares = np.mean(error * error, axis=-1)
        largest = float(np.abs(error).max(initial=0.0))
        return cls(_rms(error), largest, _rms(t64), len(error), float(np.sqrt(squares.max(initial=0.0))))

    @classmethod
    def pooled(cls, parts: Sequence[ErrorScale]) -> ErrorScale:
        """The scale over several inputs, as if they were a single large sample."""
        tokens = sum(part.tokens for part in parts)
        rms, size = (
            (sum(part.tokens * getattr(part, name) ** 2 for part in parts) / max(tokens, 1)) ** 0.5
            for name in ("rms", "size")
        )
        return cls(rms, max(part.max for part in parts), size, tokens, max(part.worst for part in parts))

    @classmethod
    def drawn(cls, draws: Sequence[ErrorScale]) -> ErrorScale:
        """The scale of an input from several draws of its rounding errors: their quadratic mean."""
        rms, largest, worst = (
            float(np.sqrt(np.mean([getattr(draw, name) ** 2 for draw in draws]))) for name in ("rms", "max", "worst")
        )
        return cls(rms, largest, draws[0].size, draws[0].tokens, worst)

    def or_larger(self, other: ErrorScale) -> ErrorScale:
        """The larger errors of two scales of an input."""
        return replace(
            self, **{name: max(getattr(self, name), getattr(other, name)) for name in ("rms", "max", "worst")}
        )

    def limits(self, pool: ErrorScale, unit: float = UNIT) -> tuple[float, float]:
        """The right-hand sides of the rule without its factors: for rms(e), and for max|e|.

        A short input is a small sample, so its e32 counts at least as much as `pool`'s, e32 over all inputs. A row of a
        table is rounded in steps of its largest number, which in published models may be 10 times its rms.
        """
        scale = max(1.0, self.size / pool.size) if pool.size else 1.0
        usual = (pool.rms**2 + pool.worst**2 / max(self.tokens, 1)) ** 0.5 * scale
        least = UNIT * max(self.size, self.largest / 4)
        coarser = unit / UNIT
        return coarser * max(self.rms, usual, least), coarser * max(self.max, pool.max * scale, least)


@dataclass(frozen=True)
class Truth:
    """The reference's values (B,L,...) of a tap, for an input.

    `bits`: the float32 tensor if the tap is a gather, e.g. an embedding: a float32 runtime must show the same bits.
    """

    t64: Array
    valid: NDArray[np.bool_]
    scale: ErrorScale
    bits: Array | None = None

    @classmethod
    def of(cls, t64: Array, t32: Array, valid: NDArray[np.bool_], exact: bool = False) -> Truth:
        scale = ErrorScale.of(t32[valid] - t64[valid], t64[valid])
        if exact:
            scale = replace(scale, largest=float(np.abs(t64[valid]).max(initial=0.0)))
        return cls(t64, valid, scale, t32 if exact else None)


@dataclass(frozen=True)
class Deviation:
    """A runtime's tensor compared with a `Truth`: rms of the error, the largest absolute error and its index.

    `ulp`: the largest error in units in the last place of the true value. `same_bits`: None if bits aren't compared.
    """

    rms: float
    max: float
    ulp: float
    index: tuple[int, ...]
    got: float
    expected: float
    same_bits: bool | None = None
    detail: str = ""

    @classmethod
    def of(cls, got: Array | None, truth: Truth, missing: str = "") -> Deviation:
        """missing: the reason if `got` is None."""
        if got is None or got.shape != truth.t64.shape:
            shape = "" if got is None else f"shape {got.shape}, expected {truth.t64.shape}"
            detail = shape or missing or "the runtime doesn't show it"
            return cls(np.inf, np.inf, np.inf, (), np.nan, np.nan, detail=detail)
        with np.errstate(invalid="ignore"):  # a broken runtime may give infinities
            error = np.abs(got - truth.t64)
        error[~truth.valid] = 0.0
        error[np.isnan(error)] = np.inf
        if not error.size:
            return cls(0.0, 0.0, 0.0, (), 0.0, 0.0)
        index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
        expected, largest = float(truth.t64[index]), float(error[index])
        same_bits, detail = None, ""
        if not np.isfinite(largest):
            detail = "not finite"
        elif truth.bits is not None and got.dtype == np.float32:
            differing = np.argwhere(_bits(got) != _bits(truth.bits))
            differing = differing[truth.valid[tuple(differing[:, : truth.valid.ndim].T)]]
            same_bits = not len(differing)
            if not same_bits:
                detail = f"{len(differing)} values differ in their bits, first {differing[0].tolist()}"
        ulp = largest / float(np.spacing(np.float32(abs(expected))))
        return cls(_rms(error[truth.valid]), largest, ulp, index, float(got[index]), expected, same_bits, detail)


@dataclass(frozen=True)
class Measurement:
    """A judged deviation: its errors divided by float32's own, and whether they are within the budget."""

    passed: bool
    rms_ratio: float
    max_ratio: float
    share: float
    """The share of the budget used up; over budget above 1."""
    deviation: Deviation
    in_proportion: Deviation | None = None
    """What the deviation would be in a network linear in a lower precision's errors, if this is why it passed."""

    @classmethod
    def of(cls, deviation: Deviation, scale: ErrorScale, pool: ErrorScale, budget: Budget) -> Measurement:
        rms, largest = scale.limits(pool, budget.unit)
        rms_ratio, max_ratio = _ratio(deviation.rms, rms), _ratio(deviation.max, largest)
        share = max(rms_ratio / budget.rms, max_ratio / budget.max)
        passed = share <= 1 if deviation.same_bits is None else deviation.same_bits
        return cls(passed, rms_ratio, max_ratio, share, deviation)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint32)


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale > 0 else float("inf")


def explain() -> str:
    """The text that explains the rule: `rule.txt` with the table of budgets."""
    rows = [(p, d, f"2^{math.log2(b.unit):.0f}", f"{b.rms:g}", f"{b.max:g}", b.origin) for (p, d), b in BUDGETS.items()]
    table = [("precision", "device", "u", "A", "B", "factors"), *rows]
    budgets = "\n".join(f"  {p:10}{d:8}{u:7}{a:>4}{b:>5}   {origin}" for p, d, u, a, b, origin in table)
    text = Path(__file__).with_name("rule.txt").read_text(encoding="utf-8")
    return text.format(budgets=budgets).rstrip("\n")
