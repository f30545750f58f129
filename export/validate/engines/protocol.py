"""Engines: one class for everything that can run a Transformer, so that a comparison knows none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, search_inputs
from export.validate.rule import Budget, budget_for, stored_as
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name, target_embedding_name
from mlx_transformer.core.pooling import Kind
from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.generation.search import search
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

    `device`: the requested execution provider or device. `tf32`, `threads`: in words. `versions`: those of the
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


@dataclass(frozen=True)
class Capabilities:
    """The abilities of one engine: the parts of it that can be compared, and how."""

    shows: Literal["everything", "logits", "tokens"] = "everything"
    """Everything; the logits of one full pass alone; or the tokens and scores of a search, and no numbers inside."""
    missing_taps: tuple[str, ...] = ()
    """Taps that aren't values of its graphs."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """The ONNX files that it runs, by the names of their graphs."""
    isolates: Literal["onnx", "mlx"] | None = None
    """How its operations can be run one by one: as nodes of graphs or as modules. None: they can't."""
    reads_vectors: bool = False
    """Its encoder reads vectors in place of ids."""
    attention_layer: int | None = None
    """The layer whose cross-attention its graphs return; None: they return none."""
    gives_vectors: tuple[Kind, ...] = ()
    """The kinds of vectors that its graphs return for a text."""
    dimensions: int | None = None
    """Numbers of them, where they are fewer than the checkpoint's."""
    among: bool = False
    """It has a way of its own to compute the logits of given ids alone."""


class Engine:
    """One runtime holding one model. Arrays are NumPy's, in the runtime's own precision (bfloat16, which NumPy lacks,
    as float64)."""

    name: str
    device = "cpu"
    precision = "float32"
    config: TransformerConfig
    activations: str | None = None
    """The type that it multiplies weights in blocks with, one of `precision.ACTIVATIONS`; None where there is no
    choice."""
    float32_layers: Sequence[str] = ()
    """Those that int8 leaves in float32."""
    sums_in_16_bits = False
    """The processor holds sums of two products of bytes to 16 bits, and there are some that need more."""
    retrieval = ""
    """The export's finding about the neighbours of its vectors, in words; empty where it didn't look."""
    capabilities = Capabilities()
    is_training = False
    """Whether its model is in training mode, which drops values at random."""

    def details(self) -> dict[str, str]:
        """Say where and how it runs, in a few words: versions, threads, providers, TF32."""
        raise NotImplementedError

    def placement(self) -> Placement:
        """Say where it ran; called after everything else."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, str, Array]]:
        """Yield (where, name, array) of every parameter it holds, `where` being a file or a model in memory."""
        yield from ()

    def as_stored(self, where: str, name: str, array: Array) -> Array:
        """Return what it must hold `where` of this parameter of the checkpoint."""
        return stored_as(array, self.precision)

    def taps(self, case: Case) -> dict[str, Array]:
        """Return every named point of one full pass, `logits` among them."""
        return {}

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """Return those of these points of one full pass that it shows, points inside the sub-layers among them:
        attention weights (B,H,L,S) are NAME.weights. For display: those of a fused operator are the softmax of
        the scores that it shows."""
        return {}

    def logits(self, case: Case) -> Array:
        """Return the logits (B,L,V) of one full pass of the model as it is used, without taps."""
        raise NotImplementedError

    def cached_logits(self, case: Case) -> dict[str, Array]:
        """Return the same logits with a cache, in the passes of `case.passes()`, by the way of running them: a runtime
        may have several; empty where there is nothing to cache (an encoder alone)."""
        return {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        """Return every named point of the decoder in each of the same ways, its passes joined along the positions."""
        return {}

    def attention(self, case: Case) -> dict[str, Array]:
        """Return the output `cross_attention` (B,T,S) of graphs that have one, by the way of running them."""
        return {}

    def vectors(self, case: Case) -> dict[Kind, Array]:
        """Return what graphs say of texts, `sentence_embedding` (B,W) among it."""
        raise NotImplementedError

    def search(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[list[int], float]]:
        """Return the best output (ids without the token that ends it, score) of each source. candidates: the ids that
        each may be made of; None: all."""
        return [best[0] for best in self.n_best(sources, options, candidates)]

    def n_best(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[list[tuple[list[int], float]]]:
        """Return the `n_best` best outputs of each source, best first; else as `search`."""
        found = self._hypotheses(sources, options, candidates)
        return [[(each.ids, each.score) for each in hypotheses] for hypotheses in found]

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        with self.searching() as model:
            return search(model, **search_inputs(sources), candidates=candidates, **vars(options))

    def logits_among(self, case: Case, ids: Array) -> Array:
        """Return the logits (B,L,C) of these ids alone, from graphs that compute no others."""
        raise NotImplementedError

    def searching(self) -> AbstractContextManager[Any]:
        """Return a context that gives the model as `generation.steps.run` takes it."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it has begun outside of this process, such as a browser or Node."""

    @property
    def budget(self) -> Budget:
        """The budget of its arithmetic: its precision, and what it multiplies weights in blocks with."""
        return budget_for(self.precision, self.device, self.activations)

    @property
    def is_exact(self) -> bool:
        """Whether a look-up must show float32's bits: those of the parameters that it holds."""
        return self.precision in ("float32", "tf32") or self.activations == "float32"

    def unused_parameters(self) -> set[str]:
        """Return the parameters of the checkpoint that it has no use for: the source's table, where the encoder reads
        vectors and the table has no other reader."""
        if not self.capabilities.reads_vectors:
            return set()
        c = self.config
        readers = {output_weight_name(c)} if c.head.classifies else set()
        readers |= {target_embedding_name(c)} if c.has_decoder else set()
        return {source_embedding_name(c)} - readers


class ModelEngine(Engine):
    """A model that is one object, not graphs: there is one way of running it with a cache."""

    def cached_logits(self, case: Case) -> dict[str, Array]:
        return {"cached": self._cached(case, None)} if self.config.has_decoder else {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        if not self.config.has_decoder:
            return {}
        taps: dict[str, list[Array]] = {}
        self._cached(case, lambda name, value: taps.setdefault(name, []).append(self._numpy(value)))
        return {"cached": {name: np.concatenate(values, axis=1) for name, values in taps.items()}}

    def _cached(self, case: Case, tap: Callable[[str, Any], Any] | None) -> Array:
        """Return the logits of all passes, each of whose points is shown to `tap`."""
        raise NotImplementedError

    def _numpy(self, value: Any) -> Array:
        """Return one of its arrays in NumPy."""
        return np.asarray(value)
