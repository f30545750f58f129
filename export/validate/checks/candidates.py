"""Searches among given ids: which, by a shortlist or by lot, and the logits of graphs that compute no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from export.validate.cases import Case
from export.validate.engines.protocol import Engine
from export.validate.findings import AMONG
from export.validate.judging import Sample
from export.validate.rule import Deviation, Truth
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.shortlist import open_shortlist, shares_ids
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.generation.settings import NO_SHORTLIST, SHORTLIST, read_settings

from .free_running import CandidatesOf, attempt, half_of


def candidates_of(file: str | Path | None, checkpoint: Checkpoint) -> CandidatesOf | None:
    """Open the shortlist that searches are compared with, by default the model's own; None: there is none."""
    c = checkpoint.config
    own = read_settings(checkpoint.folder, c).get(SHORTLIST)
    if file is None and own is not None:
        file = checkpoint.folder / own
    if file is None or str(file) == NO_SHORTLIST:
        return None
    path = checkpoint.tokenizer_path
    separate = path is not None and Tokenizer.load(path).separate
    shortlist, shared = open_shortlist(file, c), shares_ids(c, separate)
    return lambda source: shortlist.candidates(source, c.vocab_size, shared).tolist()


def logits_among(engine: Engine, case: Case, truth: Truth) -> Iterator[Sample]:
    """Yield the logits of half of all tokens, where an engine has graphs for them. truth: all logits."""
    if not engine.capabilities.among or engine.capabilities.shows != "everything" or case.target_ids is None:
        return
    c = engine.config
    own = [c.pad_id, c.bos_id, c.eos_id, *case.target_ids.reshape(-1)]
    ids = np.unique([*half_of(c, case.target_ids[0].tolist()), *own])
    if len(ids) == c.vocab_size:  # a search among all of them takes the graphs that know no others
        return
    got, why = attempt(lambda: engine.logits_among(case, ids))
    of_ids = replace(truth, t64=truth.t64[..., ids], bits=None)
    yield Sample(engine, AMONG, "logits", case, Deviation.of(got, of_ids, why), truth.scale)
