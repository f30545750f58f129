"""What one check found of one runtime: plain data, of which a report is made."""

from __future__ import annotations

from dataclasses import dataclass

from .rule import Budget, Measurement

TAPPED, PLAIN = "tapped", "plain"


@dataclass(frozen=True)
class Runtime:
    """One engine that took part, its budget and where it ran."""

    name: str
    precision: str
    device: str
    budget: Budget
    details: dict[str, str]
    arithmetic: str = ""
    """What it multiplies, in a few words."""
    logits_only: bool = False
    """Somebody else's ONNX file: nothing inside it has a name that could be compared."""
    missing_taps: tuple[str, ...] = ()
    """Taps that aren't values of its graphs."""
    search_only: bool = False
    """One file with the search inside: it returns tokens and scores."""


@dataclass(frozen=True)
class Weights:
    """One holder of parameters (a model in memory, a file) against the checkpoint, bit for bit."""

    runtime: str
    where: str
    count: int
    problems: tuple[str, ...]
    digest: str = ""
    """SHA-256 of names, types, shapes and values of all that it holds."""

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Point:
    """One tap of one runtime over all inputs: `worst` is the measurement that came nearest to its budget, or went past.

    `path`: tapped (a copy of the model that shows its inside), plain (the model as it is used), or a name with "cached"
    (plain, step by step). `failures`: the inputs on which it was over budget.
    """

    runtime: str
    path: str
    tap: str
    worst: Measurement
    case: str
    inputs: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Parting:
    """One sentence whose tokens aren't the reference's: both outputs, as text where there is a tokenizer."""

    sentence: int
    got: tuple[str, ...]
    expected: tuple[str, ...]
    summary: str
    problem: bool


@dataclass(frozen=True)
class Tokens:
    """Free-running tokens of one runtime and one kind of search, each choice held against the float64 reference.

    `ties`: sentences that part from the reference where it sees a tie within the budget. `problems`: real divergences.
    """

    runtime: str
    search: str
    sentences: int
    tokens: int
    ties: tuple[str, ...]
    problems: tuple[str, ...]
    partings: tuple[Parting, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems
