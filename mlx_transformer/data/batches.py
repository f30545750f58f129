"""Cut pairs of token ids into padded batches within a token budget, with exact resume.

Shapes: B rows, S source length, T target length, L tokens, W numbers of a vector.

`TokenBatches` is for devices that compile for each shape. Each pair belongs to a bucket (S, T), its lengths rounded up,
and all batches of a bucket have the same B. So a compiled step sees at most `max_shapes` shapes. Buckets too small for
one batch are merged into the larger bucket that costs the least padding.

If a bucket's last batch would be mostly empty, its pairs move to the next larger bucket (other pairs in each epoch).
The others are spread evenly over the bucket's batches. Free rows contain only padding (source, target_in and target_out
are all `pad_id`) and count no tokens.

`SortedBatches` gives each batch its own shape, with hardly any padding. `TaughtBatches` adds a teacher's vectors, for
distillation. `prefetched` makes the next batches in a thread while the device works.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError

from .epochs import B, BatchesByEpoch, Shape, StepArrays
from .ragged import Examples, Pairs, Ragged, Rows, cells, padded, usable


@dataclass(frozen=True)
class Batch:
    """A step's input, padded on the right. tokens: target tokens without padding, by which the loss is divided."""

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
    """Choose the target tokens per batch for a corpus of `target_tokens`.

    500 batches an epoch, so that a short run takes enough steps. But at least 500 tokens, since gradients of fewer are
    too noisy, and at most 2000, since larger batches learn more slowly per epoch.
    """
    return min(2000, max(500, round(target_tokens / 50_000) * 100))


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Settings of batches of any kind."""

    batch_tokens: int | None = None
    """Largest rows times length; None: `fitting_batch` chooses."""
    grow: bool = False
    """If the budget is too small for the longest rows, enlarge it instead of raising UserError."""
    row_multiple: int = 2
    """The number of rows is a multiple of this; with 2, two CPU streams get equal halves."""
    seed: int = 1
    pad_id: int = 0
    bos_id: int = 1

    def budget(self, longest: int, tokens: int, words: str, remedy: str = "") -> int:
        """The tokens per batch, for rows of at most `longest` tokens and a corpus of `tokens` target tokens.

        Raises UserError if `batch_tokens` is less than `row_multiple` of the longest rows, unless it may grow. words:
        names the longest rows in the error; remedy: its last words.
        """
        least = longest * self.row_multiple
        if self.batch_tokens is None:
            return max(fitting_batch(tokens), least)
        if self.batch_tokens < least and not self.grow:
            raise UserError(
                "{batch_tokens} is {}; {} rows of {} need {}: raise {batch_tokens} or lower {max_length}{}",
                self.batch_tokens,
                self.row_multiple,
                words,
                least,
                remedy,
            )
        return max(self.batch_tokens, least)


@dataclass(frozen=True, kw_only=True)
class PairSettings(BatchSettings):
    """Settings of batches of pairs. Rows times the longer of S and T stay within `batch_tokens`."""

    batch_tokens: int | None = 2048
    max_length: int = 256
    """Pairs with more tokens on a side are dropped, not cut: a cut target would teach the model to stop early."""
    length_multiple: int = 8
    """Lengths are rounded up to a multiple of this, at least `min_length`."""
    min_length: int = 16
    max_shapes: int = 16
    """Most shapes (B, S, T)."""

    def __post_init__(self) -> None:
        for name in ("length_multiple", "row_multiple", "max_shapes"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")


class TokenBatches(BatchesByEpoch[Batch]):
    """The batches of a corpus of pairs, for any epoch, in few shapes.

    source, target: lists of ids that end with eos, as from `Tokenizer.encode_batch`. Or source is `Examples`, without a
    target. settings: the fields of `PairSettings`. Pairs that are too long are counted in `dropped`. Takes 4 bytes per
    example besides the examples themselves.

    Raises UserError if no pair is left, or if `batch_tokens` is too small for the longest pairs and may not grow.

    >>> batches = TokenBatches([[5, 6, 2], [7, 2]], [[8, 2], [9, 2]], grow=True)
    >>> next(iter(batches.batches(epoch=0))).shape
    (128, 16, 16)
    """

    few_shapes = True
    """Whether all batches of a bucket have the same shape."""

    def __init__(
        self,
        source: Examples | Ragged | Sequence[Sequence[int]],
        target: Ragged | Sequence[Sequence[int]] = (),
        **settings: Any,
    ):
        s = PairSettings(**settings)
        super().__init__(s.seed)
        self.pad_id, self.bos_id = s.pad_id, s.bos_id
        self.examples = examples = source if isinstance(source, Examples) else Pairs(source, target)
        self._usable = usable(examples, s.max_length)
        self.dropped = examples.dropped + len(examples) - len(self._usable)
        if not len(self._usable):
            raise UserError(
                "no pair has 1 to {} tokens a side (of {}); raise {max_length}", s.max_length, len(examples)
            )
        source_lengths, target_lengths = self._lengths()
        lengths = (source_lengths, target_lengths)
        longest = max(int(_rounded_up(n.max(), s.length_multiple, s.min_length)) for n in lengths)
        words, remedy = f"{longest} tokens, as the longest pairs have,", ", which leaves those pairs out"
        self.batch_tokens = s.budget(longest, int(target_lengths.sum(dtype=np.int64)), words, remedy)
        self._cut(s)

    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target lengths of the usable examples."""
        return self.examples.source_lengths[self._usable], self.examples.target_lengths[self._usable]

    def _cut(self, s: PairSettings) -> None:
        """Decide on the buckets and on the examples in each."""
        rounded = [_rounded_up(lengths, s.length_multiple, s.min_length) for lengths in self._lengths()]
        shapes, cell_of = cells(*rounded)
        counts = np.bincount(cell_of, minlength=len(shapes))
        largest = np.array([[int(lengths.max()) for lengths in rounded]])
        if (shapes[-1] != largest[0]).any():
            shapes, counts = np.concatenate([shapes, largest]), np.append(counts, 0)
        rows = self.batch_tokens // shapes.max(axis=1) // s.row_multiple * s.row_multiple
        merged = _merge(shapes, counts, rows, s.max_shapes)
        used = np.unique(merged[np.flatnonzero(counts)])
        bucket_of = np.searchsorted(used, merged).astype(np.int32)[cell_of]
        self.shapes: list[Shape] = [(int(rows[c]), int(shapes[c, 0]), int(shapes[c, 1])) for c in used]
        self._members = [self._usable[bucket_of == b] for b in range(len(used))]  # examples of each bucket
        self._plan_sizes()

    def _plan_sizes(self) -> None:
        """Decide how many pairs each bucket passes to which larger bucket, and how many batches it has in each epoch.

        The remainder moves if its rows take fewer tokens in the larger bucket than a batch of their own.
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
        """The number of batches in an epoch, the same in each."""
        return sum(self._parts)

    def plan(self, random: np.random.RandomState) -> list[tuple[int, np.ndarray]]:
        """Return (bucket, indices of its pairs) for each batch of an epoch."""
        arrived: list[list[np.ndarray]] = [[members] for members in self._members]
        plan = []
        for bucket in self._order:
            members = random.permutation(np.concatenate(arrived[bucket]))
            moved, larger = self._upward[bucket]
            arrived[larger].append(members[:moved])
            if self._parts[bucket]:
                plan += [(bucket, part) for part in np.array_split(members[moved:], self._parts[bucket])]
        return plan

    def build(self, part: tuple[int, np.ndarray], epoch: int, index: int) -> Batch:
        """Make a batch of at most B examples, padded to the bucket's shape."""
        bucket, members = part
        return self._padded(self.shapes[bucket], *self.examples.rows(members, epoch))

    def _padded(self, shape: Shape, source_rows: Rows, target_rows: Rows) -> Batch:
        rows, source_length, target_length = shape
        source = padded(source_rows, rows, source_length, self.pad_id)
        target_out = padded(target_rows, rows, target_length, self.pad_id)
        target_in = np.full_like(target_out, self.pad_id)
        target_in[:, 1:] = target_out[:, :-1]
        count = np.fromiter(map(len, target_rows), np.int64, len(target_rows))
        is_shorter = count < target_length  # target_in has no eos, so its place becomes padding
        target_in[np.flatnonzero(is_shorter), count[is_shorter]] = self.pad_id
        target_in[: len(count), 0] = self.bos_id
        return Batch(source, target_in, target_out, int(count.sum()))


