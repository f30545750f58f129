"""Search with the float64 reference: token by token, drawn, and by beams.

The package's search written a third time: plain lists, one sentence after the other, only the network is run for all of
them at once.

Greedy search, limit n: at each step the likeliest token that is allowed (never pad, nor bos unless it is eos), until
eos or n tokens.
Sampling: with Gumbel noise (Gumbel 1954), a function of seed, step and row alone, the best block of BLOCK tokens by its
log-sum-exp, then the best token of it by its logit.
Beam search (Wu et al. 2016, section 7): score log p / lp(length), lp(n) = ((5 + n) / 6)^alpha, length counting eos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.sampling import BLOCK, noise

from . import Cache, Reference

Array = NDArray

ALPHA = 0.6


@dataclass
class Hypothesis:
    """Log-probability so far and tokens so far, eos included where it has come."""

    log_p: float
    tokens: tuple[int, ...]


@dataclass
class BeamState:
    """State of one sentence's beam search. `margin`: the closest decision taken so far, in log-probability."""

    live: list[Hypothesis]
    finished: list[tuple[float, Hypothesis]] = field(default_factory=list)
    margin: float = np.inf

    def decide(self, chosen: float, dropped: float) -> None:
        self.margin = min(self.margin, abs(chosen - dropped))


def beam_search(
    reference: Reference, sources: Sequence[list[int]], beam: int, limit: int, alpha: float = ALPHA
) -> list[BeamState]:
    """Search every sentence in float64; `finished` of each is best first, scores log p / lp(length)."""
    c = reference.config
    cache, logits = _start(reference, sources)
    sentences = [BeamState([Hypothesis(0.0, ())]) for _ in sources]
    for _ in range(limit):
        rows: list[int] = []
        offset = 0
        for sentence in sentences:
            width = len(sentence.live)
            rows += [offset + p for p in _advance(sentence, logits[offset : offset + width], beam, limit, alpha, c)]
            offset += width
        if not rows:
            break
        new, cache = reference.step([[h.tokens[-1]] for s in sentences for h in s.live], cache.select(rows))
        logits = new[:, -1]
    for sentence in sentences:
        for (first, _), (second, _) in zip(sentence.finished[:1], sentence.finished[1:2], strict=False):
            sentence.decide(first, second)
    return sentences


def _advance(s: BeamState, logits: Array, beam: int, limit: int, alpha: float, c: TransformerConfig) -> list[int]:
    """Advance one sentence by a step, from its live hypotheses' logits (K,V); return the parents of the new live
    ones."""
    if not s.live:
        return []
    length = len(s.live[0].tokens) + 1
    penalty = ((5 + length) / 6) ** alpha
    scores = allowed(_log_softmax(logits), c) + np.array([[h.log_p] for h in s.live])
    last = np.partition(scores, -min(3 * beam, scores.size), axis=None)[-min(3 * beam, scores.size)]
    best = np.flatnonzero(scores >= last)
    order = best[np.argsort(-scores.reshape(-1)[best], kind="stable")]  # ties: first hypothesis, lowest id
    candidates = []
    for parent, token in zip(*np.unravel_index(order, scores.shape), strict=True):
        if np.isfinite(scores[parent, token]):
            tokens = (*s.live[parent].tokens, int(token))
            candidates.append((int(parent), Hypothesis(float(scores[parent, token]), tokens)))

    def ends(hypothesis: Hypothesis) -> bool:
        return hypothesis.tokens[-1] == c.eos_id or length == limit

    # Those of the beam best candidates that end are finished; the beam best of all that go on are live.
    border = [h for _, h in candidates[beam - 1 : beam + 1]]
    if len(border) == 2 and any(map(ends, border)):
        s.decide(border[0].log_p, border[1].log_p)
    s.finished += [(h.log_p / penalty, h) for _, h in candidates[:beam] if ends(h)]
    s.finished.sort(key=lambda pair: -pair[0])
    if len(s.finished) > beam:
        s.decide(s.finished[beam - 1][0], s.finished[beam][0])
        del s.finished[beam:]
    going = [(parent, h) for parent, h in candidates if not ends(h)]
    if len(going) > beam:
        s.decide(going[beam - 1][1].log_p, going[beam][1].log_p)
        del going[beam:]
    if going and len(s.finished) == beam:  # could the best live one still win?
        worst, hope = s.finished[-1][0], going[0][1].log_p / ((5 + limit) / 6) ** alpha
        s.decide(worst, hope)
        if worst >= hope:
            going = []
    s.live = [h for _, h in going]
    return [parent for parent, _ in going]


