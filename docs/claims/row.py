"""One row of the table: a claim, and what is claimed of each number that the code computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .drawing import Table

Found = Mapping[str, Any]
"""Computed numbers by name: a float, or several in a row."""


@dataclass(frozen=True)
class Claimed:
    """The claim about a number, or of several in a row."""

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
    """One claim, the function that computes its numbers, and what shows them."""

    number: int
    claim: str
    formula: str
    """`a_i` and `a^(i+1)` are an index and a power."""
    numbers: dict[str, Claimed]
    compute: Callable[..., Found]
    """Computes these numbers."""
    symbols: tuple[Callable[..., Any], ...]
    """The functions, classes and methods that implement it."""
    tests: tuple[str, ...]
    """file::function, below `tests/`, beside the one that compares all numbers of the table with the code."""
    figure: Callable[..., Any] | None = None
    """Draws it: `draw_NAME`."""
    table: Callable[[], Table] | None = None
    """Lists what is best read as text, `list_NAME`: a page and a terminal show it so."""
    trained: bool = False
    """Its numbers are those of a trained model, which `compute` and `figure` are given."""
    slow: bool = False
    """Its numbers take a training of a minute: computed where the row is named."""
    missing: str = ""
    """The part of it that the package can't do yet."""
    slip: str = ""
    """The mistakes in the notes that the claim comes from."""

    @property
    def shown(self) -> Callable[..., Any] | None:
        """The function of its figure, or of its table."""
        return self.figure or self.table

    @property
    def picture(self) -> str:
        """The name of its figure or table, such as `heat_maps`; nothing without one."""
        return "" if self.shown is None else self.shown.__name__.partition("_")[2]


def dotted(symbol: Callable[..., Any]) -> str:
    """The name by which a symbol is found: its module's, then its own."""
    return f"{symbol.__module__}.{symbol.__qualname__}"


def as_values(found: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in found) if isinstance(found, Sequence) else (float(found),)


def shown(values: Sequence[float]) -> str:
    return ", ".join(map(_shown, values))


def _shown(value: float) -> str:
    if abs(value) < 1000:
        return f"{value:.6g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
