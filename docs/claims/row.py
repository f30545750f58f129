"""What one row of the table holds: a claim, and what is claimed of each number that the code computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Found = Mapping[str, Any]
"""Computed numbers by name: a float, or several in a row."""


@dataclass(frozen=True)
class Claimed:
    """What is claimed of a number, or of several in a row."""

    values: tuple[float, ...]
    sign: Literal["=", "<", ">", "recorded"] = "="
    """`recorded`: measured, not claimed: it depends on the machine, or on what a model has learned."""
    within: float = 0.0
    """Largest difference of an equal number: 0, or what the digits that are given leave open."""

    def holds(self, found: Sequence[float]) -> bool:
        if self.sign == "recorded":
            return all(math.isfinite(value) for value in found)
        if len(found) != len(self.values):
            return False
        tests = {"=": lambda f, c: abs(f - c) <= self.within, "<": lambda f, c: f < c, ">": lambda f, c: f > c}
        return all(tests[self.sign](f, c) for f, c in zip(found, self.values, strict=True))

    def text(self) -> str:
        if self.sign == "recorded":
            return "recorded"
        sign = "" if self.sign == "=" else f"{self.sign} "
        return f"{sign}{shown(self.values)}" + (f"  ±{self.within:.2g}" if self.within else "")


def equal(*values: float, within: float = 0.0) -> Claimed:
    return Claimed(values, "=", within)


def below(*values: float) -> Claimed:
    return Claimed(values, "<")


def above(*values: float) -> Claimed:
    return Claimed(values, ">")


RECORDED = Claimed((), "recorded")


@dataclass(frozen=True)
class Row:
    """One claim. Paths of code are dotted, those of `compute` and `figure` inside this package."""

    number: int
    claim: str
    formula: str
    """`a_i` and `a^(i+1)` are an index and a power."""
    numbers: dict[str, Claimed]
    compute: str
    """The function that computes these numbers, -> `Found`."""
    symbols: tuple[str, ...]
    """What implements it."""
    tests: tuple[str, ...]
    """file::function, below `tests/`, beside the one that compares all numbers of the table with the code."""
    figure: str | None = None
    """The function that draws it."""
    trained: bool = False
    """Its numbers are those of a trained model, which `compute` and `figure` are given."""
    missing: str = ""
    """What of it the package can't do yet."""
    slip: str = ""
    """What the notes that the claim comes from say otherwise, by mistake."""


def as_values(found: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in found) if isinstance(found, Sequence) else (float(found),)


def shown(values: Sequence[float]) -> str:
    return ", ".join(map(_shown, values))


def _shown(value: float) -> str:
    if abs(value) < 1000:
        return f"{value:.6g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
