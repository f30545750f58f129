"""The interface that a comparison needs of the network that a checkpoint was imported from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.options import Options

Array = NDArray


class Origin:
    """An original network in float64. It is called as the reference is: what judges by one judges by the other."""

    name: str
    """The word by which it is chosen."""
    config: TransformerConfig
    """The checkpoint's: ids are its own."""

    def described(self) -> str:
        """Return its version, its class and its files, in one line."""
        raise NotImplementedError

    def fitted(self, case: Case) -> Case | None:
        """Return an input as it takes it; None where it would have other positions: padding in front of tokens may move
        them there."""
        return case

    def fitted_row(self, row: list[int]) -> list[int]:
        """Return source ids that it has."""
        return row

    def outputs(self, case: Case) -> dict[str, Array]:
        """Return what comes out of it in one full pass, by the name of the point: as logits (B,T,V), of all tokens that
        it has, or what else an encoder's head gives; or a point inside."""
        raise NotImplementedError

    def __call__(self, source_ids: Any, target_ids: Any = None, mask: Any = None) -> Array:
        """Return the logits (B,T,V) of V tokens of the checkpoint; those that it lacks are never the best."""
        case = Case("", np.asarray(source_ids), mask, None if target_ids is None else np.asarray(target_ids), 1)
        logits = self.outputs(case)["logits"]
        more = self.config.vocab_size - logits.shape[-1]
        return np.pad(logits, ((0, 0), (0, 0), (0, max(0, more))), constant_values=-np.inf)

    def searches(self, limit: int, settings: Mapping[str, Any]) -> dict[str, Options]:
        """Return the searches that it has too, by their names. settings: the checkpoint's own."""
        return {"greedy": Options(max_new_tokens=limit)}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """Return its output of each source, without the token that ends it, by its own code. name: of `searches`."""
        raise NotImplementedError
