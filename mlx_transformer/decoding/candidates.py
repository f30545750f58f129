"""A search that chooses among given ids alone, each sentence among its own: the candidates that a shortlist names.

The ids of a batch's sentences together are a small vocabulary. A model computes their logits alone, what searches sees
no others, and what it finds is numbered back at the end; a mask tells a sentence's own from its neighbours', so that no
sentence depends on those computed with it.

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
    """Return the ids that each of `rows` outputs may be made of; an empty list leaves the end alone."""
    candidates = listed(candidates, "candidates")
    if not (config.has_encoder and config.has_decoder):
        raise UserError(f"candidates: a {config.architecture} alone has no shortlist; leave them out")
    if len(candidates) != rows:
        raise UserError(f"candidates has {len(candidates)} rows for {rows} inputs: give one list for each")
    return check_ids(candidates, config.vocab_size, "candidates", empty=True)


@dataclass(frozen=True)
class Candidates:
    """The ids that a batch's outputs are made of, as a vocabulary of its own."""

    ids: NDArray[np.int64]
    """(C,) the ids of all sentences, ascending; among them what any output may need: pad, start, ends, forced ones."""
    unlisted: NDArray[np.float32] | None
    """(B, C) added to the logits: `BANNED` on what isn't the sentence's own; None: each may have all of them."""
    config: TransformerConfig
    """The model's, of C ids."""

    @classmethod
    def of(cls, batch: Batch, options: Options, config: TransformerConfig) -> Candidates:
        """Return those of a batch that has some. Where tokens are drawn they are all ids: on their places hangs the
        noise."""
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
        """Return those of ids (C,), ascending, pad, start and end among them, for a model of this config."""
        pad, bos, eos = np.searchsorted(ids, [config.pad_id, config.bos_id, config.eos_id]).tolist()
        size = len(ids)
        own_config = _changed(config, vocab_size=size, source_vocab_size=size, pad_id=pad, bos_id=bos, eos_id=eos)
        return cls(ids, unlisted, own_config)

    def places(self, ids: int | Sequence[int] | NDArray) -> NDArray[np.int64]:
        """Return where ids that are among them are."""
        return np.searchsorted(self.ids, np.asarray(ids, np.int64))

    def narrowed(self, batch: Batch, options: Options) -> tuple[Batch, Options]:
        """Return the batch and the options in terms of their places."""
        fields_set = {name: ids for name in ID_FIELDS if (ids := getattr(options, name))}
        if fields_set or options.banned_sequences:
            known = {*self.ids.tolist()}
            fields = {name: [id for id in ids if id in known] for name, ids in fields_set.items()}
            narrowed = {name: tuple(self.places(ids).tolist()) for name, ids in fields.items()}
            sequences = (ids for ids in options.banned_sequences if known.issuperset(ids))  # others can't be written
            banned = tuple(tuple(self.places(ids).tolist()) for ids in sequences)
            options = _changed(options, **narrowed, banned_sequences=banned)
        if options.start_id is not None:
            options = _changed(options, start_id=int(self.places(options.start_id)))
        prefix = [self.places(row) if len(row) else row for row in batch.prefix]
        return _changed(batch, prefix=prefix, candidates=None), options

    def restored(self, hypotheses: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return hypotheses of places as ones of ids."""
        return [[replace(h, ids=self.ids[h.ids].tolist() if h.ids else []) for h in best] for best in hypotheses]


def _ascending(size: int, *ids: Sequence[int] | NDArray) -> NDArray[np.int64]:
    """Return those of `size` ids that are among these, each once. To mark them takes a tenth of the time of sorting
    them."""
    marks = np.zeros(size, bool)
    for some in ids:
        marks[some] = True
    return np.flatnonzero(marks)


T = TypeVar("T", TransformerConfig, Options, Batch)


def _changed(checked: T, **fields: Any) -> T:
    """With other fields, of which it is known that they are right: to check them all anew takes as long as a step."""
    changed = copy(checked)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def among(model: Model, candidates: Candidates) -> Model:
    """Return the model with the vocabulary of a batch: by a way of its own, or by columns of all its logits."""
    own = model.among(candidates)
    return Among(model, candidates, columns=True) if own is None else own


class Among(Model):
    """`steps.Model` with the vocabulary of a batch."""

    def __init__(self, model: Model, candidates: Candidates, columns: bool):
        """columns: the model gives the logits of all ids, of which those of the candidates are taken."""
        self.model, self.candidates, self.columns = model, candidates, columns
        self.config, self.arrays, self.extends_positions = candidates.config, model.arrays, model.extends_positions

    def start(self, sources: Sources) -> tuple[Decoder, Array]:
        decoder, logits = self.model.start(sources)
        narrowed = AmongDecoder(self.arrays, decoder, self.candidates, self.columns)
        return narrowed, narrowed.of(logits)


class AmongDecoder(Decoder):
    """`steps.Decoder` with the vocabulary of a batch."""

    def __init__(self, xp: Arrays, decoder: Decoder, candidates: Candidates, columns: bool):
        self.xp, self.decoder, self.columns = xp, decoder, columns
        self.ids = xp.asarray(candidates.ids.astype(np.int32))
        self.unlisted = None if candidates.unlisted is None else xp.asarray(candidates.unlisted)

    def of(self, logits: Array) -> Array:
        """Return the candidates' logits (R, C)."""
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
