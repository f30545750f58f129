"""Results of the checks, as plain data for the report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .rule import Budget, Measurement

TAPPED, PLAIN, ON_INTEGERS, AMONG = "tapped", "plain", "on its integers", "among candidates"


@dataclass(frozen=True)
class Runtime:
    """An engine in the comparison: its budget, and where it ran."""

    name: str
    precision: str
    device: str
    budget: Budget
    details: dict[str, str]
    arithmetic: str = ""
    """How its matrices are multiplied, in a few words, e.g. which are integers."""
    retrieval: str = ""
    """How the precision changes a text's nearest neighbours, as measured by the export; empty if not measured."""
    logits_only: bool = False
    """Another exporter's ONNX file: no value inside has a known name."""
    missing_taps: tuple[str, ...] = ()
    """Taps without a value in its graphs."""
    search_only: bool = False
    """A single file with the search inside: it returns tokens and scores."""


@dataclass(frozen=True)
class Weights:
    """The parameters in a model in memory, or in a file, compared with the checkpoint bit for bit."""

    runtime: str
    where: str
    count: int
    problems: tuple[str, ...]
    digest: str = ""
    """SHA-256 of all parameters' names, types, shapes and values."""

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def result(self) -> str:
        return "equal" if self.passed else f"{len(self.problems)} differ"


@dataclass(frozen=True)
class Point:
    """A tap of a runtime over all inputs. `worst`: the measurement that used up most of its budget.

    `failures`: the inputs on which the tap was over budget. `path`:

        tapped                   a copy of the model with inner values as outputs
        plain                    the model as people use it
        "cached", "cached, ..."  pass by pass with a cache
        on its integers          int8 with fixed scales, against a reference computed from the runtime's own integers
        among candidates         graphs for the logits of given ids only
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
    """Merge two points: both points' inputs and failures, and the worse measurement."""
    worst = max(a, b, key=lambda point: (not point.worst.passed, point.worst.share))
    return replace(worst, inputs=a.inputs + b.inputs, failures=a.failures + b.failures)


@dataclass(frozen=True)
class Divergence:
    """A sentence with other tokens than the reference's: both outputs, as text if there is a tokenizer."""

    sentence: int
    got: tuple[str, ...]
    expected: tuple[str, ...]
    summary: str
    problem: bool


@dataclass(frozen=True)
class Tokens:
    """The tokens of a runtime's search, judged by the float64 reference.

    `ties`: sentences with another token where the reference sees a tie within the budget. `problems`: real differences.
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
    """The files around a package's graphs: how many were compared, their problems, and harmless extra files."""

    compared: int
    problems: tuple[str, ...]
    unread: tuple[str, ...] = ()
    misleading: bool = False
    """mlx_transformer.json describes other graphs, so runtimes would run these wrongly."""

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        return f"files around the graphs: {self.compared}, each as the checkpoint gives it"

    @property
    def result(self) -> str:
        return self.summary if self.passed else f"files around the graphs: {len(self.problems)} differ"
