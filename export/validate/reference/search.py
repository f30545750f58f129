"""Greedy search, sampling and beam search with the float64 reference.

Independent code in plain lists, sentence by sentence; only the network runs for all sentences at once.

Greedy search: at each step the likeliest token allowed by the rules (`rules.py`), until an end token or the limit.
Sampling: Gumbel noise (Gumbel 1954), a function of seed, step and row only, is added. First the best block of BLOCK
tokens is chosen by its log-sum-exp, then the best token in it by its logit.
Beam search (Wu et al. 2016, section 7): score log p / lp(length), with lp(n) = ((5 + n) / 6)^alpha or n^alpha. The
length counts eos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.greedy import BLOCK, noise
from mlx_transformer.decoding.options import Options

from . import Cache, Reference, rules

Array = NDArray
Candidates = Sequence[Sequence[int]] | None
"""The ids allowed in each output, e.g. a shortlist's; None allows all."""


@dataclass
class Hypothesis:
    """Tokens so far (with eos at the end of a finished hypothesis) and their log-probability."""

    log_p: float
    tokens: tuple[int, ...]


@dataclass
class BeamState:
    """The state of a sentence's beam search.

    `margin`: the smallest gap of any decision so far, in log-probability. `read`: the decoder's tokens before the first
    new token. `limit`: most new tokens. `candidates`: the ids allowed in the output; None allows all. `options`: of its
    search. `source`: the sentence.
    """

    live: list[Hypothesis]
    finished: list[tuple[float, Hypothesis]] = field(default_factory=list)
    margin: float = np.inf
    read: list[int] = field(default_factory=list)
    limit: int = 0
    candidates: Sequence[int] | None = None
    options: Options = Options()
    source: list[int] = field(default_factory=list)

    def decide(self, chosen: float, dropped: float) -> None:
        self.margin = min(self.margin, abs(chosen - dropped))


def beam_search(
    reference: Reference, sources: Sequence[list[int]], options: Options, candidates: Candidates = None
) -> list[BeamState]:
    """Search every sentence with a beam of `options.beam`, and return the last states.

    `finished` has (log p / lp(length), hypothesis), best first. candidates: the ids allowed in each output.
    """
    return beam_searches(reference, [(sources, options, candidates)])[0]


