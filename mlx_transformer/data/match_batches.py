"""Batches of texts that belong together, for contrastive learning: as many pairs each, drawn at random.

B pairs. A source's negatives are the targets of its batch, so that batches are random and of one size: sorted by
length, as those of translations are, they would be too easy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .epochs import BatchesByEpoch, StepArrays
from .ragged import Ragged, padded, ragged


@dataclass(frozen=True)
class MatchBatch:
    """One step's texts: B sources, then their B targets, then perhaps B negatives; `tokens` is B."""

    rows: list[NDArray]
    numbers: NDArray  # (2 or 3, B) int32: equal texts have equal numbers
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        ids = padded(self.rows, len(self.rows), max(map(len, self.rows)), pad_id)
        return self.numbers, None, ids, ids != pad_id


class MatchBatches(BatchesByEpoch[MatchBatch]):
    """Batches of `pairs` pairs, or of all where there are fewer; what is over in an epoch is left to the next one.

    `columns`: sources, targets, and perhaps negatives, lists of ids of one length each.
    """

    unit = "pairs"

    def __init__(self, columns: Sequence[Sequence[Sequence[int]]], pairs: int, seed: int = 1):
        super().__init__(seed)
        self.columns: list[Ragged] = [ragged(column) for column in columns]
        texts = [tuple(ids) for column in columns for ids in column]
        known: dict[tuple[int, ...], int] = {}
        numbers = np.array([known.setdefault(ids, len(known)) for ids in texts], np.int32)
        self._numbers = numbers.reshape(len(columns), -1)
        self.count = len(columns[0])
        self.pairs = min(pairs, self.count)
        self.dropped = 0
        self.batch_tokens = self.pairs

    def __len__(self) -> int:
        return self.count // self.pairs

    def plan(self, random: np.random.RandomState) -> list[NDArray]:
        order = random.permutation(self.count)[: len(self) * self.pairs]
        return list(order.reshape(len(self), self.pairs))

    def build(self, part: NDArray, epoch: int, index: int) -> MatchBatch:
        rows = [column[i] for column in self.columns for i in part]
        return MatchBatch(rows, self._numbers[:, part], len(part))
