"""Search with candidate ids: each output contains only ids from its sentence's list, e.g. a shortlist's.

The candidates of all sentences in a batch form a small vocabulary of C ids. The model computes logits of these ids
only, the search runs on their places 0 to C - 1, and its results are converted back to ids. A mask bans the candidates
of other sentences, so that an output doesn't depend on its batch.

Shapes: B sentences, R rows (hypotheses), V vocabulary, C candidates of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Ids, Sources, check_ids, listed
from mlx_transformer.system.errors import UserError

from .arrays import Array, Arrays
from .options import ID_FIELDS, Hypothesis, Options
from .steps import BANNED, Batch, Decoder, Model


def check_candidates(candidates: Ids, rows: int, config: TransformerConfig) -> list[NDArray[np.int64]]:
    """Check the candidate ids of each of `rows` outputs, and return them as arrays. [] leaves only the end token.

    Raises `UserError` unless the model is an encoder-decoder, and for ids outside the vocabulary.
    """
    candidates = listed(candidates, "candidates")
    if not (config.has_encoder and config.has_decoder):
        raise UserError("candidates: only an encoder-decoder model takes them; leave them out")
    if len(candidates) != rows:
        raise UserError(f"candidates has {len(candidates)} rows for {rows} inputs: give one list for each")
    return check_ids(candidates, config.vocab_size, "candidates", empty=True)


@dataclass(frozen=True)
class Candidates:
    """The candidate ids of a batch, as a vocabulary of C ids."""

    ids: NDArray[np.int64]
    """(C,), ascending: the candidates of all sentences, and pad, start, end and forced tokens."""
    unlisted: NDArray[np.float32] | None
    """(B, C), added to the logits: `BANNED` on ids the sentence doesn't list, else 0; None: each sentence lists all."""
    config: TransformerConfig
    """The model's config with a vocabulary of C ids."""

    @classmethod
    def of(cls, batch: Batch, options: Options, config: TransformerConfig) -> Candidates:
        """The candidates of a batch with lists. For sampling, `ids` is the whole vocabulary, as the random noise
        depends on a token's place in it."""
        assert batch.candidates is not None
        always = [config.pad_id, batch.sources.start, config.bos_id, *options.ends(config), *options.forced_first]
        every = config.vocab_size
        pairs = zip(batch.candidates, batch.prefix, strict=True)
        own = [_ascending(every, row, always, forced) for row, forced in pairs]
        ids = np.arange(every) if options.sample else own[0] if len(own) == 1 else _ascending(every, *own)
        unlisted = None
        if any(len(row) < len(ids) for row in own):
            unlisted = np.full((len(own), len(ids)), BANNED, np.float32)
            for row, listed_here in zip(unlisted, own, strict=True):
                row[np.searchsorted(ids, listed_here)] = 0
        return cls.whole(ids, unlisted, config)

    @classmethod
    def whole(
        cls, ids: NDArray[np.int64], unlisted: NDArray[np.float32] | None, config: TransformerConfig
    ) -> Candidates:
        """Candidates from ids (C,), ascending, which include pad, start and end. config: the model's."""
        pad, bos, eos = np.searchsorted(ids, [config.pad_id, config.bos_id, config.eos_id]).tolist()
        size = len(ids)
        own_config = _changed(config, vocab_size=size, source_vocab_size=size, pad_id=pad, bos_id=bos, eos_id=eos)
        return cls(ids, unlisted, own_config)

    def places(self, ids: int | Sequence[int] | NDArray) -> NDArray[np.int64]:
        """Places of these ids in `self.ids`, which must contain them."""
        return np.searchsorted(self.ids, np.asarray(ids, np.int64))

    def narrowed(self, batch: Batch, options: Options) -> tuple[Batch, Options]:
        """The batch and the options with places instead of ids."""
        fields_set = {name: ids for name in ID_FIELDS if (ids := getattr(options, name))}
        if fields_set or options.banned_sequences:
            known = {*self.ids.tolist()}
            fields = {name: [id for id in ids if id in known] for name, ids in fields_set.items()}
            narrowed = {name: tuple(self.places(ids).tolist()) for name, ids in fields.items()}
            sequences = (ids for ids in options.banned_sequences if known.issuperset(ids))  # others can't occur
            banned = tuple(tuple(self.places(ids).tolist()) for ids in sequences)
            options = _changed(options, **narrowed, banned_sequences=banned)
        if options.start_id is not None:
            options = _changed(options, start_id=int(self.places(options.start_id)))
        prefix = [self.places(row) if len(row) else row for row in batch.prefix]
        return _changed(batch, prefix=prefix, candidates=None), options

    def restored(self, hypotheses: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Hypotheses with ids instead of places."""
        return [[replace(h, ids=self.ids[h.ids].tolist() if h.ids else []) for h in best] for best in hypotheses]


def _ascending(size: int, *ids: Sequence[int] | NDArray) -> NDArray[np.int64]:
    """The sorted union of lists of ids below `size`. A table of marks takes a tenth of the time of sorting."""
    marks = np.zeros(size, bool)
    for some in ids:
        marks[some] = True
    return np.flatnonzero(marks)


T = TypeVar("T", TransformerConfig, Options, Batch)


def _changed(checked: T, **fields: Any) -> T:
    """`dataclasses.replace` without the checks, for valid values: the checks take as long as a decoding step."""
    changed = copy(checked)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def among(model: Model, candidates: Candidates) -> Model:
    """Restrict a model to the candidates, by its own `among` or by selecting columns of its logits."""
    own = model.among(candidates)
    return Among(model, candidates, columns=True) if own is None else own


class Among(Model):
    """A `steps.Model` whose vocabulary is the candidates of a batch."""

    def __init__(self, model: Model, candidates: Candidates, columns: bool):
        """columns: the model computes logits of the whole vocabulary, and the candidates' columns are selected."""
        self.model, self.candidates, self.columns = model, candidates, columns
        self.config, self.arrays, self.extends_positions = candidates.config, model.arrays, model.extends_positions

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        decoder, logits = self.model.start(sources)
        narrowed = AmongDecoder(self.arrays, decoder, self.candidates, self.columns)
        return narrowed, narrowed.of(logits)


class AmongDecoder(Decoder):
    """A `steps.Decoder` whose vocabulary is the candidates of a batch."""

    def __init__(self, xp: Arrays, decoder: Decoder, candidates: Candidates, columns: bool):
        self.xp, self.decoder, self.columns = xp, decoder, columns
        self.ids = xp.asarray(candidates.ids.astype(np.int32))
        self.unlisted = None if candidates.unlisted is None else xp.asarray(candidates.unlisted)

    def of(self, logits: Array) -> Array:
        """Logits (R, C) of the candidates, from the model's logits (R, V) or (R, C)."""
        if self.columns:
            logits = self.xp.take(logits, self.ids, axis=1)
        return logits if self.unlisted is None else logits + self.unlisted

    def step(self, ids: Array) -> Array:
        return self.of(self.decoder.step(self.xp.take(self.ids, ids, axis=0)))

    def repeat(self, times: int) -> None:
        self.decoder.repeat(times)
        if self.unlisted is not None:
            rows = np.repeat(np.arange(len(self.unlisted), dtype=np.int32), times)
            self.unlisted = self.xp.take(self.unlisted, self.xp.asarray(rows), axis=0)

    def reorder(self, rows: Array) -> None:
        self.decoder.reorder(rows)

    def keep(self, rows: Array) -> None:
        self.decoder.keep(rows)
        if self.unlisted is not None:
            self.unlisted = self.xp.take(self.unlisted, rows, axis=0)
