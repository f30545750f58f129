"""Load a run's parallel text, from one or several corpora; large text stays on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_transformer.system.files import default_folder
from mlx_transformer.system.machine import check_memory
from mlx_transformer.text.tokenizer import Tokenizer

from .bpe_dropout import DroppedPairs
from .corpus import PairFiles, ParallelText, read_parallel, training_mask
from .epochs import Mixture, legacy_random
from .ragged import Examples, Pairs
from .stored_text import StoredText, TokenCache, encoded

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
