"""A model in Marian's own file: the network in NumPy, its integers exact or as the engine on AVX2 adds them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from export.validate.cases import Case
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.options import Options
from mlx_transformer.system.errors import UserError

from .marian_file import model_of, read_marian
from .marian_network import MarianNetwork
from .protocol import Array, Origin

MOST_POSITIONS = 256
"""The longest input: a token after the other takes its time in NumPy."""
SPECIAL = 2
"""Ids in front of the words: the end, the unknown."""


class Marian(Origin):
    """One file."""

    name = "marian"

    def __init__(self, path: Path, config: TransformerConfig):
        if config.architecture != "encoder-decoder":
            raise UserError(f"--against marian: Marian's models are encoder-decoders, this is an {config.architecture}")
        self.file, self.config = model_of(path), config
        self._read = read_marian(self.file)
        self.network = MarianNetwork(*self._read)

    def with_arithmetic(self, arithmetic: str) -> Marian:
        """Return the same file's network, computed another way."""
        other = copy(self)
        other.network = MarianNetwork(*self._read, arithmetic)
        return other

    @property
    def has_integers(self) -> bool:
        """Whether it holds integers with the scales of their products."""
        tensors = self._read[0]
        return "none_QuantMultA" in tensors and any(each.multiplier is not None for each in tensors.values())

    def described(self) -> str:
        version = self._read[1].get("version", "of no version")
        kind = "integers (intgemm8)" if self.has_integers else "floats"
        return f"Marian {version}: {kind}, computed in float64 from {self.file}, which is read apart from the import"

    def fitted(self, case: Case) -> Case | None:
        """Fit a case as `Origin` says. The checkpoint has one row more, and two vocabularies are of one size there."""
        if case.ids.shape[1] > MOST_POSITIONS:
            return None
        n, targets = self.network.sources, case.target_ids
        ids = np.where(case.source_real, _known(case.ids, n), case.ids)
        if targets is not None:  # behind the start
            known = _known(targets[:, 1:], self.network.vocabulary)
            targets = np.concatenate([targets[:, :1], known], axis=1)
        return replace(case, ids=ids, target_ids=targets)

    def fitted_row(self, row: list[int]) -> list[int]:
        return _known(np.array(row), self.network.sources).tolist()

    def outputs(self, case: Case) -> dict[str, Array]:
        assert case.target_ids is not None
        targets = _known(case.target_ids[:, 1:], self.network.vocabulary)  # behind a row there is padding
        rows = [
            self.network.logits(source, target.tolist()) for source, target in zip(case.rows(), targets, strict=True)
        ]
        return {"logits": np.stack(rows).astype(np.float64)}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        return [self.network.translate(source, options.max_new_tokens or 0) for source in sources]


def _known(ids: Array, size: int) -> Array:
    """Return ids with those beyond a vocabulary replaced by words of it."""
    return np.where(ids < size, ids, SPECIAL + ids % (size - SPECIAL))
