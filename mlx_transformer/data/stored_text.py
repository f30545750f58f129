"""Training text that stays on disk (`StoredText`), and the cache of its token ids, digests and vocabulary.

FOLDER/digests/*.json     a file's SHA-256, with the size, time and inode that show whether it has changed
FOLDER/facts/*.json       a value, named by the digest of everything that it depends on, e.g. a vocabulary
FOLDER/tokens-*/          the token ids of a corpus: for each side .ids (uint16; int32 for a large vocabulary) and
                          .lengths (int32, one per pair); meta.json

Files are written atomically, and damaged files are made anew. The folder can be deleted at any time; that costs only
time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.durable import Output, replace_folder, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import SETTLED, sha256
from mlx_transformer.system.progress import quiet_progress
from mlx_transformer.text.tokenizer import Tokenizer

from .corpus import PairFiles, ParallelText, training_mask
from .ragged import PART, Pairs, Ragged, ragged, ragged_files

VERSION = 1  # of the cache's format; entries of other versions are ignored
SIDES = ("source", "target")
WIDE = 1 << 16  # ids of a larger vocabulary need more than 16 bits

T = TypeVar("T")


class TokenCache:
    def __init__(self, folder: Path):
        self.folder = folder

    def digest(self, file: Path) -> str:
        """A file's SHA-256; the file is only read again if it has changed. Raises UserError if it can't be read."""
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        known = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        path = self.folder / "digests" / f"{_key(known[0])}.json"
        if entry := _stored_entry(path, known):
            return str(entry["value"])
        digest = sha256(file)
        # A file that was just written could change again without getting another modification time.
        if time.time_ns() - status.st_mtime_ns > SETTLED and file.stat().st_mtime_ns == status.st_mtime_ns:
            _keep(path, known, digest)
        return digest

    def identity(self, corpus: PairFiles) -> list[Any]:
        """A JSON value for `fact`, equal for two corpora if they have the same files, columns and tag."""
        return [[self.digest(file) for file in corpus.files], corpus.pairs is None, corpus.columns, corpus.tag]

    def fact(self, depends_on: dict[str, Any], make: Callable[[], T]) -> T:
        """Return the JSON value of `make()`; it is computed once for each value of `depends_on`."""
        key = json.loads(json.dumps([VERSION, depends_on]))
        path = self.folder / "facts" / f"{_key(key)}.json"
        if entry := _stored_entry(path, key):
            return entry["value"]
        value = make()
        _keep(path, key, value)
        return value

    def tokens(self, corpora: list[PairFiles], tokenizer: Tokenizer, counts: list[int]) -> list[Ragged]:
        """Return [source ids, target ids] of the usable pairs of all corpora, one corpus after another.

        counts: usable pairs of each corpus, for the progress bar.
        """
        largest = max(tokenizer.source.vocab_size, tokenizer.vocab_size)
        dtype = np.dtype(np.uint16 if largest <= WIDE else np.int32)
        folders = [self._tokens(*each, tokenizer, dtype) for each in zip(corpora, counts, strict=True)]
        by_side = ([(folder / f"{side}.ids", lengths[side]) for folder, lengths in folders] for side in SIDES)
        return [ragged_files(files, dtype) for files in by_side]

    def _tokens(
        self, corpus: PairFiles, count: int, tokenizer: Tokenizer, dtype: np.dtype
    ) -> tuple[Path, dict[str, NDArray]]:
        key = _key([VERSION, self.identity(corpus), tokenizer.fingerprint])
        folder = self.folder / f"tokens-{key[:32]}"
        lengths = _lengths(folder, dtype)
        if lengths is None:
            with replace_folder(Output.any(folder, "token cache")) as temporary:
                _write(temporary, corpus, count, tokenizer, dtype)
            lengths = _lengths(folder, dtype)
        if lengths is None:
            raise UserError(f"{folder}: files just written there are damaged; another program may be writing there")
        return folder, lengths


def encoded(tokenizer: Tokenizer, texts: list[str]) -> Ragged:
    """Encode texts, a part at a time, and keep the ids in memory."""
    parts = (tokenizer.encode_batch(texts[i : i + PART]) for i in range(0, len(texts), PART))
    return ragged(ids for part in parts for ids in part)


def _write(folder: Path, corpus: PairFiles, count: int, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    files = {(side, what): (folder / f"{side}.{what}").open("wb") for side in SIDES for what in ("ids", "lengths")}
    done, tokens, tokenizers = 0, dict.fromkeys(SIDES, 0), (tokenizer.source, tokenizer)
    with quiet_progress("tokens") as report:
        for part in corpus.usable_parts():
            for side, texts, its in zip(SIDES, part[:2], tokenizers, strict=True):
                sequences = ragged(its.encode_batch(texts))
                total = int(sequences.lengths.sum(dtype=np.int64))
                files[side, "lengths"].write(sequences.lengths.tobytes())
                files[side, "ids"].write(sequences.read(0, total).astype(dtype).tobytes())
                tokens[side] += total
            done += len(part[0])
            report(min(1.0, done / max(1, count)), f"{done:,} pairs")
    for file in files.values():
        file.close()
    meta = {"pairs": done, "tokens": tokens, "type": dtype.name, "text": corpus.name}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _lengths(folder: Path, dtype: np.dtype) -> dict[str, NDArray] | None:
    """Read {side: lengths (N,)} of a cached corpus; None if files are missing or damaged."""
    try:
        meta = read_json(folder / "meta.json")
        lengths = {side: np.fromfile(folder / f"{side}.lengths", np.int32) for side in SIDES}
        for side, each in lengths.items():
            tokens, ids = int(each.sum(dtype=np.int64)), folder / f"{side}.ids"
            whole = len(each) == meta["pairs"] and tokens == meta["tokens"][side] and meta["type"] == dtype.name
            if not whole or (each < 0).any() or ids.stat().st_size != tokens * dtype.itemsize:
                return None
    except (UserError, OSError, LookupError, TypeError, ValueError):
        return None
    return lengths


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stored_entry(path: Path, key: Any) -> dict[str, Any] | None:
    with suppress(UserError):
        if path.exists() and isinstance(entry := read_json(path), dict) and "value" in entry:
            return entry if entry.get("key") == key else None
    return None


def _keep(path: Path, key: Any, value: Any) -> None:
    write_text(path, json.dumps({"key": key, "value": value}, ensure_ascii=False) + "\n")


class StoredText:
    """The usable pairs of several corpora, one corpus after another, without those set aside for validation.

    `digests`, `valid` and `dropped` are the same as for text in memory. All results are cached, so the next run with
    the same files and seed doesn't read the text.
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
        """Which usable pairs are for training: (n,) bool."""
        facts = cache.fact({"text": self._identity, "seed": seed, "set_aside": set_aside}, self._facts)
        self.digests: dict[str, str] = facts["digests"]
        self.valid = ParallelText(**facts["valid"]) if set_aside else None

    @property
    def identity(self) -> list:
        """A JSON value, equal for equal texts."""
        return [self._identity, self._seed if self._set_aside else None]

    def __len__(self) -> int:
        return int(self.for_training.sum())

    def parts(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield (sources, targets) for training in blocks."""
        for source, target, usable in self._usable():
            if usable.all():
                yield source, target
            else:
                indices = np.flatnonzero(usable).tolist()
                yield [source[i] for i in indices], [target[i] for i in indices]

    def pairs(self, tokenizer: Tokenizer) -> Pairs:
        """The pairs as token ids; they are encoded once and cached."""
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
        """(usable pairs, pairs with an empty side) of each corpus."""
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
        """The digests of the training text, as in `ParallelText`, and the pairs set aside for validation."""
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
