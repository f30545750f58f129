"""The base of all kinds of training batches: shuffled anew in each epoch, the same each time, with exact resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

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
    """The most target tokens of a batch, padding included."""

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

    def batches(self, epoch: int) -> EpochBatches[B]:
        """Return the batches of one epoch as a sequence; each is built only when it is asked for.

        Order and contents follow from (seed, epoch) alone.
        """
        random = legacy_random(self.seed, epoch)
        parts = self.plan(random)
        return EpochBatches(self, epoch, [parts[i] for i in random.permutation(len(parts))])

    def from_step(self, step: int) -> Iterator[B]:
        """Yield batches without an end from step `step` on, counted over all epochs: those of an uninterrupted run."""
        epoch, index = divmod(step, len(self))
        while True:
            batches = self.batches(epoch)
            for i in range(index, len(batches)):
                yield batches[i]
            epoch, index = epoch + 1, 0


class EpochBatches(Sequence[B]):
    """The shuffled batches of one epoch; see `BatchesByEpoch.batches`."""

    def __init__(self, corpus: BatchesByEpoch[B], epoch: int, parts: list[Any]):
        self._corpus, self._epoch, self.parts = corpus, epoch, parts

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> list[B]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._corpus.build(self.parts[index], self._epoch, index)


def legacy_random(*seeds: int) -> np.random.RandomState:
    """Make the generator whose stream NumPy has frozen, so that a resumed run draws the same under another NumPy."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))
