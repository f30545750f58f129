"""Batches with hardly any padding, for machines that compile nothing: shapes are free, so every batch has its own.

B rows, S source length, T target length. Pairs are sorted by (T, S) and cut where the token budget is full. Pairs of
equal lengths are shuffled among each other in every epoch, and so are the batches; the cuts depend on the sorted
lengths alone, so that every epoch has the same number of batches.
"""

from __future__ import annotations

import numpy as np

from .batches import Batch, TokenBatches
from .examples import cells


class SortedBatches(TokenBatches):
    """As `TokenBatches`, with B, S and T that fit each batch; `length_multiple` and `min_length` don't apply.

    On 29k real sentence pairs 0.3 % of the target positions are padding; buckets of 2 tokens on either side left 16 %.
    """

    few_shapes = False

    def _cut(self, length_multiple: int, min_length: int, row_multiple: int, max_shapes: int) -> None:
        source_lengths, target_lengths = self._lengths()
        _, rank = cells(target_lengths, source_lengths)  # (n,): equal lengths have equal numbers
        order = np.argsort(rank, kind="stable").astype(np.int32)
        self._usable, self._rank = self._usable[order], rank[order]
        source_lengths, target_lengths = source_lengths[order], target_lengths[order]
        longer = np.maximum(source_lengths, target_lengths)
        cuts = [0]
        while cuts[-1] < len(order):
            begin = cuts[-1]
            most = min(len(order) - begin, self.batch_tokens // int(target_lengths[begin]))
            longest = np.maximum.accumulate(longer[begin : begin + most])
            padded_rows = -(-np.arange(1, most + 1) // row_multiple) * row_multiple
            fits = np.flatnonzero(longest * padded_rows <= self.batch_tokens)
            rows = int(fits[-1]) + 1 if len(fits) else 1
            full_rows = rows // row_multiple * row_multiple
            cuts.append(begin + (full_rows if full_rows and begin + rows < len(order) else rows))
        self._cuts = cuts
        rows = -(-np.diff(cuts) // row_multiple) * row_multiple
        longest_source, longest_target = (np.maximum.reduceat(n, cuts[:-1]) for n in (source_lengths, target_lengths))
        self.shapes = list(zip(rows.tolist(), longest_source.tolist(), longest_target.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.shapes)

    def plan(self, random: np.random.RandomState) -> list[tuple[int, np.ndarray]]:
        shuffled = random.permutation(len(self._usable)).astype(np.int32)
        # A stable sort: ties stay shuffled.
        order = self._usable[shuffled[np.argsort(self._rank[shuffled], kind="stable")]]
        return [(i, order[self._cuts[i] : self._cuts[i + 1]]) for i in range(len(self))]

    def build(self, part: tuple[int, np.ndarray], epoch: int, index: int) -> Batch:
        """As wide as its examples are in this epoch, which may be less than their bounds."""
        bucket, members = part
        source, target = self.examples.rows(members, epoch)
        return self._padded((self.shapes[bucket][0], max(map(len, source)), max(map(len, target))), source, target)