class SortedBatches(TokenBatches):
    """Batches with hardly any padding, each with its own shape, for devices that don't compile.

    Like `TokenBatches`, but B, S and T fit each batch; `length_multiple` and `min_length` are ignored. Pairs are sorted
    by (T, S) and cut where the token budget is full. Each epoch shuffles the pairs of equal lengths and the order of
    batches. The cuts depend only on the sorted lengths, so every epoch has the same number of batches.

    On 29k real sentence pairs 0.3 % of the target positions are padding; buckets of 2 tokens on either side left 16 %.
    """

    few_shapes = False

    def _cut(self, s: PairSettings) -> None:
        row_multiple = s.row_multiple
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
        # The sort is stable, so pairs of equal lengths stay shuffled.
        order = self._usable[shuffled[np.argsort(self._rank[shuffled], kind="stable")]]
        return [(i, order[self._cuts[i] : self._cuts[i + 1]]) for i in range(len(self))]

    def build(self, part: tuple[int, np.ndarray], epoch: int, index: int) -> Batch:
        """Make a batch as wide as its longest example in this epoch; with BPE dropout that varies."""
        bucket, members = part
        source, target = self.examples.rows(members, epoch)
        return self._padded((self.shapes[bucket][0], max(map(len, source)), max(map(len, target))), source, target)


