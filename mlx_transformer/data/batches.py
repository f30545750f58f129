"""Token ids to padded batches: length buckets, a token budget, few distinct shapes, exact resume.

Shapes: B rows, S source length, T target length. Every pair belongs to one bucket (S, T), its lengths rounded up;
a bucket always gives the same B, so a compiled step sees at most `max_shapes` shapes. Buckets that could not fill
one batch are merged into the cheapest larger one.

Pairs that would leave a bucket's last batch mostly empty move up to the next larger bucket, others in each epoch.
The rest is dealt evenly over the bucket's batches, so the last batch is no runt; rows that stay free are padding
only (source, target_in and target_out all `pad_id`) and count no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_transformer.spec.errors import UserError

from .epochs import BatchesByEpoch, Shape, StepArrays


@dataclass(frozen=True)
class Batch:
    """One step's input, right-padded. `tokens` counts the target tokens that are no padding (the loss's divisor)."""

    source: np.ndarray  # (B, S) int32, each row ends with eos
    target_in: np.ndarray  # (B, T) int32, starts with bos
    target_out: np.ndarray  # (B, T) int32, ends with eos
    tokens: int

    @property
    def shape(self) -> Shape:
        return (*self.source.shape, self.target_out.shape[1])  # type: ignore[return-value]

    def arrays(self, pad_id: int) -> StepArrays:
        is_token = self.source != pad_id
        return self.target_out, None, self.source, self.target_in, None if is_token.all() else is_token


def fitting_batch(target_tokens: int) -> int:
    """Target tokens a batch for a corpus of so many: 500 batches an epoch, so that a short run takes enough steps,
    but not below 500 tokens (gradients too noisy) or above 2000 (what the rest of a batch would teach comes too late).
    """
    return min(2000, max(500, round(target_tokens / 50_000) * 100))


class TokenBatches(BatchesByEpoch[Batch]):
    """All batches of a corpus, for any epoch.

    `source` and `target` are lists of ids that end with eos, as `Tokenizer.encode_batch` gives them.
    Rows times the longer of S and T stay within `batch_tokens` (None: what `fitting_batch` says); rows are a multiple
    of `row_multiple` (2: a batch is split in halves for two CPU streams). Lengths are rounded up to `length_multiple`,
    at least `min_length`. Pairs with a side of more than `max_length` tokens are dropped and counted in `dropped`,
    never cut: a cut target would teach the model to stop early. UserError when nothing is left or the budget is below
    one batch of the longest pairs, unless it may `grow` to that.
    """

    few_shapes = True
    """Batches of a bucket have one shape, whatever is in them."""

    def __init__(
        self,
        source: Sequence[Sequence[int]],
        target: Sequence[Sequence[int]],
        *,
        batch_tokens: int | None = 2048,
        grow: bool = False,
        max_length: int = 256,
        length_multiple: int = 8,
        min_length: int = 16,
        row_multiple: int = 2,
        max_shapes: int = 16,
        seed: int = 1,
        pad_id: int = 0,
        bos_id: int = 1,
    ):
        if len(source) != len(target):
            raise UserError(f"{len(source)} sources and {len(target)} targets; batches need pairs")
        for name, value in (
            ("length_multiple", length_multiple),
            ("row_multiple", row_multiple),
            ("max_shapes", max_shapes),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        super().__init__(seed)
        self.pad_id, self.bos_id = pad_id, bos_id
        self._source, self._target = Ragged(source), Ragged(target)

        lengths = np.stack([self._source.lengths, self._target.lengths], axis=1)  # (pairs, 2)
        usable = np.flatnonzero((lengths <= max_length).all(axis=1) & (lengths > 0).all(axis=1))
        self.dropped = len(lengths) - len(usable)
        if not len(usable):
            raise UserError(f"no pair has 1 to {max_length} tokens a side (of {len(lengths)}); raise max_length")
        rounded = np.maximum(-(-lengths[usable] // length_multiple) * length_multiple, min_length)
        least = int(rounded.max()) * row_multiple
        if batch_tokens is None:
            batch_tokens, grow = fitting_batch(int(lengths[usable, 1].sum())), True
        if batch_tokens < least and not grow:
            raise UserError(
                f"batch_tokens is {batch_tokens}; {row_multiple} rows of {rounded.max()} tokens, as the longest pairs "
                f"have, need {least}: raise batch_tokens or lower max_length, which leaves those pairs out"
            )
        self.batch_tokens = batch_tokens = max(batch_tokens, least)

        cells, cell_of = np.unique(np.concatenate([rounded, rounded.max(axis=0)[None]]), axis=0, return_inverse=True)
        cell_of = cell_of.ravel()[:-1]
        rows = batch_tokens // cells.max(axis=1) // row_multiple * row_multiple
        merged = _merge(cells, np.bincount(cell_of, minlength=len(cells)), rows, max_shapes)
        used, bucket_of = np.unique(merged[cell_of], return_inverse=True)
        self.shapes: list[Shape] = [(int(rows[c]), int(cells[c, 0]), int(cells[c, 1])) for c in used]
        self._members = [usable[bucket_of == b] for b in range(len(used))]  # pair indices of each bucket
        self._plan_sizes()

    def _plan_sizes(self) -> None:
        """How many pairs each bucket passes on to which larger one, and how many batches it has: as in every epoch.

        A remainder r of a bucket moves when its rows in the larger bucket are fewer slots than a batch of its own.
        """
        buckets = range(len(self.shapes))
        self._upward: list[tuple[int, int]] = [(0, 0)] * len(buckets)  # (pairs, bucket they go to)
        self._parts = [0] * len(buckets)  # batches
        self._order = sorted(buckets, key=lambda b: self.shapes[b][1] + self.shapes[b][2])  # small to large
        sizes = [len(members) for members in self._members]
        for bucket in self._order:
            rows, source, target = self.shapes[bucket]
            rest = sizes[bucket] % rows
            larger = [b for b in buckets if b != bucket and self.shapes[b][1] >= source and self.shapes[b][2] >= target]
            if rest and larger:
                slots, nearest = min((self.shapes[b][1] + self.shapes[b][2], b) for b in larger)
                if rest * slots < rows * (source + target):
                    self._upward[bucket] = (rest, nearest)
                    sizes[bucket] -= rest
                    sizes[nearest] += rest
            self._parts[bucket] = -(-sizes[bucket] // rows)

    def __len__(self) -> int:
        """Batches an epoch: the same for every epoch."""
        return sum(self._parts)

    def plan(self, random: np.random.RandomState) -> list[tuple[int, np.ndarray]]:
        """(bucket, the pairs it takes) of each batch of an epoch."""
        arrived: list[list[np.ndarray]] = [[members] for members in self._members]
        plan = []
        for bucket in self._order:
            members = random.permutation(np.concatenate(arrived[bucket]))
            moved, larger = self._upward[bucket]
            arrived[larger].append(members[:moved])
            if self._parts[bucket]:
                plan += [(bucket, part) for part in np.array_split(members[moved:], self._parts[bucket])]
        return plan

    def build(self, part: tuple[int, np.ndarray], random: np.random.RandomState) -> Batch:
        """The batch of a bucket with some pairs (at most B), padded to the bucket's shape."""
        bucket, members = part
        rows, source_length, target_length = self.shapes[bucket]
        source = self._source.padded(members, rows, source_length, self.pad_id)
        target_out = self._target.padded(members, rows, target_length, self.pad_id)
        target_in = np.full_like(target_out, self.pad_id)
        target_in[:, 1:] = target_out[:, :-1]
        count = self._target.lengths[members]
        is_shorter = count < target_length  # eos moves out of target_in: its place becomes padding
        target_in[np.flatnonzero(is_shorter), count[is_shorter]] = self.pad_id
        target_in[: len(members), 0] = self.bos_id
        return Batch(source, target_in, target_out, int(count.sum()))


