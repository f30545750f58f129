"""The base class of training batches, shuffled in each epoch with exact resume, and mixtures of corpora by weight.

`Mixture` gives each corpus the same share of every epoch. An epoch has N examples, as many as all corpora have pairs.
Corpus i, with n_i pairs and weight w_i, gets q_i examples: w_i N over the sum of weights, rounded so that they add up
to N (largest remainders). It cycles evenly through its pairs: after E epochs each was seen E q_i / n_i times, rounded
up or down.

Batches are cut the same way in every epoch, so that any step can be found at once. For that an epoch has N fixed slots,
each with bounds on its lengths. The pairs of a corpus are sorted by (target, source) length; the seed orders ties. In
epoch e the pair of rank i fills floor((i+e+1) q/n) - floor((i+e) q/n) slots. So slot j takes turns through the ranks
floor(j n/q) to ceil((j+1) n/q) - 1. Its bounds are the largest lengths of these pairs; if each pair comes once an
epoch, they are the pair's own lengths.
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
"""A batch as a training step reads it: targets (pad_id where nothing is learned), their positions (None: all in order),
then the arguments of `Transformer.hidden`, e.g. source and target ids."""


class TrainingBatch(Protocol):
    """A batch of any objective."""

    @property
    def tokens(self) -> int:
        """The number of targets to learn, by which the loss is divided."""
        ...

    def arrays(self, pad_id: int) -> StepArrays: ...


B = TypeVar("B", bound=TrainingBatch)


class BatchesByEpoch(ABC, Generic[B]):
    """The batches of a corpus, for any epoch.

    Subclasses divide an epoch into parts (`plan`) and make a batch from each (`build`). A part is e.g. the indices of
    the batch's pairs.
    """

    dropped: int
    """Pairs or documents left out since they don't fit."""
    batch_tokens: int
    """Most target tokens of a batch, padding included; in `unit` if that isn't target tokens."""
    unit: str = "target tokens"

    def __init__(self, seed: int):
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch, the same in each."""

    @abstractmethod
    def plan(self, random: np.random.RandomState) -> list[Any]:
        """Divide an epoch into parts, one for each batch."""

    @abstractmethod
    def build(self, part: Any, epoch: int, index: int) -> B:
        """Make a part's batch, number `index` of its epoch."""

    def parts(self, epoch: int) -> list[Any]:
        """Divide an epoch and shuffle the parts; both depend only on (seed, epoch)."""
        random = legacy_random(self.seed, epoch)
        parts = self.plan(random)
        return [parts[i] for i in random.permutation(len(parts))]

    def batches(self, epoch: int, begin: int = 0) -> Iterator[B]:
        """Yield the batches of an epoch from number `begin` on, building each when it is needed."""
        for index, part in enumerate(self.parts(epoch)[begin:], begin):
            yield self.build(part, epoch, index)

    def from_step(self, step: int) -> Iterator[B]:
        """Yield batches forever, from step `step` on, counted over all epochs; a resumed run gets the same batches."""
        epoch, begin = divmod(step, len(self))
        while True:
            yield from self.batches(epoch, begin)
            epoch, begin = epoch + 1, 0


def legacy_random(*seeds: int) -> np.random.RandomState:
    """NumPy's legacy generator. Its stream is frozen, so a resumed run draws the same with another version of NumPy."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))


class Mixture(Examples):
    """Examples of several corpora, mixed by weight. The first sizes[0] of `pairs` are the first corpus, and so on.

    Pairs with more than `max_length` tokens on a side are left out and counted in `dropped`. Raises UserError if that
    leaves a corpus without pairs.
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
        """The indices of the pairs in these slots in an epoch."""
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
    """Divide `total` in proportion to the weights, at least 1 each: shares(10, [1, 2]) -> [3, 7].

    Shares are rounded down, then those with the largest remainders get one more.
    """
    exact = np.array(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return np.maximum(counts, 1).tolist()


def _sorted(pairs: Examples, members: NDArray, seed: int, corpus: int) -> NDArray:
    """Sort pairs by (target, source) length; the seed orders ties."""
    if not len(members):
        return members
    random = legacy_random(seed, corpus)
    members = members[random.permutation(len(members))]
    _, rank = cells(pairs.target_lengths[members], pairs.source_lengths[members])
    return members[np.argsort(rank, kind="stable")]


def _bounds(pairs: Examples, ranked: NDArray, count: int) -> tuple[NDArray, NDArray]:
    """The largest (source, target) lengths that each of `count` slots has in any epoch."""
    n, slot = len(ranked), np.arange(count, dtype=np.int64)
    first, last = slot * n // count, -(-(slot + 1) * n // count) - 1
    windows = np.stack([first, last + 1], axis=1).ravel()
    # One more element at the end, since `reduceat` rejects a window that begins after the last.
    source = np.append(pairs.source_lengths[ranked], np.int32(0))
    return np.maximum.reduceat(source, windows)[::2], pairs.target_lengths[ranked[last]]
