"""Token ids to padded batches: length buckets, a token budget, few distinct shapes, exact resume.

Shapes: B rows, S source length, T target length. Every pair belongs to one bucket (S, T), its lengths rounded up;
a bucket always gives the same B, so a compiled step sees at most `max_shapes` shapes. Buckets that could not fill
one batch are merged into the cheapest larger one.

The pairs of a bucket are dealt evenly over its batches, so the last batch is no runt; rows that stay free are
padding only (source, target_in and target_out all `pad_id`) and count no tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_transformer.spec.errors import UserError

Shape = tuple[int, int, int]  # (B, S, T)


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


class TokenBatches:
    """All batches of a corpus, for any epoch.

    `source` and `target` are lists of ids that end with eos, as `Tokenizer.encode_batch` gives them.
    Rows times the longer of S and T stay within `tokens_per_batch`; rows are a multiple of `row_multiple` (2: a
    batch is split in halves for two CPU streams). Lengths are rounded up to `length_multiple`, at least `min_length`.
    Pairs with a side of more than `max_length` tokens are dropped and counted in `dropped`, never cut: a cut target
    would teach the model to stop early. UserError when nothing is left or the budget is below one batch.
    """

    def __init__(
        self,
        source: Sequence[Sequence[int]],
        target: Sequence[Sequence[int]],
        *,
        tokens_per_batch: int = 2048,
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
        self.seed, self.pad_id, self.bos_id = seed, pad_id, bos_id
        self._source, self._target = _Ragged(source), _Ragged(target)

        lengths = np.stack([self._source.lengths, self._target.lengths], axis=1)  # (pairs, 2)
        kept = np.flatnonzero((lengths <= max_length).all(axis=1) & (lengths > 0).all(axis=1))
        self.dropped = len(lengths) - len(kept)
        if not len(kept):
            raise UserError(f"no pair has 1 to {max_length} tokens a side (of {len(lengths)}); raise max_length")
        rounded = np.maximum(-(-lengths[kept] // length_multiple) * length_multiple, min_length)
        if tokens_per_batch < rounded.max() * row_multiple:
            raise UserError(
                f"tokens_per_batch is {tokens_per_batch}; {row_multiple} rows of {rounded.max()} tokens need "
                f"{rounded.max() * row_multiple}: raise it or lower max_length"
            )

        def rows(cell: tuple[int, int]) -> int:
            return tokens_per_batch // max(cell) // row_multiple * row_multiple

        cells, cell_of = np.unique(rounded, axis=0, return_inverse=True)
        counts = np.bincount(cell_of.ravel(), minlength=len(cells))
        merged = _merge([(int(s), int(t)) for s, t in cells], counts.tolist(), rows, max_shapes)
        shapes = sorted(set(merged))
        bucket_of_cell = np.array([shapes.index(cell) for cell in merged])
        bucket_of = bucket_of_cell[cell_of.ravel()]
        self.shapes: list[Shape] = [(rows(cell), *cell) for cell in shapes]
        self._members = [kept[bucket_of == b] for b in range(len(shapes))]  # pair indices of each bucket
        self._parts = [-(-len(members) // shape[0]) for members, shape in zip(self._members, self.shapes, strict=True)]

    def __len__(self) -> int:
        """Batches an epoch: the same for every epoch."""
        return sum(self._parts)

    def batches(self, epoch: int) -> "EpochBatches":
        """The batches of one epoch as a sequence; each is built only when it is asked for.

        Order and contents follow from (seed, epoch) alone. The legacy generator is used since NumPy freezes its
        stream, so a resumed run sees the same batches under another NumPy.
        """
        seeds = np.random.SeedSequence((self.seed, epoch))
        random = np.random.RandomState(np.random.MT19937(seeds))
        plan = [
            (bucket, part)
            for bucket, (members, parts) in enumerate(zip(self._members, self._parts, strict=True))
            for part in np.array_split(random.permutation(members), parts)
        ]
        return EpochBatches(self, [plan[i] for i in random.permutation(len(plan))])

    def at_step(self, step: int) -> Batch:
        """The batch of optimizer step `step`, counted from 0 over all epochs. To walk on from there: `from_step`."""
        epoch, index = divmod(step, len(self))
        return self.batches(epoch)[index]

    def from_step(self, step: int) -> Iterator[Batch]:
        """Endless batches from step `step` on: what an uninterrupted run would have seen."""
        epoch, index = divmod(step, len(self))
        while True:
            batches = self.batches(epoch)
            for i in range(index, len(batches)):
                yield batches[i]
            epoch, index = epoch + 1, 0

    def build(self, bucket: int, members: np.ndarray) -> Batch:
        """The batch of bucket `bucket` with the pairs `members` (at most B), padded to the bucket's shape."""
        rows, source_length, target_length = self.shapes[bucket]
        source = self._source.padded(members, rows, source_length, self.pad_id)
        target_out = self._target.padded(members, rows, target_length, self.pad_id)
        target_in = np.full_like(target_out, self.pad_id)
        target_in[:, 1:] = target_out[:, :-1]
        count = self._target.lengths[members]
        inside = count < target_length  # eos moves out of target_in: its place becomes padding
        target_in[np.flatnonzero(inside), count[inside]] = self.pad_id
        target_in[: len(members), 0] = self.bos_id
        return Batch(source, target_in, target_out, int(count.sum()))


