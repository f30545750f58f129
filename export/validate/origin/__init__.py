"""The network that a checkpoint was imported from, run by its own code or read separately, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options

Array = NDArray


class Origin:
    """An original network in float64. It can be called like the reference, so the same code judges by either."""

    name: str
    """The word after --against."""
    config: TransformerConfig
    """The checkpoint's config, as ids are the checkpoint's."""

    def described(self) -> str:
        """Describe it in one line: version, class and files."""
        raise NotImplementedError

    def fitted(self, case: Case) -> Case | None:
        """Fit an input to the original; None if it would have other positions there, e.g. because of padding before
        tokens."""
        return case

    def fitted_row(self, row: list[int]) -> list[int]:
        """Replace source ids that the original doesn't have."""
        return row

    def outputs(self, case: Case) -> dict[str, Array]:
        """Compute one full pass: {point: value}, e.g. the logits (B,T,V) of all its tokens, or the output of an
        encoder's head."""
        raise NotImplementedError

    def __call__(self, source_ids: Any, target_ids: Any = None, mask: Any = None) -> Array:
        """Compute the logits (B,T,V) of the checkpoint's V tokens; tokens that the original lacks get -inf."""
        case = Case("", np.asarray(source_ids), mask, None if target_ids is None else np.asarray(target_ids), 1)
        logits = self.outputs(case)["logits"]
        more = self.config.vocab_size - logits.shape[-1]
        return np.pad(logits, ((0, 0), (0, 0), (0, max(0, more))), constant_values=-np.inf)

    def searches(self, limit: int, settings: Mapping[str, Any]) -> dict[str, Options]:
        """Return the searches that the original has too, by name. settings: the checkpoint's own."""
        return {"greedy": Options(max_new_tokens=limit)}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """Search with the original's own code: an output for each source, without the token that ends it. name: of
        `searches`."""
        raise NotImplementedError
