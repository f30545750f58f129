"""The rules of a search, i.e. which tokens may come next in a sentence, in plain lists.

Written from the options' help (`decoding/options.py`), not from `decoding/steps.py`, so that a mistake there shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError

Array = NDArray

MORE = 50
"""Without a limit in the options, the most new tokens are the source's length plus this (Vaswani et al. 2017, 6.1)."""
KNOWN = {
    "beam", "length_penalty", "penalty_form", "max_new_tokens", "min_new_tokens", "early_stopping", "heuristic_stop",
    "sample", "seed", "repetition_penalty", "no_repeat_ngram", "forced_first", "forced_end", "suppressed", "end_ids",
    "suppressed_first", "banned_sequences", "max_length_factor", "start_id", "n_best",
}  # fmt: skip
"""The fields of `Options` known to this search; `batch_tokens` and `speculate` don't change results."""


def check_known(options: Options) -> None:
    """Raise UserError for an option the reference search doesn't know."""
    default = Options()
    changed = {f.name for f in dataclasses.fields(Options) if getattr(options, f.name) != getattr(default, f.name)}
    if unknown := sorted(changed - KNOWN - {"batch_tokens", "speculate"}):
        raise UserError(f"the reference search has no {', '.join(unknown)}")


def limit(c: TransformerConfig, o: Options, length: int) -> int:
    """Return the most tokens of an output for a source or prompt of this length."""
    if o.max_new_tokens is not None:
        return o.max_new_tokens
    usual = math.ceil(np.float32(length) * np.float32(o.max_length_factor)) if o.max_length_factor else length + MORE
    room = c.max_positions if c.has_encoder else c.max_positions - length + 1
    return max(min(usual, room), o.min_new_tokens)


def among(logits: Array, candidates: Sequence[int] | None, c: TransformerConfig, o: Options) -> Array:
    """Set logits (..., V) to minus infinity except for a sentence's candidates; None allows all tokens.

    Always allowed are tokens any output may need: padding, start, end and forced tokens.
    """
    if candidates is None:
        return logits
    allowed_only = np.full_like(logits, -np.inf)
    start = {c.bos_id if o.start_id is None else o.start_id}
    chosen = [*{*candidates, c.pad_id, c.bos_id, *start, *ends(c, o), *o.forced_first}]
    allowed_only[..., chosen] = logits[..., chosen]
    return allowed_only


def ends(c: TransformerConfig, o: Options) -> list[int]:
    return [c.eos_id, *o.end_ids]


def without_end(tokens: Sequence[int], c: TransformerConfig, o: Options) -> list[int]:
    """Remove an output's end token, if there is any."""
    return list(tokens[:-1] if tokens and tokens[-1] in ends(c, o) else tokens)


def forced(step: int, limit: int, c: TransformerConfig, o: Options) -> int | None:
    """Return the forced token at `step`, or None for a free choice. A forced token's log-probability counts as 0."""
    if step < len(o.forced_first):
        return o.forced_first[step]
    return c.eos_id if o.forced_end and step == limit - 1 else None


def penalised(scores: Array, before: Sequence[int], o: Options, written: Sequence[int] = ()) -> Array:
    """Apply the repetition penalty to the scores (V,) of all tokens in `before`, and those of presence and frequency to
    all tokens written behind the start or the prompt."""
    scores, known = scores.copy(), [*{*before}]
    was = scores[known]
    scores[known] = np.where(was < 0, was * o.repetition_penalty, was / o.repetition_penalty)
    for token in {*written}:
        scores[token] -= o.presence_penalty + o.frequency_penalty * [*written].count(token)
    return scores


def allowed(scores: Array, before: Sequence[int], step: int, c: TransformerConfig, o: Options) -> Array:
    """Set scores (V,) to minus infinity for tokens not allowed at `step`.

    before: the decoder's tokens so far, from the start token or the prompt on.
    """
    never = {c.pad_id, c.bos_id} - {c.eos_id} | {*o.suppressed}  # BART's start token is its end token
    if step < o.min_new_tokens:
        never |= {*ends(c, o)}
    if n := o.no_repeat_ngram:
        last = tuple(before[len(before) - n + 1 :])
        grams = [tuple(before[i : i + n]) for i in range(len(before) - n + 1)]
        never |= {gram[-1] for gram in grams if gram[:-1] == last}
    if step == len(o.forced_first):
        never |= {*o.suppressed_first}
    read = tuple(before)
    begun = [ids for ids in o.banned_sequences if ids[-2] == read[-1]]  # filter first: there may be very many sequences
    never |= {ids[-1] for ids in begun if read[-len(ids) + 1 :] == ids[:-1]}
    scores = scores.copy()
    scores[sorted(never)] = -np.inf
    return scores
