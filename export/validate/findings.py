"""The findings of one check of one runtime: plain data, of which a report is made; and the names of the points
compared.

Points are named in the order of the data's way through the network:

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.self_attention   decoder.layers.0.cross_attention   ...   decoder.norm   logits

These are the taps; the points inside the sub-layers are named in `locate/inside.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes

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
    """The export's finding about the neighbours of its vectors, in words; empty where it didn't look."""
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

    @property
    def result(self) -> str:
        return "equal" if self.passed else f"{len(self.problems)} differ"


@dataclass(frozen=True)
class Point:
    """One tap of one runtime over all inputs: `worst` is the measurement that came nearest to its budget, or went past.

    `path`: tapped (a copy of the model that shows its inside), plain (the model as it is used), or a name with "cached"
    (plain, step by step), or "on its integers" (against the reference of the integers that it shows). `failures`: the
    inputs on which it was over budget.
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
    """Join two points: all inputs, all failures, the measurement that used up more of its budget."""
    worst = max(a, b, key=lambda point: (not point.worst.passed, point.worst.share))
    return replace(worst, inputs=a.inputs + b.inputs, failures=a.failures + b.failures)


@dataclass(frozen=True)
class Divergence:
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
    """The files of a package that were compared, what is wrong with them in words, and the names of those that belong
    to no package and that nobody reads."""

    compared: int
    problems: tuple[str, ...]
    unread: tuple[str, ...] = ()
    misleading: bool = False
    """The record says another thing of graphs of this checkpoint, so that they can't be run as it says."""

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        return f"files around the graphs: {self.compared}, each as the checkpoint gives it"

    @property
    def result(self) -> str:
        return self.summary if self.passed else f"files around the graphs: {len(self.problems)} differ"


def tap_names(config: TransformerConfig) -> list[str]:
    """Return the names of the taps of a full pass."""
    return list(_points(config, inner_points=False))


def inner_names(config: TransformerConfig) -> list[str]:
    """Return the names of taps and points inside the sub-layers; the memory's keys and values come first."""
    return list(_points(config, inner_points=True))


@cache
def _points(config: TransformerConfig, inner_points: bool) -> tuple[str, ...]:
    """Return what the reference passes to its tap, for an empty batch and weights that take no memory."""
    weights = {name: np.broadcast_to(0.0, shape) for name, shape in parameter_shapes(config).items()}
    ids = np.zeros((0, 1), np.int64)
    names: list[str] = []
    reference = Reference(config, weights, inner_points=inner_points)
    reference(
        ids, ids if config.architecture == "encoder-decoder" else None, tap=lambda name, value: names.append(name)
    )
    return tuple(names)