def token_by_token(
    reference: Reference, sources: Sequence[list[int]], limit: int, sample: int | None = None
) -> list[tuple[list[int], float]]:
    """Return the greedy output (ids without eos, log p / lp(length)) of each source, by the reference's own logits;
    with a seed `sample` a drawn one. Not a beam search of width one, which may go on past eos for a better score."""
    c = reference.config
    cache, logits = _start(reference, sources)
    rows = np.arange(len(sources))
    tokens: list[list[int]] = [[] for _ in sources]
    total = np.zeros(len(sources))
    done = np.zeros(len(sources), bool)
    for step in range(limit):
        scores = allowed(logits, c)
        if sample is None:
            chosen = scores.argmax(axis=1)
        else:
            noises = noise(sample, step, rows, c.vocab_size)
            chosen = np.array([drawn(*pair)[0] for pair in zip(scores, noises, strict=True)])
        log_p = _log_softmax(logits)
        for row in rows[~done]:
            tokens[row].append(int(chosen[row]))
            total[row] += log_p[row, chosen[row]]
        done |= chosen == c.eos_id
        if done.all() or step + 1 == limit:  # a learned table may end here
            break
        new, cache = reference.step(chosen[:, None], cache)
        logits = new[:, -1]
    scores = [float(p) / ((5 + len(row)) / 6) ** ALPHA for p, row in zip(total, tokens, strict=True)]
    return [(row[:-1] if row[-1] == c.eos_id else row, s) for row, s in zip(tokens, scores, strict=True)]


def _start(reference: Reference, sources: Sequence[list[int]]) -> tuple[Cache, Array]:
    """Return a cache over all sources at once and the logits (B,V) of the first new token."""
    c = reference.config
    if c.has_encoder:
        ids, mask = _padded(sources, c.pad_id)
        cache = reference.start(reference.encode(ids, mask), mask)
        logits, cache = reference.step([[c.bos_id]] * len(sources), cache)
    else:
        ids, mask = (part[:, ::-1] for part in _padded([row[::-1] for row in sources], c.pad_id))
        logits, cache = reference.step(ids, reference.start(batch=len(sources)), mask)
    return cache, logits[:, -1]


def teacher_forced(reference: Reference, sources: Sequence[list[int]], outputs: Sequence[list[int]]) -> list[Array]:
    """Return the logits (n+1,V) of each row's n output tokens and of the one after them."""
    c = reference.config
    if c.has_encoder:
        ids, mask = _padded(sources, c.pad_id)
        logits = reference(ids, _padded([[c.bos_id, *row] for row in outputs], c.pad_id)[0], mask)
        return list(logits)
    ids, mask = _padded([[*prompt, *row] for prompt, row in zip(sources, outputs, strict=True)], c.pad_id)
    logits = reference(ids, mask=mask)
    return [row[len(prompt) - 1 :] for row, prompt in zip(logits, sources, strict=True)]


def _padded(rows: Sequence[list[int]], pad: int) -> tuple[Array, Array]:
    """Pad to (B,L) ids, or (B,L,D) vectors in their place, filled with pad on the right, and True on tokens."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.concatenate([row if isinstance(row, np.ndarray) else np.asarray(row, np.int64) for row in rows])
    ids = np.full((*mask.shape, *tokens.shape[1:]), pad, tokens.dtype)
    ids[mask] = tokens
    return ids, mask


def drawn(scores: Array, noise: Array, token: int | None = None) -> tuple[int, float]:
    """Return the token that scores (V,) and noise (BLOCK + blocks,) draw; how far `token` falls behind it, in the
    decision between the blocks or, if that is more, in the one within its own."""
    first = np.arange(0, len(scores), BLOCK)
    blocks = np.logaddexp.reduceat(scores, first) + noise[BLOCK:]
    within = [scores[i : i + BLOCK] + noise[: len(scores[i : i + BLOCK])] for i in first]
    block = int(blocks.argmax())
    best = block * BLOCK + int(within[block].argmax())
    index, place = divmod(best if token is None else token, BLOCK)
    return best, float(max(blocks.max() - blocks[index], within[index].max() - within[index][place]))


def allowed(scores: Array, c: TransformerConfig) -> Array:
    """Return the scores (...,V) with minus infinity where a token is never written."""
    scores = scores.copy()
    end = scores[..., c.eos_id].copy()  # which BART's decoder starts with
    scores[..., [c.pad_id, c.bos_id]] = -np.inf
    scores[..., c.eos_id] = end
    return scores


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
