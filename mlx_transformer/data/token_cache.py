"""A cache of what large files hold: their digests, their tokens, a vocabulary.

FOLDER/digests/*.json     SHA-256 of a file, with the size, time and number by which it is known to be the same
FOLDER/facts/*.json       a value, under the digest of all that it depends on
FOLDER/tokens-*/          the token ids of a corpus: for each side .ids (uint16; int32 if the vocabulary is larger) and
                          .lengths (int32, one a pair); meta.json

All appear whole or not at all, and a file that isn't whole any more is made anew. Nothing but time is lost with the
folder.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.durable import Output, replace_folder, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import SETTLED, sha256
from mlx_transformer.system.progress import quiet_progress

from .pair_files import PairFiles
from .ragged import PART, Ragged, ragged, ragged_files

VERSION = 1  # of the files' contents; another one begins anew
SIDES = ("source", "target")
WIDE = 1 << 16  # tokens of a vocabulary whose ids need more than 16 bits

T = TypeVar("T")


class TokenCache:
    def __init__(self, folder: Path):
        self.folder = folder

    def digest(self, file: Path) -> str:
        """Return the SHA-256 of a file, read again only if it has changed since. `UserError` if it can't be read."""
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        known = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        path = self.folder / "digests" / f"{_key(known[0])}.json"
        if entry := _stored_entry(path, known):
            return str(entry["value"])
        digest = sha256(file)
        # A file that was just written may change without another time of its last change.
        if time.time_ns() - status.st_mtime_ns > SETTLED and file.stat().st_mtime_ns == status.st_mtime_ns:
            _keep(path, known, digest)
        return digest

    def identity(self, corpus: PairFiles) -> list[Any]:
        """Return a value for `fact` that is equal exactly where the usable pairs of two corpora are."""
        return [[self.digest(file) for file in corpus.files], corpus.pairs is None, corpus.columns, corpus.tag]

    def fact(self, depends_on: dict[str, Any], make: Callable[[], T]) -> T:
        """Return the JSON value that `make` returns; it is made once for all that it depends on."""
        key = json.loads(json.dumps([VERSION, depends_on]))
        path = self.folder / "facts" / f"{_key(key)}.json"
        if entry := _stored_entry(path, key):
            return entry["value"]
        value = make()
        _keep(path, key, value)
        return value

    def tokens(self, corpora: list[PairFiles], tokenizer: Tokenizer, counts: list[int]) -> list[Ragged]:
        """Return source and target ids of the usable pairs of all corpora, one after another; `counts` are their
        numbers of pairs."""
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
            raise UserError(f"{folder}: what was just written there isn't whole; look for what else writes there")
        return folder, lengths


def encoded(tokenizer: Tokenizer, texts: list[str]) -> Ragged:
    """Encode texts in memory, of which only a part is ever a list."""
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
    """Read the lengths of both sides; None if they aren't there, or not whole."""
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
