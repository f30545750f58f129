"""Load a run's parallel text, from one or several corpora; large text stays on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from mlx_transformer.system.errors import Text, UserError
from mlx_transformer.system.files import default_folder
from mlx_transformer.system.machine import check_memory
from mlx_transformer.text.tokenizer import Tokenizer

from .corpus import PairFiles, ParallelText, read_parallel, training_mask
from .epochs import Mixture, legacy_random
from .ragged import Examples, Pairs, Ragged, Rows
from .stored_text import StoredText, TokenCache, encoded

DRAWN = 512  # random numbers drawn at a time
TRIES = 3


class BpeDropout:
    """BPE dropout (Provilkov et al. 2020, algorithm 1): tokenizes text, skipping some merges at random.

    At each step of a word's segmentation, each possible merge is skipped with probability `dropout`. Of the others the
    merge learned first is made; if all are skipped, the word is done. With 0 these are the tokenizer's usual tokens.

    Raises UserError for a vocabulary without merges, e.g. a unigram model.
    """

    def __init__(self, tokenizer: Tokenizer, dropout: float):
        if tokenizer.merges is None:
            raise UserError(
                Text(
                    "{bpe_dropout}: this vocabulary is SentencePiece's, which isn't cut by merges of bytes: leave it 0"
                )
            )
        specification = tokenizer.own_json()
        self._ids: dict[str, int] = json.loads(specification)["model"]["vocab"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer.merges)
        # (left id, right id): (rank, id of the merged token)
        self._merges = {
            (self._ids[left], self._ids[right]): (rank, self._ids[left + right])
            for rank, (left, right) in enumerate(pairs)
        }
        self._words = tokenizers.Tokenizer.from_str(specification).pre_tokenizer
        self._eos, self.dropout = tokenizer.eos_id, dropout

    def ids(self, text: str, random: Iterator[float]) -> list[int]:
        """Tokenize a text; the ids end with eos. random: numbers in [0, 1)."""
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            ids += self._segments([self._ids[letter] for letter in word], random)
        return [*ids, self._eos]

    def _segments(self, ids: list[int], random: Iterator[float]) -> list[int]:
        merges, dropout = self._merges, self.dropout
        while len(ids) > 1:
            best, place = None, 0
            for i, pair in enumerate(itertools.pairwise(ids)):
                merge = merges.get(pair)
                if merge is not None and (best is None or merge[0] < best[0]) and next(random) >= dropout:
                    best, place = merge, i
            if best is None:
                break
            ids[place : place + 2] = [best[1]]
        return ids


class DroppedPairs(Examples):
    """Pairs that are tokenized anew in each epoch; the tokens depend only on (seed, epoch, pair).

    A side without dropout of n tokens has at most (1 + 4 p) n + 4 with dropout, and at most `max_length` (but n always
    fits). If a draw is longer, it is drawn again up to twice, and then tokenized without dropout.
    """

    def __init__(
        self, source: list[str], target: list[str], tokenizer: Tokenizer, dropout: float, max_length: int, seed: int
    ):
        self._texts, self._seed, self._dropout = (source, target), seed, dropout
        own = BpeDropout(tokenizer, dropout)
        self._bpe = BpeDropout(tokenizer.source, dropout) if tokenizer.separate else own, own
        self._plain: tuple[Ragged, Ragged] = encoded(tokenizer.source, source), encoded(tokenizer, target)
        self.source_lengths, self.target_lengths = (self._bounds(side.lengths, max_length) for side in self._plain)

    def rows(self, members: NDArray, epoch: int) -> tuple[Rows, Rows]:
        source, target = [], []
        for i in members.tolist():
            random = _numbers(self._seed, epoch, i)
            source.append(self._row(0, i, int(self.source_lengths[i]), random))
            target.append(self._row(1, i, int(self.target_lengths[i]), random))
        return source, target

    def _row(self, side: int, i: int, bound: int, random: Iterator[float]) -> NDArray:
        for _ in range(TRIES):
            ids = self._bpe[side].ids(self._texts[side][i], random)
            if len(ids) <= bound:
                return np.array(ids, np.int32)
        return self._plain[side][i]

    def _bounds(self, lengths: NDArray, max_length: int) -> NDArray:
        bounds = np.ceil(lengths * (1 + 4 * self._dropout)).astype(np.int32) + 4
        return np.maximum(lengths, np.minimum(bounds, max_length))


def _numbers(*seeds: int) -> Iterator[float]:
    """Yield random numbers in [0, 1) forever, from `legacy_random`."""
    random = legacy_random(*seeds)
    while True:
        yield from random.random_sample(DRAWN).tolist()


Learn = Callable[[Iterator[str], int], Tokenizer]
"""(lines, vocabulary size) -> a trained tokenizer, e.g. `Tokenizer.train`."""
LARGE = 64 << 20
"""Most bytes of text to hold in memory. Larger text stays on disk, with its token ids in a cache."""


@dataclass(frozen=True)
class TrainingText:
    """The training pairs of one or more corpora, one corpus after another.

    sizes: pairs of each corpus. weights: shares of the corpora in an epoch; None: each pair once.
    """

    text: ParallelText | StoredText
    sizes: Sequence[int]
    weights: Sequence[float] | None = None
    bpe_dropout: float = 0.0
    seed: int = 1

    def __len__(self) -> int:
        return len(self.text)

    @property
    def digests(self) -> dict[str, str]:
        return self.text.digests

    def lines(self, sides: Sequence[int], count: int | None = None) -> Iterator[str]:
        """Yield lines of the sides, e.g. [0, 1] for source and target, from all pairs or from `count` random pairs."""
        if count is not None:
            return (pair[side] for pair in self.some_pairs(count) for side in sides)
        return (line for part in self.text.parts() for side in sides for line in part[side])

    def some_pairs(self, count: int) -> Iterator[tuple[str, str]]:
        """Yield `count` random pairs, in the order of the text."""
        chosen = np.zeros(len(self), dtype=bool)
        random = legacy_random(self.seed, 2)
        chosen[random.permutation(len(self))[:count]] = True
        begin = 0
        for source, target in self.text.parts():
            for i in np.flatnonzero(chosen[begin : begin + len(source)]).tolist():
                yield source[i], target[i]
            begin += len(source)

    def tokenizer(
        self, vocab_size: int, count: int | None, separate: bool = False, learn: Learn = Tokenizer.train
    ) -> Tokenizer:
        """Train a joint vocabulary, or `separate` vocabularies, on all pairs or on `count` random pairs.

        For text on disk the result is cached.
        """

        def learned() -> Tokenizer:
            if separate:
                return Tokenizer.pair(*(learn(self.lines([side], count), vocab_size) for side in (0, 1)))
            return learn(self.lines([0, 1], count), vocab_size)

        if isinstance(self.text, ParallelText):
            return learned()
        depends_on = {"vocabulary": self.text.identity, "size": vocab_size, "lines": count and [count, self.seed]}
        depends_on |= {"separate": True} if separate else {}
        depends_on |= {} if learn == Tokenizer.train else {"learned by": learn.__name__}
        return Tokenizer(self.text.cache.fact(depends_on, lambda: learned().to_json()), "tokenizer of the cache")

    def examples(self, tokenizer: Tokenizer, max_length: int) -> Examples:
        """Encode the pairs as examples, from which batches are cut."""
        if isinstance(self.text, StoredText):
            pairs: Examples = self.text.pairs(tokenizer)
        elif self.bpe_dropout:
            text = self.text
            pairs = DroppedPairs(text.source, text.target, tokenizer, self.bpe_dropout, max_length, self.seed)
        else:
            pairs = Pairs(encoded(tokenizer.source, self.text.source), encoded(tokenizer, self.text.target))
        return pairs if self.weights is None else Mixture(pairs, self.sizes, self.weights, max_length, self.seed)


def load_training(
    corpora: Sequence[PairFiles],
    weights: Sequence[float] | None,
    *,
    seed: int,
    set_aside: bool,
    bpe_dropout: float = 0.0,
    cache: Path | None = None,
) -> tuple[TrainingText, ParallelText | None, int]:
    """Load (training text, pairs set aside for validation or None, number of pairs left out since a side is empty).

    The text stays on disk if `cache` is given or it has more than `LARGE` bytes. With BPE dropout it is always in
    memory, since it is tokenized anew in every epoch.
    """
    corpora = list(corpora)
    sizes = [corpus.size() for corpus in corpora]
    if not bpe_dropout and (cache is not None or sum(sizes) > LARGE):
        stored = StoredText(corpora, TokenCache(cache or default_folder()), seed, set_aside)
        train = TrainingText(stored, _split(stored.for_training, stored.counts), weights, 0.0, seed)
        return train, stored.valid, stored.dropped
    for corpus, size in zip(corpora, sizes, strict=True):
        check_memory(4 * size, f"{corpus.name}: its text", "give less, or leave out {bpe_dropout}")
    text, counts, dropped = _in_memory(corpora)
    trained = training_mask(len(text), seed, corpora[0].name) if set_aside else np.ones(len(text), dtype=bool)
    valid = text.select(np.flatnonzero(~trained).tolist()) if set_aside else None
    train = text.select(np.flatnonzero(trained).tolist()) if set_aside else text
    return TrainingText(train, _split(trained, counts), weights, bpe_dropout, seed), valid, dropped


def read_pairs(corpus: PairFiles) -> ParallelText:
    """Read all pairs for validation, also empty pairs. Raises UserError as `PairFiles.parts` and `read_parallel`."""
    if corpus.is_plain:
        return read_parallel(str(corpus.source), str(corpus.target))
    source: list[str] = []
    target: list[str] = []
    for sources, targets in corpus.parts():
        source += [corpus.tag + line for line in sources]
        target += targets
    return ParallelText(source, target)


def _in_memory(corpora: list[PairFiles]) -> tuple[ParallelText, list[int], int]:
    """Read (usable pairs, their number in each corpus, number of other pairs)."""
    if len(corpora) == 1 and corpora[0].is_plain:
        text, dropped = read_pairs(corpora[0]).without_empty()
        return text, [len(text)], dropped
    source: list[str] = []
    target: list[str] = []
    ends, dropped = [0], 0
    for corpus in corpora:
        for sources, targets, others in corpus.usable_parts():
            source += sources
            target += targets
            dropped += others
        ends.append(len(source))
    return ParallelText(source, target), np.diff(ends).tolist(), dropped


def _split(trained: np.ndarray, counts: list[int]) -> list[int]:
    """Count the training pairs of each corpus."""
    return [int(part.sum()) for part in np.split(trained, np.cumsum(counts)[:-1])]
