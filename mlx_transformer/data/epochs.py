"""The base of all kinds of training batches: shuffled anew in each epoch, the same each time, with exact resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, int, int]  # (B, S, T)

StepArrays = tuple[NDArray | None, ...]
"""The arrays of a batch that a training step reads: targets (pad_id where nothing is learned), their positions (None:
all in order), then the arguments of `Transformer.hidden`."""


class TrainingBatch(Protocol):
    """A batch of any objective."""

    @property
    def tokens(self) -> int:
        """The number of targets that are learned: the loss's divisor."""
        ...

    def arrays(self, pad_id: int) -> StepArrays: ...


B = TypeVar("B", bound=TrainingBatch)


class BatchesByEpoch(ABC, Generic[B]):
    """Batches of a corpus, for any epoch. A `part` is anything that `build` makes a batch of."""

    dropped: int
    """The number of pairs or documents that are left out, for they don't fit."""
    batch_tokens: int
    """The most target tokens of a batch, padding included; or as many of what `unit` names."""
    unit: str = "target tokens"

    def __init__(self, seed: int):
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """Count the batches of an epoch, which are as many in every epoch."""

    @abstractmethod
    def plan(self, random: np.random.RandomState) -> list[Any]:
        """Divide an epoch into parts, one a batch."""

    @abstractmethod
    def build(self, part: Any, epoch: int, index: int) -> B:
        """Make the batch of a part, the `index`-th of its epoch."""

    def parts(self, epoch: int) -> list[Any]:
        """Divide an epoch and shuffle the parts; both follow from (seed, epoch) alone."""
        random = legacy_random(self.seed, epoch)
        parts = self.plan(random)
        return [parts[i] for i in random.permutation(len(parts))]

    def batches(self, epoch: int, begin: int = 0) -> Iterator[B]:
        """Yield the batches of one epoch, from number `begin` on; each is built only when it is asked for."""
        for index, part in enumerate(self.parts(epoch)[begin:], begin):
            yield self.build(part, epoch, index)

    def from_step(self, step: int) -> Iterator[B]:
        """Yield batches without an end from step `step` on, counted over all epochs: those of an uninterrupted run."""
        epoch, begin = divmod(step, len(self))
        while True:
            yield from self.batches(epoch, begin)
            epoch, begin = epoch + 1, 0


def legacy_random(*seeds: int) -> np.random.RandomState:
    """Make the generator whose stream NumPy has frozen, so that a resumed run draws the same under another NumPy."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))
