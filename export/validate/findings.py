"""The findings of one check of one runtime: plain data, from which a report is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .rule import Budget, Measurement

TAPPED, PLAIN, ON_INTEGERS, AMONG = "tapped", "plain", "on its integers", "among candidates"


@dataclass(frozen=True)
class Runtime:
    """One engine that took part, its budget and where it ran."""

    name: str
    precision: str
    device: str
    budget: Budget
    details: dict[str, str]
    arithmetic: str = ""
    """The matrices that it multiplies, in a few words."""
    retrieval: str = ""
    """The export's finding about the neighbours of its vectors, in words; empty if it didn't look."""
    logits_only: bool = False
    """Another exporter's ONNX file: nothing inside has a known name."""
    missing_taps: tuple[str, ...] = ()
    """Taps that aren't values of its graphs."""
    search_only: bool = False
    """One file with the search inside: it returns tokens and scores."""


@dataclass(frozen=True)
class Weights:
    """One place with parameters (a model in memory, a file) against the checkpoint, bit for bit."""

    runtime: str
    where: str
    count: int
    problems: tuple[str, ...]
    digest: str = ""
    """SHA-256 of the names, types, shapes and values of all its parameters."""

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def result(self) -> str:
        return "equal" if self.passed else f"{len(self.problems)} differ"


@dataclass(frozen=True)
class Point:
    """One tap of one runtime over all inputs. `worst`: the measurement that used up most of its budget.

    `path`: "tapped" (a copy of the model that shows its inside), "plain" (the model as it is used), a name with
    "cached" (plain, step by step), or "on its integers" (against the reference with the integers that it shows).
    `failures`: the inputs on which it was over budget.
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


def worse(a: Point, b: Point) -> Point:
    """Join two points: all inputs, all failures, and the measurement that used up more of its budget."""
    worst = max(a, b, key=lambda point: (not point.worst.passed, point.worst.share))
    return replace(worst, inputs=a.inputs + b.inputs, failures=a.failures + b.failures)


@dataclass(frozen=True)
class Divergence:
    """One sentence whose tokens aren't the reference's: both outputs, as text if there is a tokenizer."""

    sentence: int
    got: tuple[str, ...]
    expected: tuple[str, ...]
    summary: str
    problem: bool


@dataclass(frozen=True)
class Tokens:
    """Freely generated tokens of one runtime and one search, each judged by the float64 reference.

    `ties`: sentences that differ where the reference sees a tie within the budget. `problems`: real differences.
    """

    runtime: str
    search: str
    sentences: int
    tokens: int
    ties: tuple[str, ...]
    problems: tuple[str, ...]
    divergences: tuple[Divergence, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def result(self) -> str:
        if self.problems:
            return f"{len(self.problems)} differ"
        return f"equal, {len(self.ties)} at a certified tie" if self.ties else "equal"


@dataclass(frozen=True)
class PackageFiles:
    """The files around a package's graphs: how many were compared, what is wrong with them, and files that nobody
    reads and that belong to no package."""

    compared: int
    problems: tuple[str, ...]
    unread: tuple[str, ...] = ()
    misleading: bool = False
    """The record describes other graphs of this checkpoint, so that these can't be run as it says."""

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        return f"files around the graphs: {self.compared}, each as the checkpoint gives it"

    @property
    def result(self) -> str:
        return self.summary if self.passed else f"files around the graphs: {len(self.problems)} differ"
