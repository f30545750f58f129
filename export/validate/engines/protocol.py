"""The protocol of engines: one class for everything that can run a Transformer."""

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
from mlx_transformer.core.heads import Kind
from mlx_transformer.core.parameters import output_weight_name, source_embedding_name, target_embedding_name
from mlx_transformer.decoding.options import Hypothesis, Options
from mlx_transformer.decoding.search import search
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import Stored

Array = NDArray


class Unavailable(UserError):  # noqa: N818 - a state of the machine, not a mistake
    """A requested runtime that is not installed, or a device that is not there."""

    status = 3


@dataclass(frozen=True)
class Node:
    """One operation that ran, with its name after the runtime's own optimisation."""

    graph: str
    name: str
    operator: str
    provider: str


@dataclass(frozen=True)
class Placement:
    """Where and how one runtime ran.

    `device`: the requested execution provider or device. `tf32`, `threads`: in words. `versions`: of the libraries that
    computed. `nodes`: every operation that ran, if the runtime tells; otherwise empty, and all ran on the device.
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
        """{graph: copies between the memories of two providers}, without graphs that need none."""
        return dict(Counter(node.graph for node in self.nodes if node.operator.startswith("Memcpy")))

    @property
    def fallback(self) -> dict[str, int]:
        """{operator: nodes} that ran on another provider than the requested one; nothing else reports this."""
        return dict(Counter(node.operator for node in self.nodes if node.provider != self.device))

    @property
    def summary(self) -> str:
        """One line with everything except versions and single nodes."""
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
    """What can be compared of one engine, and how."""

    shows: Literal["everything", "logits", "tokens"] = "everything"
    """Everything; only the logits of one full pass; or only the tokens and scores of a search."""
    missing_taps: tuple[str, ...] = ()
    """Taps that aren't values of its graphs."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """The ONNX files that it runs, by the names of their graphs."""
    isolates: Literal["onnx", "mlx"] | None = None
    """How its operations can be run one by one: as nodes of graphs or as modules; None: not at all."""
    reads_vectors: bool = False
    """Its encoder reads vectors in place of ids."""
    attention_layer: int | None = None
    """The layer whose cross-attention its graphs return; None: they return none."""
    gives_vectors: tuple[Kind, ...] = ()
    """The kinds of vectors that its graphs return for a text."""
    dimensions: int | None = None
    """The vectors' length, if it is less than the checkpoint's."""
    among: bool = False
    """It has graphs that compute only the logits of given ids."""


class Engine:
    """One runtime holding one model. Arrays are NumPy's, in the runtime's own precision (bfloat16, which NumPy lacks,
    as float64)."""

    name: str
    device = "cpu"
    precision = "float32"
    config: TransformerConfig
    activations: str | None = None
    """The type of activations that weights in blocks are multiplied with, one of `precision.ACTIVATIONS`; None if
    there is no choice."""
    float32_layers: Sequence[str] = ()
    """The layers that int8 leaves in float32."""
    sums_in_16_bits = False
    """The processor saturates sums of two products of bytes to 16 bits, and some sums here need more."""
    retrieval = ""
    """The export's finding about the neighbours of its vectors, in words; empty if it didn't look."""
    capabilities = Capabilities()
    is_training = False
    """Its model is in training mode, with dropout."""

    def details(self) -> dict[str, str]:
        """Describe where and how it runs: versions, threads, providers, TF32."""
        raise NotImplementedError

    def placement(self) -> Placement:
        """Report where it ran; called after everything else."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, str, Array | Stored]]:
        """Yield (where, name, array) of every parameter it holds; `where`: a file, or a model in memory. Arrays may be
        unread yet: `np.asarray` reads them."""
        yield from ()

    def as_stored(self, where: str, name: str, array: Array) -> Array:
        """Return a parameter of the checkpoint as the engine must hold it `where`."""
        return stored_as(array, self.precision)

    def taps(self, case: Case) -> dict[str, Array]:
        """Return every named point of one full pass, `logits` among them."""
        return {}

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        """Compute these points in one full pass, those that it shows; points inside the sub-layers too.

        Attention weights (B,H,L,S) are NAME.weights. For display: a fused operator's weights are the softmax of the
        scores that it shows.
        """
        return {}

    def logits(self, case: Case) -> Array:
        """Compute the logits (B,L,V) in one full pass of the model as it is used, without taps."""
        raise NotImplementedError

    def cached_logits(self, case: Case) -> dict[str, Array]:
        """Compute the same logits with a cache, in the passes of `case.passes()`: {way of running: logits}.

        Some runtimes have several ways; an encoder without a decoder has none.
        """
        return {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        """Compute every tap of the decoder in each of these ways, its passes joined along the positions."""
        return {}

    def attention(self, case: Case) -> dict[str, Array]:
        """Return the output `cross_attention` (B,T,S) of graphs that have it: {way of running: values}."""
        return {}

    def vectors(self, case: Case) -> dict[Kind, Array]:
        """Compute the vectors of texts, e.g. `sentence_embedding` (B,W)."""
        raise NotImplementedError

    def search(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[list[int], float]]:
        """Search the best output (ids without the end token, score) of each source. candidates: the ids that each
        output may consist of; None: all."""
        return [best[0] for best in self.n_best(sources, options, candidates)]

    def n_best(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[list[tuple[list[int], float]]]:
        """Search the `n_best` best outputs of each source, best first; otherwise like `search`."""
        found = self._hypotheses(sources, options, candidates)
        return [[(each.ids, each.score) for each in hypotheses] for hypotheses in found]

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        with self.searching() as model:
            return search(model, **search_inputs(sources), candidates=candidates, **vars(options))

    def logits_among(self, case: Case, ids: Array) -> Array:
        """Compute the logits (B,L,C) of these ids, with graphs that compute no others."""
        raise NotImplementedError

    def searching(self) -> AbstractContextManager[Any]:
        """A context with the model in the form that `decoding.steps.run` takes."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it started outside this process, e.g. a browser or Node."""

    @property
    def budget(self) -> Budget:
        """The budget of its arithmetic: of its precision and its activations."""
        return budget_for(self.precision, self.device, self.activations)

    @property
    def is_exact(self) -> bool:
        """Look-ups must show float32's bits: those of its parameters."""
        return self.precision in ("float32", "tf32") or self.activations == "float32"

    def unused_parameters(self) -> set[str]:
        """Return the parameters that it has no use for: the source's table, if the encoder reads vectors and nothing
        else reads the table."""
        if not self.capabilities.reads_vectors:
            return set()
        c = self.config
        readers = {output_weight_name(c)} if c.head.classifies else set()
        readers |= {target_embedding_name(c)} if c.has_decoder else set()
        return {source_embedding_name(c)} - readers


class ModelEngine(Engine):
    """A model that is one object, not graphs, with one way of running with a cache."""

    def cached_logits(self, case: Case) -> dict[str, Array]:
        return {"cached": self._cached(case, None)} if self.config.has_decoder else {}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        if not self.config.has_decoder:
            return {}
        taps: dict[str, list[Array]] = {}
        self._cached(case, lambda name, value: taps.setdefault(name, []).append(self._numpy(value)))
        return {"cached": {name: np.concatenate(values, axis=1) for name, values in taps.items()}}

    def _cached(self, case: Case, tap: Callable[[str, Any], Any] | None) -> Array:
        """Compute the logits of all passes, and show each pass's points to `tap`."""
        raise NotImplementedError

    def _numpy(self, value: Any) -> Array:
        return np.asarray(value)