class Ragged:
    """Sequences of unequal length in one flat array."""

    def __init__(self, sequences: Sequence[Sequence[int]]):
        self.lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        self.starts = np.cumsum(self.lengths) - self.lengths
        flat = (token for sequence in sequences for token in sequence)
        self.flat = np.fromiter(flat, dtype=np.int32, count=int(self.lengths.sum()))

    def padded(self, members: np.ndarray, rows: int, length: int, pad: int) -> np.ndarray:
        """(rows, length) int32: the sequences `members`, then rows of padding."""
        columns = np.arange(length)
        is_token = columns < self.lengths[members][:, None]
        out = np.full((rows, length), pad, dtype=np.int32)
        out[: len(members)][is_token] = self.flat[(self.starts[members][:, None] + columns)[is_token]]
        return out


def _merge(cells: np.ndarray, counts: np.ndarray, rows: np.ndarray, max_shapes: int) -> np.ndarray:
    """For each cell (S, T) the cell to use as its bucket, so that buckets fill a batch and number at most `max_shapes`.

    cells (N, 2), counts and rows (N,): pairs in a cell, rows of its batches. The last cell holds all others.
    Greedy: the merge that adds the least padding goes first; a cell only joins one as long on both sides.
    """
    size, bucket = counts.astype(float), np.arange(len(cells))
    alive = np.ones(len(cells), dtype=bool)
    nearest, distance = np.full(len(cells), -1), np.full(len(cells), np.inf)

    def find_nearest(cell: int) -> None:
        larger = np.flatnonzero(alive & (cells >= cells[cell]).all(axis=1))
        larger = larger[larger != cell]
        if len(larger):
            growth = (cells[larger] - cells[cell]).sum(axis=1)
            nearest[cell], distance[cell] = larger[growth.argmin()], growth.min()

    for cell in range(len(cells)):
        find_nearest(cell)
    while True:
        too_many = (size > 0).sum() > max_shapes
        movable = alive & (size > 0) & np.isfinite(distance) & ((size < rows) | too_many)
        if not movable.any():
            return bucket
        candidates = np.flatnonzero(movable)
        small = candidates[(size[candidates] * distance[candidates]).argmin()]
        large = nearest[small]
        bucket[bucket == small] = large
        size[large] += size[small]
        size[small], alive[small] = 0, False
        for cell in np.flatnonzero(alive & (nearest == small)):
            find_nearest(int(cell))
