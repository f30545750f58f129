"""Batches of texts and the vectors that a teacher gives them. B rows, L tokens, W numbers of a vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batches import BatchesOfOthers, TokenBatches
from .epochs import StepArrays


@dataclass(frozen=True)
class TaughtBatch:
    """One step's input; `tokens` counts the texts, without rows of padding."""

    vectors: NDArray[np.float32]  # (B, W)
    ids: NDArray  # (B, L) int32, padded on the right
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        return self.vectors, None, self.ids, self.ids != pad_id


class TaughtBatches(BatchesOfOthers[TaughtBatch]):
    """Batches of texts and vectors (N, W), made of the batches `clean`, whose sides are both the texts."""

    def __init__(self, clean: TokenBatches, vectors: NDArray[np.float32]):
        super().__init__(clean)
        self.vectors = vectors

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> TaughtBatch:
        ids, members = self.clean.build(part, epoch, index).source, part[1]
        vectors = np.zeros((len(ids), self.vectors.shape[1]), np.float32)
        vectors[: len(members)] = self.vectors[members]
        return TaughtBatch(vectors, ids, len(members))
