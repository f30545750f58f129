"""The NumPy reference as an engine: float32 is judged like any runtime, float64 tests the comparison itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, reference_logits, reference_started, reference_step, reference_taps
from export.validate.reference import Cache, Parameters, Reference, Tap
from export.validate.reference.rules import without_end
from export.validate.reference.search import beam_search, token_by_token
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.steps import Model
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import Stored

from .protocol import ModelEngine, Placement

Array = NDArray


def of_checkpoint(checkpoint: Checkpoint, precision: str = "float32") -> ReferenceEngine:
    return ReferenceEngine(checkpoint.config, checkpoint.unread(), precision)


class ReferenceEngine(ModelEngine):
    name = "reference"

    def __init__(self, config: TransformerConfig, weights: Parameters, precision: str = "float32"):
        if precision not in ("float32", "float64"):
            raise UserError(f"reference:{precision}: choose reference:float32 or reference:float64")
        self.config, self.stored = config, weights
        self.model = Reference(config, weights, np.dtype(precision))

    def details(self) -> dict[str, str]:
        return {"numpy": np.__version__, "computed in": str(self.model.dtype)}

    def placement(self) -> Placement:
        return Placement(self.name, "CPU", "none on a CPU", "one", {"numpy": np.__version__})

    def parameters(self) -> Iterator[tuple[str, str, Array | Stored]]:
        for name, array in self.stored.items():
            yield "arrays in memory", name, array

    def taps(self, case: Case) -> dict[str, Array]:
        return reference_taps(self.model, case)

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        model = Reference(self.config, self.stored, self.model.dtype, inner_points=True)
        return {name: value for name, value in reference_taps(model, case).items() if name in names}

    @contextmanager
    def searching(self) -> Iterator[ReferenceModel]:
        yield ReferenceModel(self.model)

    def logits(self, case: Case) -> Array:
        return reference_logits(self.model, case)

    def search(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[list[int], float]]:
        if options.beam == 1:
            return token_by_token(self.model, sources, options, candidates)
        return [best[0] for best in self.n_best(sources, options, candidates)]

    def n_best(
        self, sources: Sequence[list[int]], options: Options, candidates: Sequence[Sequence[int]] | None = None
    ) -> list[list[tuple[list[int], float]]]:
        found = [s.finished[: options.n_best] for s in beam_search(self.model, sources, options, candidates)]
        return [[(without_end(h.tokens, self.config, options), score) for score, h in best] for best in found]

    def _cached(self, case: Case, tap: Tap | None) -> Array:
        cache, parts = reference_started(self.model, case), []
        for part in case.passes():
            logits, cache = reference_step(self.model, case, part, cache, tap)
            parts.append(logits)
        return np.concatenate(parts, axis=1)


class ReferenceModel(Model):
    """The reference as a `decoding.steps.Model`, for rows of equal length."""

    def __init__(self, reference: Reference):
        self.reference, self.config = reference, reference.config

    def start(self, rows: Sources) -> tuple[ReferenceDecoder, Array]:
        ids = np.stack(list(rows))
        if not self.config.has_encoder:
            decoder = ReferenceDecoder(self.reference, self.reference.start(batch=len(ids)))
            return decoder, decoder.read(ids)
        decoder = ReferenceDecoder(self.reference, self.reference.start(self.reference.encode(ids)))
        return decoder, decoder.step(np.full(len(ids), rows.start))


class ReferenceDecoder:
    """A `decoding.steps.Decoder` with the reference's cache."""

    def __init__(self, reference: Reference, cache: Cache):
        self.reference, self.cache = reference, cache

    def read(self, ids: Array) -> Array:
        """Read tokens (R, L); return the logits (R, V) after the last token."""
        logits, self.cache = self.reference.step(ids, self.cache)
        return logits[:, -1]

    def step(self, ids: Array) -> Array:
        return self.read(ids[:, None])

    def repeat(self, times: int) -> None:
        self.keep(np.repeat(np.arange(len(self.cache.real)), times))

    def keep(self, rows: Array) -> None:
        self.cache = self.cache.select(rows)

    reorder = keep
