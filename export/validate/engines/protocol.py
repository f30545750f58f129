"""Engines: one small protocol for everything that can run a Transformer, so that a comparison knows none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.rule import Budget, budget_for
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name, target_embedding_name
from mlx_transformer.system.errors import UserError

Array = NDArray


class Unavailable(UserError):  # noqa: N818 - a state of the machine, not a mistake
    """A requested runtime that is not installed, or a device that is not there."""

    status = 3


@dataclass(frozen=True)
class Node:
    """One operation of a graph that ran. Names are those after the runtime's own optimisation."""

    graph: str
    name: str
    operator: str
    provider: str


@dataclass(frozen=True)
class Placement:
    """Where and how one runtime ran.

    `device`: what was asked for, an execution provider or a device. `tf32`, `threads`: in words. `versions`: of the
    libraries that computed. `nodes`: every operation that ran, where the runtime tells; otherwise empty, and all ran on
    the device.
    """

    runtime: str
    device: str
    tf32: str
    threads: str
    versions: dict[str, str]
    nodes: tuple[Node, ...] = ()

    @property
    def providers(self) -> dict[str, int]:
        """{provider: nodes}"""
        return dict(Counter(node.provider for node in self.nodes))

    @property
    def copies(self) -> dict[str, int]:
        """{graph: copies between the memories of two providers}, without the graphs that need none."""
        return dict(Counter(node.graph for node in self.nodes if node.operator.startswith("Memcpy")))

    @property
    def fallback(self) -> dict[str, int]:
        """{operator: nodes} that another provider ran than the requested one, which nothing else reports."""
        return dict(Counter(node.operator for node in self.nodes if node.provider != self.device))

    @property
    def summary(self) -> str:
        """All of it but the versions and the single nodes, in one line."""
        ran = ", ".join(f"{count} operations on {provider}" for provider, count in self.providers.items())
        parts = [f"{self.runtime} ran {ran or f'on {self.device}'}"]
        if self.fallback:
            others = ", ".join(f"{operator} {count}" for operator, count in sorted(self.fallback.items()))
            parts.append(f"fallback from {self.device}: {others}")
        if self.copies:
            parts.append(f"copies between memories: {sum(self.copies.values())}")
        return "; ".join([*parts, f"TF32 {self.tf32}", f"threads: {self.threads}"])


class Engine(Protocol):
    """One runtime holding one model. Arrays are NumPy's, in the runtime's own precision (bfloat16, which NumPy lacks,
    as float64)."""

    name: str
    precision: str
    device: str

    def details(self) -> dict[str, str]:
        """Where and how it runs, in a few words: versions, threads, providers, TF32."""
        ...

    def placement(self) -> Placement:
        """Where it ran, asked after everything else."""
        ...

    def parameters(self) -> Iterator[tuple[str, str, Array]]:
        """(where, name, array) of every parameter it holds, `where` being a file or a model in memory."""
        ...

    def taps(self, case: Case) -> dict[str, Array]:
        """Every named point of one full pass, `logits` among them."""
        ...

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """Those of these points of one full pass that it shows, points inside the sub-layers among them: attention
        weights (B,H,L,S) are NAME.weights. For display: what a fused operator keeps to itself is computed from what it
        reads."""
        ...

    def logits(self, case: Case) -> Array:
        """Logits (B,L,V) of one full pass of the model as it is used, without taps."""
        ...

    def cached_logits(self, case: Case) -> dict[str, Array]:
        """The same logits with a cache, in the passes of `case.passes()`. By name, for a runtime may have several ways
        of doing so; empty where there is nothing to cache (an encoder alone)."""
        ...

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        """Every named point of the decoder in each of the same ways, its passes joined along the positions."""
        ...

    def search(
        self, sources: Sequence[list[int]], beam: int, max_new_tokens: int, sample: int | None = None
    ) -> list[tuple[list[int], float]]:
        """Best output (ids without eos, score) of each source; with `sample`, a seed, drawn tokens."""
        ...


def budget_of(engine: Engine) -> Budget:
    """The budget of an engine's arithmetic: its precision, and what it multiplies weights in blocks with."""
    return budget_for(engine.precision, engine.device, activations_of(engine))


def is_exact(engine: Engine) -> bool:
    """Whether a look-up must show float32's bits: those of the parameters that the engine holds."""
    return engine.precision in ("float32", "tf32") or activations_of(engine) == "float32"


def activations_of(engine: Engine) -> str | None:
    """The engine's arithmetic, one of `precision.ACTIVATIONS`; None where there is no choice."""
    return getattr(engine, "activations", None)


def unread_by(engine: Engine) -> set[str]:
    """Parameters of the checkpoint that the engine has no use for: the source's table, where the encoder reads vectors
    and the table has no other reader."""
    if not getattr(engine, "inputs_embeds", False):
        return set()
    c = engine.config  # type: ignore[attr-defined] - of engines that hold files
    readers = {output_weight_name(c)} | ({target_embedding_name(c)} if c.has_decoder else set())
    return {source_embedding_name(c)} - readers


@contextmanager
def ended(engines: Iterable[Engine]) -> Iterator[None]:
    """What they have begun outside of this process, a browser or Node, is ended with the block, and not when nothing
    refers to them any more."""
    try:
        yield
    finally:
        for engine in engines:
            if (close := getattr(engine, "close", None)) is not None:
                close()
