"""The base class of engines, and the facts they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, search_inputs
from export.validate.rule import Budget, budget_for, stored_as
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Kind
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name, target_embedding_name
from mlx_transformer.decoding.options import Hypothesis, Options
from mlx_transformer.decoding.search import search
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import Stored

Array = NDArray


LARGE = 128 << 20
"""Bytes of weights from which on a model is in memory only while it runs, so that runtimes hold it one after
another."""


def is_large(size: int) -> bool:
    """Whether a model with these bytes of weights counts as large."""
    return size > LARGE


class Unavailable(UserError):  # noqa: N818 - a state of the machine, not a mistake
    """A requested runtime isn't installed, or its device is missing."""

    status = 3


@dataclass(frozen=True)
class Node:
    """An operation that ran, with its name after the runtime's own optimisation."""

    graph: str
    name: str
    operator: str
    provider: str


@dataclass(frozen=True)
class Placement:
    """Where and how a runtime ran.

    `device`: the requested execution provider or device. `tf32`, `threads`: in words. `versions`: of the runtime's
    libraries. `nodes`: every operation that ran; empty if the runtime doesn't report them (all ran on the device).
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
        """{graph: number of copies between the memories of two providers}, for graphs with such copies."""
        return dict(Counter(node.graph for node in self.nodes if node.operator.startswith("Memcpy")))

    @property
    def fallback(self) -> dict[str, int]:
        """{operator: nodes} on a provider other than the requested one. ONNX Runtime falls back silently."""
        return dict(Counter(node.operator for node in self.nodes if node.provider != self.device))

    @property
    def summary(self) -> str:
        """All of it in a line, except versions and single nodes."""
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
    """The values of an engine that can be compared, and how."""

    shows: Literal["everything", "logits", "tokens"] = "everything"
    """Everything; or only the logits of a full pass; or only the tokens and scores of a search."""
    missing_taps: tuple[str, ...] = ()
    """Taps without a value in its graphs, e.g. because of fused operators."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Its ONNX files, by graph, e.g. {"encoder_model": Path(...)}."""
    isolates: Literal["onnx", "mlx"] | None = None
    """How to run its operations separately: as nodes of graphs, or as MLX modules; None: not possible."""
    reads_vectors: bool = False
    """Its encoder reads vectors in place of ids."""
    attention_layer: int | None = None
    """The layer of its graphs' output `cross_attention`; None without this output."""
    gives_vectors: tuple[Kind, ...] = ()
    """Its graphs' kinds of vectors for a text, e.g. ("dense",)."""
    dimensions: int | None = None
    """The length of these vectors if they are cut; None: the checkpoint's length."""
    among: bool = False
    """Whether it has graphs for a shortlist, which compute only given ids' logits."""