class BatchesOfOthers(BatchesByEpoch[B]):
    """Base of batches made from other batches, `clean`, one from each: e.g. by masking tokens."""

    def __init__(self, clean: TokenBatches):
        super().__init__(clean.seed)
        self.clean = clean
        self.dropped, self.batch_tokens = clean.dropped, clean.batch_tokens

    def __len__(self) -> int:
        return len(self.clean)

    def plan(self, random: np.random.RandomState) -> list[tuple[int, NDArray]]:
        return self.clean.plan(random)


def _rounded_up(length: np.ndarray, multiple: int, least: int) -> np.ndarray:
    return np.maximum(-(-length // multiple) * multiple, least)


def _merge(cells: np.ndarray, counts: np.ndarray, rows: np.ndarray, max_shapes: int) -> np.ndarray:
    """Merge cells (S, T) into at most `max_shapes` buckets that each fill a batch; return each cell's bucket (N,).

    cells (N, 2); counts (N,): pairs in each cell; rows (N,): rows of its batches. The last cell is as long as all
    others on both sides. Greedy: the merge that adds the least padding goes first. A cell is only merged into a cell
    that is at least as long on both sides.
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


@dataclass(frozen=True)
class TaughtBatch:
    """A step's input for distillation. tokens: the number of texts, without rows of padding."""

    vectors: NDArray[np.float32]  # (B, W)
    ids: NDArray  # (B, L) int32, padded on the right
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        return self.vectors, None, self.ids, self.ids != pad_id


class TaughtBatches(BatchesOfOthers[TaughtBatch]):
    """Batches of texts with a teacher's vectors (N, W). clean: batches whose source and target are both the texts."""

    def __init__(self, clean: TokenBatches, vectors: NDArray[np.float32]):
        super().__init__(clean)
        self.vectors = vectors

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> TaughtBatch:
        ids, members = self.clean.build(part, epoch, index).source, part[1]
        vectors = np.zeros((len(ids), self.vectors.shape[1]), np.float32)
        vectors[: len(members)] = self.vectors[members]
        return TaughtBatch(vectors, ids, len(members))


T = TypeVar("T")

AHEAD = 2  # batches made in advance
SECONDS = 1.0  # to wait at the end for the batch that is being made; a process that exits doesn't wait


@contextmanager
def prefetched(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Make items ahead in a thread, in the same order: `with prefetched(batches) as batches: next(batches)`.

    An error of the iterator is raised at the item where it occurred. Only the thread runs the iterator, which must not
    use MLX: its streams belong to the threads that made them. When the block ends, even by an error or interrupt, the
    thread ends after its current item.
    """
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(AHEAD)
    ended, last = threading.Event(), None

    def make() -> None:
        try:
            for item in items:
                made.put((item, None))
                if ended.is_set():
                    return
            end: BaseException = StopIteration()
        except BaseException as error:  # of any kind: the consumer must get it, or it would wait forever
            end = error
        made.put((None, end))

    def take() -> Any:
        nonlocal last
        item, last = (None, last) if last is not None else made.get()
        if last is not None:
            raise last
        return item

    # A daemon, so that a process that must end at once doesn't wait for the plan of an epoch.
    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        yield iter(take, object())
    finally:
        ended.set()
        while not made.empty():  # makes room, in case the thread is waiting to put an item
            made.get_nowait()
        thread.join(SECONDS)