def beam_searches(
    reference: Reference, searches: Sequence[tuple[Sequence[list[int]], Options, Candidates]]
) -> list[list[BeamState]]:
    """Search several times as `beam_search` does, all side by side, so that a step reads the weights once for all."""
    c = reference.config
    every = [
        (source, options, None if candidates is None else candidates[i])
        for sources, options, candidates in searches
        for i, source in enumerate(sources)
    ]
    sentences = [
        BeamState([Hypothesis(0.0, ())], [], np.inf, read(c, x, o), rules.limit(c, o, len(x)), chosen, o, x)
        for x, o, chosen in every
    ]
    cache, logits = _start(reference, [source for source, *_ in every], [s.read for s in sentences])
    for _ in range(max(sentence.limit for sentence in sentences)):
        rows: list[int] = []
        offset = 0
        for sentence in sentences:
            width = len(sentence.live)
            rows += [offset + p for p in _advance(sentence, logits[offset : offset + width], sentence.options, c)]
            offset += width
        if not rows:
            break
        cache, logits = _step(reference, [[*s.read, *h.tokens] for s in sentences for h in s.live], cache.select(rows))
    for sentence in sentences:
        for (first, _), (second, _) in pairwise(sentence.finished[: sentence.options.n_best + 1]):
            sentence.decide(first, second)
    ends = [*accumulate(len(sources) for sources, *_ in searches)]
    return [sentences[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _advance(s: BeamState, logits: Array, o: Options, c: TransformerConfig) -> list[int]:
    """Advance a sentence by a step. logits (K,V): of its live hypotheses. Returns the new live hypotheses' parents."""
    if not s.live:
        return []
    beam, limit, length = o.beam, s.limit, len(s.live[0].tokens) + 1
    candidates = _candidates(s, logits, length - 1, o, c)

    def ends(hypothesis: Hypothesis) -> bool:
        return hypothesis.tokens[-1] in rules.ends(c, o) or length == limit

    # Finished: candidates among the `beam` best that end. Live: the `beam` best candidates that don't end.
    border = [h for _, h in candidates[beam - 1 : beam + 1]]
    if len(border) == 2 and any(map(ends, border)):
        s.decide(border[0].log_p, border[1].log_p)
    s.finished += [(h.log_p / _penalty(length, o), h) for _, h in candidates[:beam] if ends(h)]
    s.finished.sort(key=lambda pair: -pair[0])
    if len(s.finished) > beam:
        s.decide(s.finished[beam - 1][0], s.finished[beam][0])
        del s.finished[beam:]
    going = [(parent, h) for parent, h in candidates if not ends(h)]
    if len(going) > beam:
        s.decide(going[beam - 1][1].log_p, going[beam][1].log_p)
        del going[beam:]
    if going and len(s.finished) == beam:
        if o.early_stopping:
            going = []
        else:  # could the best live hypothesis still win?
            worst, hope = s.finished[-1][0], going[0][1].log_p / _hoped(length, limit, o)
            s.decide(worst, hope)
            going = [] if worst >= hope else going
    s.live = [h for _, h in going]
    return [parent for parent, _ in going]


def _candidates(
    s: BeamState, logits: Array, step: int, o: Options, c: TransformerConfig
) -> list[tuple[int, Hypothesis]]:
    """Return the best (parent, longer hypothesis) pairs, enough for a full beam without the pairs that end."""
    forced_id = rules.forced(step, s.limit, c, o)
    if forced_id is not None:
        return [(i, Hypothesis(h.log_p, (*h.tokens, forced_id))) for i, h in enumerate(s.live)]
    rows = [_next_log_p(s, row, h.tokens, o, c) for row, h in zip(logits, s.live, strict=True)]
    scores = np.array(rows) + np.array([[h.log_p] for h in s.live])
    count = min((2 + len(rules.ends(c, o))) * o.beam, scores.size)
    last = np.partition(scores, -count, axis=None)[-count]
    best = np.flatnonzero(scores >= last)
    order = best[np.argsort(-scores.reshape(-1)[best], kind="stable")]  # ties: first hypothesis, lowest id
    return [
        (int(parent), Hypothesis(float(scores[parent, token]), (*s.live[parent].tokens, int(token))))
        for parent, token in zip(*np.unravel_index(order, scores.shape), strict=True)
        if np.isfinite(scores[parent, token])
    ]


def _next_log_p(s: BeamState, logits: Array, written: Sequence[int], o: Options, c: TransformerConfig) -> Array:
    """Log-probabilities (V,) of the token after `written`, minus infinity where a rule forbids it."""
    forced_id = rules.forced(len(written), s.limit, c, o)
    if forced_id is not None:
        return np.where(np.arange(c.vocab_size) == forced_id, 0.0, -np.inf)
    before = [*s.read, *written]
    log_p = _log_softmax(rules.among(logits, s.candidates, c, o))
    return rules.allowed(rules.penalised(log_p, before, o, written), before, len(written), c, o)


def scored_along(
    reference: Reference, outputs: Sequence[tuple[BeamState, list[int]]]
) -> list[tuple[float, Hypothesis]]:
    """Score outputs (ids without their end token), whether the search finds them or not: pairs as in `finished`.

    The score is minus infinity for an output that is too long or breaks a rule.
    """
    logits = teacher_forced(
        reference,
        [s.source for s, _ in outputs],
        [ids[: s.limit - 1] for s, ids in outputs],
        [s.options for s, _ in outputs],
    )
    return [_score_along(s, ids, rows, reference.config) for (s, ids), rows in zip(outputs, logits, strict=True)]


def _score_along(s: BeamState, ids: list[int], logits: Array, c: TransformerConfig) -> tuple[float, Hypothesis]:
    tokens, total = list(ids), 0.0 if len(ids) <= s.limit else -np.inf
    for step in range(min(len(ids) + 1, s.limit)):
        log_p = _next_log_p(s, logits[step], tokens[:step], s.options, c)
        if step == len(ids):
            tokens.append(max(rules.ends(c, s.options), key=log_p.__getitem__))
        total += float(log_p[tokens[step]])
    return total / _penalty(len(tokens), s.options), Hypothesis(total, tuple(tokens))


def _penalty(length: int, o: Options) -> float:
    """The length penalty lp(length), in the options' form."""
    return (length if o.penalty_form == "length" else (5 + length) / 6) ** o.length_penalty


def _hoped(length: int, limit: int, o: Options) -> float:
    """The most favourable length penalty that a live hypothesis can still get (with `heuristic_stop`: lp(length))."""
    if o.heuristic_stop:
        return _penalty(length, o)
    return _penalty(limit, o) if o.length_penalty >= 0 else _penalty(length + 1, o)


def token_by_token(
    reference: Reference, sources: Sequence[list[int]], options: Options, candidates: Candidates = None
) -> list[tuple[list[int], float]]:
    """Return each source's greedy or sampled output: (ids without the end token, log p / lp(length)).

    Greedy search isn't a beam search of width 1, which may go on after eos for a better score. candidates: as in
    `beam_search`.
    """
    c = reference.config
    limits = [rules.limit(c, options, len(source)) for source in sources]
    own = candidates or [None] * len(sources)
    cache, logits = _start(reference, sources, [read(c, source, options) for source in sources])
    rows = np.arange(len(sources))
    tokens: list[list[int]] = [[] for _ in sources]
    total = np.zeros(len(sources))
    done = np.zeros(len(sources), bool)
    for step in range(max(limits)):
        logits = np.array([rules.among(row, chosen, c, options) for row, chosen in zip(logits, own, strict=True)])
        scores = [
            greedy_scores(row, read(c, x, options), y, c, options)
            for row, x, y in zip(logits, sources, tokens, strict=True)
        ]
        chosen = np.array([row.argmax() for row in scores])
        if options.sample:
            noises = noise(options.seed, step, rows, c.vocab_size)
            chosen = np.array([drawn(*pair)[0] for pair in zip(scores, noises, strict=True)])
        log_p = _log_softmax(logits)
        for row in rows[~done]:
            forced_id = rules.forced(step, limits[row], c, options)
            tokens[row].append(int(chosen[row]) if forced_id is None else forced_id)
            total[row] += log_p[row, chosen[row]] if forced_id is None else 0.0
            done[row] = tokens[row][-1] in rules.ends(c, options) or len(tokens[row]) == limits[row]
        if done.all():  # a learned table may end here
            break
        begun = [[*read(c, x, options), *y] for x, y in zip(sources, tokens, strict=True)]
        cache, logits = _step(reference, begun, cache)
    scores = [float(p) / _penalty(len(row), options) for p, row in zip(total, tokens, strict=True)]
    return [(rules.without_end(row, c, options), s) for row, s in zip(tokens, scores, strict=True)]


def greedy_scores(
    logits: Array, begun: Sequence[int], written: Sequence[int], c: TransformerConfig, o: Options
) -> Array:
    """Return the next token's scores (V,). begun: the decoder's first tokens (`read`). written: new tokens."""
    before = [*begun, *written]
    return rules.allowed(rules.penalised(logits, before, o, written), before, len(written), c, o)


def read(c: TransformerConfig, source: Sequence[int], o: Options) -> list[int]:
    """Return the decoder's tokens before the first new token: the start id, or a decoder's prompt."""
    if not c.has_encoder:
        return list(source)
    return [c.bos_id if o.start_id is None else o.start_id]


def _start(reference: Reference, sources: Sequence[list[int]], begun: Sequence[list[int]]) -> tuple[Cache, Array]:
    """Read all sources, and what the decoder reads first (`read`); returns (cache, logits (B,V) of the next token)."""
    c = reference.config
    if c.has_encoder:
        ids, mask = _padded(sources, c.pad_id)
        cache = reference.start(reference.encode(ids, mask), mask)
        logits, cache = reference.step(begun, cache)
        return cache, logits[:, -1]
    ids, mask = (part[:, ::-1] for part in _padded([row[::-1] for row in begun], c.pad_id))
    logits, cache = reference.step(ids, reference.start(batch=len(begun)), mask, first=-1)
    return cache, logits[:, -1]


def _step(reference: Reference, rows: list[list[int]], cache: Cache) -> tuple[Cache, Array]:
    """Read the last token of each row: (cache, logits (B,V)); all tokens again where longrope changes frequencies."""
    if any(len(row) - 1 in _changes(reference.config) for row in rows):
        return _start(reference, rows, rows)
    logits, cache = reference.step([[row[-1]] for row in rows], cache)
    return cache, logits[:, -1]


def _changes(c: TransformerConfig) -> list[int]:
    """The most tokens of a text with longrope's short frequencies, longest first; [] for other models."""
    scalings = [layer.rotary_scaling for layer in c.layers("decoder")]
    return sorted({int(s["length"]) for s in scalings if s.get("kind") == "longrope"}, reverse=True)


def teacher_forced(
    reference: Reference, sources: Sequence[list[int]], outputs: Sequence[list[int]], options: Sequence[Options]
) -> list[Array]:
    """Compute each row's logits (at least n+1,V) for its n output tokens and the token after them. options: of each."""
    c = reference.config
    if c.has_encoder:
        ids, mask = _padded(sources, c.pad_id)
        rows = [[*read(c, source, o), *row] for source, o, row in zip(sources, options, outputs, strict=True)]
        logits = reference(ids, _padded(rows, c.pad_id)[0], mask)
        return list(logits)
    ids, mask = _padded([[*prompt, *row] for prompt, row in zip(sources, outputs, strict=True)], c.pad_id)
    first = min(map(len, sources)) - 1

    def read_all(length: int) -> Array:
        if not isinstance(reference, Reference):  # the program of a published model
            return reference(ids[:, :length], mask[:, :length])[:, first:]
        return reference.step(ids[:, :length], reference.start(batch=len(ids)), mask[:, :length], first=first)[0]

    logits = read_all(ids.shape[1])
    for length in _changes(c):  # the token after a short text is chosen before the text is long
        if length > first:
            logits[:, : length - first] = read_all(length)
    return [row[len(prompt) - 1 - first :] for row, prompt in zip(logits, sources, strict=True)]


def _padded(rows: Sequence[list[int]], pad: int) -> tuple[Array, Array]:
    """Pad rows on the right. Returns (ids (B,L) or vectors (B,L,D), mask (B,L): True on tokens)."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.concatenate([row if isinstance(row, np.ndarray) else np.asarray(row, np.int64) for row in rows])
    ids = np.full((*mask.shape, *tokens.shape[1:]), pad, tokens.dtype)
    ids[mask] = tokens
    return ids, mask


def drawn(scores: Array, noise: Array, token: int | None = None) -> tuple[int, float]:
    """Return (the token drawn by scores (V,) and noise (BLOCK + blocks,), gap of `token`).

    The gap is how far `token` falls behind in the choice between blocks, or within its block if that is more.
    """
    first = np.arange(0, len(scores), BLOCK)
    blocks = np.logaddexp.reduceat(scores, first) + noise[BLOCK:]
    within = [scores[i : i + BLOCK] + noise[: len(scores[i : i + BLOCK])] for i in first]
    block = int(blocks.argmax())
    best = block * BLOCK + int(within[block].argmax())
    index, place = divmod(best if token is None else token, BLOCK)
    return best, float(max(blocks.max() - blocks[index], within[index].max() - within[index][place]))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
