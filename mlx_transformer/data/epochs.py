"""The base of all kinds of training batches: shuffled anew in each epoch, the same each time, with exact resume.

Several corpora in shares that are given, the same in every epoch.

An epoch has as many examples as all corpora have pairs, N. Corpus i, of n_i pairs and weight w_i, has q_i of them,
w_i N over the sum of weights, rounded so that they add up to N (largest remainders). It goes through its pairs evenly:
after E epochs each has been seen E q_i / n_i times, rounded up or down.

Batches must be cut alike in every epoch, so that any step of any epoch is found at once. Hence an epoch consists of the
same N slots, each with bounds on its lengths. The pairs of a corpus are sorted by (target, source) length, ties in an
order that the seed decides; the one of rank i stands in epoch e in floor((i+e+1) q/n) - floor((i+e) q/n) slots, so that
slot j takes from the ranks floor(j n/q) to ceil((j+1) n/q) - 1 in turn. Its bounds are the largest lengths there, and
where a pair is seen once an epoch its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

from .ragged import Examples, Rows, cells, usable

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


class Mixture(Examples):
    """Examples of several corpora; the first sizes[0] of the `pairs` are those of the first corpus, and so on.

    Pairs with more than `max_length` tokens on a side count for nothing and are `dropped`. `UserError` for a corpus
    that has no others.
    """

    def __init__(self, pairs: Examples, sizes: Sequence[int], weights: Sequence[float], max_length: int, seed: int):
        self._pairs = pairs
        fits = usable(pairs, max_length)
        self.dropped = pairs.dropped + len(pairs) - len(fits)
        ends = np.searchsorted(fits, np.cumsum(sizes))
        self._corpora = [_sorted(pairs, part, seed, i) for i, part in enumerate(np.split(fits, ends[:-1]))]
        for i, corpus in enumerate(self._corpora, 1):
            if not len(corpus):
                raise UserError("corpus {}: no pair has 1 to {} tokens a side; raise {max_length}", i, max_length)
        self.counts = shares(len(fits), weights)
        self._ends = np.cumsum(self.counts)
        bounds = [_bounds(pairs, ranked, count) for ranked, count in zip(self._corpora, self.counts, strict=True)]
        self.source_lengths, self.target_lengths = (np.concatenate(side) for side in zip(*bounds, strict=True))

    def members(self, slots: NDArray, epoch: int) -> NDArray:
        """Return the pairs that stand in these slots in an epoch."""
        corpora = np.searchsorted(self._ends, slots, side="right")
        members = np.empty(len(slots), np.int64)
        for i in np.unique(corpora).tolist():
            ranked, count, here = self._corpora[i], self.counts[i], corpora == i
            slot = slots[here].astype(np.int64) - (int(self._ends[i]) - count)
            n, e = len(ranked), epoch % len(ranked)
            members[here] = ranked[-(-(slot + e * count // n + 1) * n // count) - 1 - e]
        return members

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        return self._pairs.rows(self.members(members, epoch), epoch)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` in parts as the weights, at least one each: rounded down, and the largest remainders up."""
    exact = np.array(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return np.maximum(counts, 1).tolist()


def _sorted(pairs: Examples, members: NDArray, seed: int, corpus: int) -> NDArray:
    """Sort the pairs by (target, source) length; the seed decides between equals."""
    if not len(members):
        return members
    random = legacy_random(seed, corpus)
    members = members[random.permutation(len(members))]
    _, rank = cells(pairs.target_lengths[members], pairs.source_lengths[members])
    return members[np.argsort(rank, kind="stable")]


def _bounds(pairs: Examples, ranked: NDArray, count: int) -> tuple[NDArray, NDArray]:
    """Return the largest (source, target) length that each of `count` slots ever has."""
    n, slot = len(ranked), np.arange(count, dtype=np.int64)
    first, last = slot * n // count, -(-(slot + 1) * n // count) - 1
    windows = np.stack([first, last + 1], axis=1).ravel()
    # One more at the end, as `reduceat` takes no window that begins behind the last.
    source = np.append(pairs.source_lengths[ranked], np.int32(0))
    return np.maximum.reduceat(source, windows)[::2], pairs.target_lengths[ranked[last]]