class EpochBatches(Sequence[Batch]):
    """The shuffled batches of one epoch; see `TokenBatches.batches`."""

    def __init__(self, corpus: TokenBatches, plan: list[tuple[int, np.ndarray]]):
        self._corpus, self._plan = corpus, plan

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._corpus.build(*part) for part in self._plan[index]]
        return self._corpus.build(*self._plan[index])

    def members(self, index: int) -> np.ndarray:
        """Which pairs of the corpus the batch holds, row by row."""
        return self._plan[index][1]


class _Ragged:
    """Sequences of unequal length in one flat array."""

    def __init__(self, sequences: Sequence[Sequence[int]]):
        self.lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        self.starts = np.cumsum(self.lengths) - self.lengths
        flat = (token for sequence in sequences for token in sequence)
        self.flat = np.fromiter(flat, dtype=np.int32, count=int(self.lengths.sum()))

    def padded(self, members: np.ndarray, rows: int, length: int, pad: int) -> np.ndarray:
        """(rows, length) int32: the sequences `members`, then rows of padding."""
        columns = np.arange(length)
        inside = columns < self.lengths[members][:, None]
        out = np.full((rows, length), pad, dtype=np.int32)
        out[: len(members)][inside] = self.flat[(self.starts[members][:, None] + columns)[inside]]
        return out


def _merge(cells: list[tuple[int, int]], counts: list[int], rows, max_shapes: int) -> list[tuple[int, int]]:
    """Send each cell (S, T) to a bucket that holds it, so that buckets fill a batch and number at most `max_shapes`.

    Greedy: the merge that adds the least padding goes first; a cell may only join one as long on both sides.
    """
    largest = (max(s for s, _ in cells), max(t for _, t in cells))
    members: dict[tuple[int, int], list[int]] = {cell: [i] for i, cell in enumerate(cells)}
    members.setdefault(largest, [])
    size = {cell: sum(counts[i] for i in inside) for cell, inside in members.items()}

    def padding(small: tuple[int, int], large: tuple[int, int]) -> int:
        return size[small] * (sum(large) - sum(small))

    while True:
        too_many = sum(1 for cell in size if size[cell]) > max_shapes
        movable = [c for c in size if c != largest and (too_many or size[c] < rows(c))]
        moves = [(padding(c, d), c, d) for c in movable for d in size if c != d and c[0] <= d[0] and c[1] <= d[1]]
        if not moves:
            break
        _, small, large = min(moves)
        members[large] += members.pop(small)
        size[large] += size.pop(small)
    bucket = {i: cell for cell, inside in members.items() for i in inside}
    return [bucket[i] for i in range(len(cells))]
