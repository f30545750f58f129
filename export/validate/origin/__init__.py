"""The original network of an imported checkpoint, in float64: run by its own package, or read by separate code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from export.validate.reference.rules import without_end
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options

Array = NDArray


class Origin:
    """An original network in float64. It is called like the reference, so the same code judges by it."""

    name: str
    """The word after --against, e.g. "marian"."""
    config: TransformerConfig
    """The checkpoint's config; ids are the checkpoint's."""

    def described(self) -> str:
        """Describe it in a line: version, class and files."""
        raise NotImplementedError

    def fitted(self, case: Case) -> Case | None:
        """Adapt an input to the original; None if its positions would differ, e.g. with padding before tokens."""
        return case

    def fitted_row(self, row: list[int]) -> list[int]:
        """Replace source ids that the original doesn't have."""
        return row

    def outputs(self, case: Case) -> dict[str, Array]:
        """Compute a full pass: {point: value}, e.g. {"logits": (B,T,V)} of its own V tokens, or an encoder's output."""
        raise NotImplementedError

    def __call__(self, source_ids: Any, target_ids: Any = None, mask: Any = None) -> Array:
        """Compute the logits (B,T,V) of the checkpoint's V tokens; tokens unknown to the original get -inf."""
        case = Case("", np.asarray(source_ids), mask, None if target_ids is None else np.asarray(target_ids), 1)
        logits = self.outputs(case)["logits"]
        more = self.config.vocab_size - logits.shape[-1]
        return np.pad(logits, ((0, 0), (0, 0), (0, max(0, more))), constant_values=-np.inf)

    def searches(self, limit: int, settings: Mapping[str, Any]) -> dict[str, Options]:
        """Return the options of searches the original can do too, by name. settings: the checkpoint's own."""
        return {"greedy": Options(max_new_tokens=limit)}

    def ended(self, written: list[int], o: Options) -> list[int]:
        """Cut an output at its end token, and remove this token."""
        last = [self.config.eos_id, *o.end_ids]
        first = next((i for i, token in enumerate(written) if token in last), len(written))
        return without_end(written[: first + 1], self.config, o)

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """Search with the original's own code: an output for each source, without its end token. name: from
        `searches`."""
        raise NotImplementedError
