"""Training text that stays on disk: only its token ids are ever read again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.progress import quiet_progress

from .corpus import ParallelText, training_mask
from .examples import Pairs
from .pair_files import PairFiles
from .token_cache import TokenCache


class StoredText:
    """The usable pairs of some corpora, one after another, less those that are set aside for validation.

    `digests`, `valid` and `dropped` are the same as for text in memory. The cache keeps all that is read from the
    files: the next run with the same files and seed reads nothing.
    """

    def __init__(self, corpora: list[PairFiles], cache: TokenCache, seed: int, set_aside: bool):
        self.corpora, self.cache, self._set_aside, self._seed = corpora, cache, set_aside, seed
        for corpus in corpora:
            corpus.check_beginning()
        self._identity = [cache.identity(corpus) for corpus in corpora]
        counts = cache.fact({"count": self._identity}, self._count)
        self.counts: list[int] = [usable for usable, _ in counts]
        self.dropped = sum(dropped for _, dropped in counts)
        count = sum(self.counts)
        self.for_training = training_mask(count, seed, corpora[0].name) if set_aside else np.ones(count, dtype=bool)
        """The usable pairs that are for training, as (n,) bool."""
        facts = cache.fact({"text": self._identity, "seed": seed, "set_aside": set_aside}, self._facts)
        self.digests: dict[str, str] = facts["digests"]
        self.valid = ParallelText(**facts["valid"]) if set_aside else None

    @property
    def identity(self) -> list:
        """A value that is equal exactly where the texts are."""
        return [self._identity, self._seed if self._set_aside else None]

    def __len__(self) -> int:
        return int(self.for_training.sum())

    def parts(self) -> Iterator[tuple[list[str], list[str]]]:
        """Read sources and targets, some at a time."""
        for source, target, usable in self._usable():
            if usable.all():
                yield source, target
            else:
                indices = np.flatnonzero(usable).tolist()
                yield [source[i] for i in indices], [target[i] for i in indices]

    def pairs(self, tokenizer: Tokenizer) -> Pairs:
        """Return the pairs as ids, which are made once and kept in the cache."""
        source, target = self.cache.tokens(self.corpora, tokenizer, self.counts)
        if not self._set_aside:
            return Pairs(source, target)
        return Pairs(source.select(self.for_training), target.select(self.for_training))

    def _usable(self) -> Iterator[tuple[list[str], list[str], NDArray]]:
        begin = 0
        with quiet_progress("text") as report:
            for corpus in self.corpora:
                for source, target, _ in corpus.usable_parts():
                    end = begin + len(source)
                    yield source, target, self.for_training[begin:end]
                    begin = end
                    report(begin / max(1, len(self.for_training)), f"{begin:,} pairs")

    def _count(self) -> list[tuple[int, int]]:
        """Count the usable and the other pairs of each corpus."""
        counts, read = [], 0
        with quiet_progress("text") as report:
            for corpus in self.corpora:
                usable = dropped = 0
                for source, _, others in corpus.usable_parts():
                    usable, dropped = usable + len(source), dropped + others
                    read += len(source)
                    report(0.0, f"{read:,} pairs")
                counts.append((usable, dropped))
        return counts

    def _facts(self) -> dict:
        """Return the digests of the training text, as `ParallelText` has them, and the pairs that are set aside."""
        (corpus, *others), files = self.corpora, self._identity[0][0]
        if not others and corpus.is_plain and not self.dropped and not self._set_aside:
            return {"digests": dict(zip(("source", "target"), files, strict=True))}
        sides = {"source": hashlib.sha256(), "target": hashlib.sha256()}
        valid: dict[str, list[str]] = {"source": [], "target": []}
        for source, target, usable in self._usable():
            for side, lines in (("source", source), ("target", target)):
                text = "".join([f"{line}\n" for line, keep in zip(lines, usable, strict=True) if keep])
                sides[side].update(text.encode(errors="surrogatepass"))
                valid[side] += [lines[i] for i in np.flatnonzero(~usable).tolist()]
        return {"digests": {side: digest.hexdigest() for side, digest in sides.items()}, "valid": valid}