class Engine:
    """A runtime with a model. Subclasses implement the methods for their `capabilities`.

    Arrays are NumPy arrays in the runtime's precision. NumPy has no bfloat16, so bfloat16 values come as float64.
    """

    name: str
    device = "cpu"
    precision = "float32"
    config: TransformerConfig
    activations: str | None = None
    """The type of activations that weights in blocks are multiplied with, from `precision.ACTIVATIONS`; None for
    precisions without a choice."""
    float32_layers: Sequence[str] = ()
    """The layers left in float32 by int8."""
    sums_in_16_bits = False
    """Whether this CPU saturates sums of two byte products to 16 bits while some sums of this model need more."""
    single_sums: frozenset[str] = frozenset()
    """The weights of matrices and norms whose sums it adds term by term in a single accumulator, which rounds more than
    the sums of a BLAS, or NumPy's in pairs."""
    retrieval = ""
    """How the precision changes a text's nearest neighbours, as measured by the export; empty if not measured."""
    capabilities = Capabilities()
    is_training = False
    """Whether its model is in training mode, with dropout."""

    def details(self) -> dict[str, str]:
        """Describe where and how it runs: versions, threads, providers, TF32."""
        raise NotImplementedError

    def placement(self) -> Placement:
        """Report where it ran; called last."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, str, Array | Stored]]:
        """Yield (where, name, array) for all its parameters; where: a file, or e.g. "model in memory".

        Arrays may be read on demand, by `np.asarray`.
        """
        yield from ()

    def as_stored(self, where: str, name: str, array: Array) -> Array:
        """Convert a parameter of the checkpoint to the values this engine must hold in `where`."""
        return stored_as(array, self.precision)

    def taps(self, case: Case) -> dict[str, Array]:
        """Return the taps of a full pass, `logits` included."""
        return {}

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """Compute these points in a full pass, also inside sub-layers; points it can't show are left out.

        Attention weights (B,H,L,S) are named NAME.weights. For a fused operator they are computed as the softmax of its
        scores.
        """
        return {}

    def logits(self, case: Case) -> Array:
        """Compute the logits (B,L,V) in a full pass of the model as people use it, without taps."""
        raise NotImplementedError

    def cached_logits(self, case: Case) -> dict[str, Array]:
        """Compute the same logits with a cache, in the passes of `case.passes()`: {way of running: logits}.

        Some runtimes have several ways, e.g. "cached" and "cached, merged"; encoders have none.
        """
        return {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        """Compute the decoder's taps in each way of `cached_logits`, with the passes joined along the positions."""
        return {}

    def attention(self, case: Case) -> dict[str, Array]:
        """Return the graphs' output `cross_attention` (B,T,S) as {way of running: values}."""
        return {}

    def vectors(self, case: Case) -> dict[Kind, Array]:
        """Compute the texts' vectors by kind, e.g. {"dense": (B,W)}."""
        raise NotImplementedError

    def search(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[list[int], float]]:
        """Search for each source's best output: (ids without the end token, score).

        candidates: the ids allowed in each output; None allows all.
        """
        return [best[0] for best in self.n_best(sources, options, candidates)]

    def n_best(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[list[tuple[list[int], float]]]:
        """Like `search`, but returns each source's `options.n_best` best outputs, best first."""
        found = self._hypotheses(sources, options, candidates)
        return [[(each.ids, each.score) for each in hypotheses] for hypotheses in found]

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        with self.searching() as model:
            return search(model, **search_inputs(sources), candidates=candidates, **vars(options))

    def logits_among(self, case: Case, ids: Array) -> Array:
        """Compute these ids' logits (B,L,C) with the graphs for a shortlist."""
        raise NotImplementedError

    def searching(self) -> AbstractContextManager[Any]:
        """A context with the model as `decoding.steps.run` takes it."""
        raise NotImplementedError

    def rest(self) -> None:
        """Free a large model's memory; the model is loaded again when it is needed."""

    def close(self) -> None:
        """End the programs it started, e.g. a browser or Node."""

    @property
    def budget(self) -> Budget:
        """The budget for its precision, device and activations."""
        return budget_for(self.precision, self.device, self.activations)

    @property
    def is_exact(self) -> bool:
        """Whether look-ups must give the float32 bits of its parameters."""
        return self.precision in ("float32", "tf32") or self.activations == "float32"

    def unused_parameters(self) -> set[str]:
        """Return parameters the engine doesn't need: the source's table if the encoder reads vectors and nothing else
        reads the table."""
        if not self.capabilities.reads_vectors:
            return set()
        c = self.config
        readers = {output_weight_name(c)} if c.head.classifies else set()
        readers |= {target_embedding_name(c)} if c.has_decoder else set()
        return {source_embedding_name(c)} - readers


def in_turn(engines: Iterable[Engine]) -> Iterator[Engine]:
    """Yield each engine, and let it rest before the next."""
    for engine in engines:
        yield engine
        engine.rest()


class ModelEngine(Engine):
    """An engine with a model object instead of graphs, and a single way of running with a cache."""

    def cached_logits(self, case: Case) -> dict[str, Array]:
        return {"cached": self._cached(case, None)} if self.config.has_decoder else {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        if not self.config.has_decoder:
            return {}
        taps: dict[str, list[Array]] = {}
        self._cached(case, lambda name, value: taps.setdefault(name, []).append(self._numpy(value)))
        return {"cached": {name: np.concatenate(values, axis=1) for name, values in taps.items()}}

    def _cached(self, case: Case, tap: Callable[[str, Any], Any] | None) -> Array:
        """Compute the logits of all passes; `tap` is called with each pass's points."""
        raise NotImplementedError

    def _numpy(self, value: Any) -> Array:
        return np.asarray(value)
