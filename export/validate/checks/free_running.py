"""Run searches with every runtime and judge the outputs by the float64 reference.

Greedy and sampled tokens are judged token by token, beam search by the reference's own beam search. Searches among
given ids (a shortlist, or half of the vocabulary) are judged in the same way. So are the logits of graphs for a
shortlist, which compute only the given ids' logits.

Runtimes may differ only at a certified tie: the reference's gap between the two choices is within twice the budget of a
logit. At a tie a beam search's other tokens must have the score that the reference gives them. The report shows both
outputs of a sentence that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case, fewer
from export.validate.engines.protocol import Engine, is_large
from export.validate.findings import AMONG as AMONG_PATH
from export.validate.findings import Divergence, Tokens
from export.validate.reference import Reference
from export.validate.reference.rules import among, check_known, ends, forced, without_end
from export.validate.reference.rules import limit as limit_of
from export.validate.reference.search import (
    BeamState,
    Candidates,
    Hypothesis,
    beam_searches,
    drawn,
    greedy_scores,
    read,
    scored_along,
    teacher_forced,
    token_by_token,
)
from export.validate.rule import UNIT, Deviation, Truth
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.shortlist import open_shortlist, shares_ids
from mlx_transformer.decoding.greedy import BLOCK, noise
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation.settings import BESIDE, NO_SHORTLIST, SHORTLIST, read_settings
from mlx_transformer.text.tokenizer import Tokenizer

from .judging import Sample

Array = NDArray
T = TypeVar("T")
CandidatesOf = Callable[[Sequence[int]], Sequence[int]]
"""Source ids -> ids allowed in its output, e.g. a shortlist's."""
TokenText = Callable[[Sequence[int]], tuple[str, ...]]
"""Token ids -> their text for the report."""

FAILED = "failed: "
"""Prefix of a failed run's message."""

BEAM = 4
SAMPLE = 1  # seed of the drawn tokens: every runtime gets the same noise
MOST_NEW_TOKENS = 20
MOST_SENTENCES = 8
RULES = ", with rules"
BORDERS = ", ids at the borders"
WITHOUT_LIMIT = "greedy, without a limit"
AT_BORDERS = 2
"""Sentences (the shortest) in searches at the limits of options."""
FEW_TOKENS = 6
"""Most tokens of an output in these searches."""
BANNED_AFTER = 2000
"""These searches ban every second id below this."""
AMONG = ", among candidates"
WITH_RULES = 4
"""Sentences in a search with rules."""
ENOUGH_WORDS = 10
MOST_SCORES = 1 << 25
"""Most logits in a pass of the reference (256 MB in float64)."""
OF_SAMPLING = ("sample", "seed", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Judged:
    """The reference's verdict on a sentence: a problem, a tie, or neither (the same choice)."""

    problem: str = ""
    tie: str = ""

    @property
    def summary(self) -> str:
        return self.problem or self.tie


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result of run(), ""), or (None, error message) if it fails: the report shows a failure as a mismatch."""
    try:
        return run(), ""
    except Exception as error:  # each runtime has its own exceptions
        return None, f"{FAILED}{' '.join(str(error).split())[:300]}"


def token_text(checkpoint: Checkpoint) -> TokenText:
    """Return a function from ids to their tokens' text, or to the ids as text if there is no tokenizer."""
    if checkpoint.tokenizer_path is None:
        return lambda ids: tuple(map(str, ids))
    tokenizer = Tokenizer.load(checkpoint.tokenizer_path)
    return lambda ids: tuple(tokenizer.decode([token]) or str(token) for token in ids)


def free_running(
    reference: Reference,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    limits: Mapping[str, float],
    words: TokenText,
    settings: Mapping[str, Any] | None = None,
    listed: CandidatesOf | None = None,
    share: float = 1.0,
) -> Iterator[Tokens]:
    """Search with every runtime and judge the outputs. Sources are the rows of cases with several rows.

    Searches: greedy, beam and sampling; with every rule in force; at the limits of options; with the model's own
    `settings`; and among given ids.

    limits: the largest allowed error of a logit, by runtime. listed: gives the allowed ids for a source; without it
    half of all ids are allowed, for engines with graphs for a shortlist. share: part of the usual sentences and tokens.
    """
    if not reference.config.has_decoder:
        return
    able = [engine for engine in engines if listed is not None or engine.capabilities.among]
    every = list(_every(reference.config, cases, settings or {}, listed, bool(able), share))
    for search in every:
        check_known(search.options)
    beams = [search for search in every if search.options.beam > 1]
    truths = beam_searches(reference, [(s.sources, s.options, s.candidates) for s in beams]) if beams else []
    truth_of = {search.name: truth for search, truth in zip(beams, truths, strict=True)}
    runs: list[tuple[Engine, Attempt]] = []
    for engine in engines:
        runs += [(engine, _attempted(engine, search)) for search in every if engine in able or not search.of_shortlist]
        engine.rest()
    greedy = {
        _key(attempted): attempted
        for _, attempted in runs
        if attempted[1] is not None and attempted[0].options.beam == 1
    }
    chosen = side_by_side(reference, [(search, _best_of(outputs)) for search, outputs, _ in greedy.values()])
    known = dict(zip(greedy, chosen, strict=True))
    found: list[tuple[int, Tokens]] = []
    for engine, attempted in runs:
        search, *_ = attempted
        truth = truth_of.get(search.name, [])
        tokens = _judged(reference, engine, limits[engine.name], words, attempted, truth, known)
        found.append((every.index(search), tokens))
    yield from (tokens for _, tokens in sorted(found, key=lambda pair: pair[0]))


@dataclass(frozen=True, eq=False)
class Search:
    """A search of sources. `candidates`: the ids allowed in each output, chosen as by a shortlist if `of_shortlist`."""

    name: str
    sources: Sequence[Any]
    options: Options
    candidates: Candidates = None
    of_shortlist: bool = False


def _every(
    c: TransformerConfig,
    cases: Sequence[Case],
    settings: Mapping[str, Any],
    listed: CandidatesOf | None,
    shortlists: bool,
    share: float,
) -> Iterator[Search]:
    sources, limit = sources_of(cases, c, share)
    for name, options in searches(c, limit, settings, max(map(len, sources))).items():
        yield Search(name, sources[:WITH_RULES] if name.endswith(RULES) else sources, options)
    shortest = sorted(sources, key=len)[:AT_BORDERS]
    for name, options in borders(c, limit).items():
        yield Search(name, shortest, options)
    bare = Options(suppressed=(c.eos_id,))  # without an end token the output reaches its limit
    yield Search(WITHOUT_LIMIT, shortest[:1], bare)
    if not (c.has_encoder and shortlists) or isinstance(sources[0], np.ndarray):
        return
    rows = sources[:WITH_RULES]
    chosen = [list((listed or partial(half_of, c))(row)) for row in rows]
    beam = min(BEAM, c.vocab_size)
    for name, width in {"greedy": 1, f"beam {beam}": beam}.items():
        yield Search(f"{name}{AMONG}", rows, Options(max_new_tokens=limit, beam=width), chosen, of_shortlist=True)


def half_of(c: TransformerConfig, source: Sequence[int]) -> list[int]:
    """Choose a random half of all ids, seeded by the source, with the first and the last id."""
    chosen = np.random.default_rng([*source, len(source)]).random(c.vocab_size) < 0.5
    chosen[[0, -1]] = True
    return np.flatnonzero(chosen).tolist()


def sources_of(cases: Sequence[Case], c: TransformerConfig, share: float = 1.0) -> tuple[list[Any], int]:
    """Return (sources of searches, most tokens of an output). Sources are the rows of cases with several rows.

    share: part of the usual number of both.
    """
    most, count = max(1, c.max_positions // 2), fewer(MOST_SENTENCES, share)
    sources = [row[:most] for case in reversed(cases) if len(case.ids) > 1 for row in case.rows()][:count]
    longest = max(map(len, sources)) if c.architecture == "decoder" else 1
    return sources, min(max(FEW_TOKENS, round(share * MOST_NEW_TOKENS)), c.max_positions - longest + 1)


def searches(c: TransformerConfig, limit: int, settings: Mapping[str, Any], longest: int) -> dict[str, Options]:
    """Return each search's options by its name in the report, e.g. "beam 4". longest: length of the longest source."""
    beam = min(BEAM, c.vocab_size)
    bare = {"greedy": {}, "sampling": {"sample": True, "seed": SAMPLE}, f"beam {beam}": {"beam": beam}}
    rules = rules_for(c, limit, longest)
    ruled = {f"{name}{RULES}": Options(**rules, **bare[name]) for name in ("greedy", f"beam {beam}")}
    options_by_name = {**{name: Options(max_new_tokens=limit, **options) for name, options in bare.items()}, **ruled}
    own = own_options(limit, settings)
    return options_by_name if own is None else {**options_by_name, "as the model's own settings say": own}


def borders(c: TransformerConfig, limit: int) -> dict[str, Options]:
    """Return options at their limits, by the search's name in the report.

    A single token; fewer outputs than the beam; ids 0 and V - 1 in every rule, if the vocabulary is large enough. The
    decoder reads id 0 (forced if possible) and the last id; then banned sequences that begin with these decide the next
    token. After another first token the same sequences must ban nothing: a runtime that confuses id 0 with "no id"
    would ban tokens there.
    """
    few, beam = min(limit, FEW_TOKENS), min(BEAM, c.vocab_size)
    n_best = max(1, beam // 2)
    named = {"greedy, limit 1": Options(max_new_tokens=1)}
    several: dict[str, Any] = {"beam": beam, "n_best": n_best}
    first, last = 0, c.vocab_size - 1
    words = sorted({*range(c.vocab_size)} - {c.pad_id, c.bos_id, c.eos_id, first, last})
    if len(words) < ENOUGH_WORDS or few < FEW_TOKENS:
        return {**named, f"beam {beam}, {n_best} best": Options(max_new_tokens=few, **several)}
    forced = tuple(i for i in (first, last) if i not in (c.pad_id, c.eos_id))
    begin = (first, *forced[-1:]) if last in forced else (first,)
    rules: dict[str, Any] = {
        "max_new_tokens": few,
        "banned_sequences": tuple((*begin, i) for i in range(0, min(c.vocab_size, BANNED_AFTER), 2)),
        "min_new_tokens": few,
        "no_repeat_ngram": 1,
    }
    begun = {**rules, "forced_first": forced, "start_id": first if c.has_encoder else None}
    other = {**rules, "forced_first": (words[0], *begin[1:]), "suppressed": (first, last, words[-1])}
    other["suppressed_first"] = (first, last, *words[1::2])
    return {
        **named,
        f"greedy{BORDERS}": Options(**begun),
        f"beam {beam}, {n_best} best{BORDERS}": Options(**begun, **several),
        f"greedy, another first{BORDERS}": Options(**other),
        f"greedy, ends{BORDERS}": Options(max_new_tokens=few, end_ids=(first, last), forced_end=True),
    }


def own_options(limit: int, settings: Mapping[str, Any]) -> Options | None:
    """Return the model's own settings with at most `limit` new tokens and no sampling; None if it has no settings."""
    left = (*BESIDE, *OF_SAMPLING, "max_length_factor")  # `limit` replaces it
    own = {name: value for name, value in settings.items() if name not in left}
    if not own:
        return None
    most = min(limit, own.get("max_new_tokens", limit))
    least = min(most, own.get("min_new_tokens", 0))
    return Options(**{**own, "max_new_tokens": most, "min_new_tokens": least, "n_best": 1})


def rules_for(c: TransformerConfig, limit: int, longest: int) -> dict[str, Any]:
    """Return options with every rule of a search in force.

    Rules that ban tokens are left out for vocabularies that are too small. Outputs of the longest source have at most
    `limit` tokens, others fewer.
    """
    words = sorted({*range(c.vocab_size)} - {c.pad_id, c.bos_id, c.eos_id}, reverse=True)
    enough = len(words) >= ENOUGH_WORDS
    first, *rare = words[:4] if enough else [None]
    others = words[4:]
    return {
        "max_length_factor": (limit - 0.5) / longest,  # - 0.5: rounds up to limit despite float32's error
        "suppressed_first": tuple(others[: len(others) // 2]) if enough else (),
        "banned_sequences": tuple(pairwise(others)) if enough else (),
        "forced_first": () if first is None or limit < 2 else (first,),
        "suppressed": tuple(rare[:2]),
        "end_ids": tuple(rare[2:]),
        "start_id": rare[0] if enough and c.has_encoder else None,
        "forced_end": True,
        "heuristic_stop": True,
        "penalty_form": "length",
        "repetition_penalty": 1.25,
        "no_repeat_ngram": 2 if enough else 0,
        "min_new_tokens": min(3, limit) if enough else 0,
    }


Outputs = Sequence[Sequence[tuple[list[int], float]]]
"""Each sentence's hypotheses, best first: (ids without their end token, score)."""


Attempt = tuple[Search, Outputs | None, str]
"""A search of an engine, its outputs or None, and the reason for None."""


def _attempted(engine: Engine, search: Search) -> Attempt:
    arguments = search.sources, search.options, search.candidates
    if search.options.n_best > 1:
        return search, *attempt(lambda: engine.n_best(*arguments))
    return search, *attempt(lambda: [[best] for best in engine.search(*arguments)])


def _best_of(outputs: Outputs | None) -> list[list[int]]:
    return [rows[0][0] for rows in outputs or []]


def _key(attempted: Attempt) -> tuple[str, str]:
    """The search and its outputs: runtimes that agree are judged once."""
    search, outputs, _ = attempted
    return search.name, str(_best_of(outputs))


def _judged(
    reference: Reference,
    engine: Engine,
    budget: float,
    words: TokenText,
    attempted: Attempt,
    truth: Sequence[BeamState],
    known: Mapping[tuple[str, str], list[list[Choice]]],
) -> Tokens:
    """Judge a search's outputs. truth: the reference's beam search. known: the choices along greedy outputs."""
    search, found, why = attempted
    c, options, sources = reference.config, search.options, search.sources
    outputs = _best_of(found)
    if found is None:
        judged = [Judged(problem=why)]
    elif options.beam == 1:
        judged = judge_choices(known[_key(attempted)], budget)
    else:
        judged = judge_beam(reference, truth, found, budget)
    parted = outputs and any(j.summary for j in judged)
    expected: list[list[int]] = []
    if parted and options.beam == 1 and is_large(sum(array.nbytes for array in reference.weights.stored.values())):
        rows = zip(outputs, known[_key(attempted)], strict=True)
        expected = [without_end(until_parting(ids, chosen), c, options) for ids, chosen in rows]
    elif parted and options.beam == 1:
        expected = [ids for ids, _ in token_by_token(reference, sources, options, search.candidates)]
    elif parted:
        expected = [without_end(s.finished[0][1].tokens, c, options) for s in truth]
    return tokens_of(engine, search.name, judged, outputs, expected, words)


def tokens_of(
    engine: Engine,
    search: str,
    judged: Sequence[Judged],
    outputs: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    words: TokenText,
) -> Tokens:
    """Make the report's entry for a search of a runtime.

    outputs: empty if the search failed. expected: the reference's outputs, needed if a sentence differs.
    """
    return Tokens(
        runtime=engine.name,
        search=search,
        sentences=len(outputs),
        tokens=sum(map(len, outputs)),
        ties=tuple(j.tie for j in judged if j.tie),
        problems=tuple(j.problem for j in judged if j.problem),
        divergences=tuple(
            Divergence(i, words(got), words(expected[i]), judged[i].summary, bool(judged[i].problem))
            for i, got in enumerate(outputs)
            if judged[i].summary
        ),
    )


def judge_greedy(
    reference: Reference,
    sources: Sequence[list[int]],
    outputs: Sequence[list[int]],
    options: Options,
    budget: float,
    candidates: Candidates = None,
) -> list[Judged]:
    """Judge every token of greedy or sampled outputs by the reference's logits along the same output.

    outputs: without their end token. Sampled tokens are judged with the same noise. budget: the largest allowed error
    of a logit. candidates: the ids allowed in each output.
    """
    return judge_choices(choices(reference, sources, outputs, options, candidates), budget)


class Choice(NamedTuple):
    """A token of an output, the reference's choice in its place, and the gap of their scores."""

    token: int
    best: int
    gap: float
    errors: float
    """A gap of at most `errors` times the allowed error of a logit, plus `more`, is a tie."""
    more: float = 0.0
    """The allowed rounding error of sampling's float32 sums."""
    problem: str = ""
    """What is wrong with the whole output."""


def choices(
    reference: Reference,
    sources: Sequence[list[int]],
    outputs: Sequence[list[int]],
    options: Options,
    candidates: Candidates = None,
) -> list[list[Choice]]:
    """Compare each token of greedy or sampled outputs with the reference's choice along the same output."""
    return side_by_side(reference, [(Search("", sources, options, candidates), outputs)])[0]


def side_by_side(reference: Reference, runs: Sequence[tuple[Search, Sequence[list[int]]]]) -> list[list[list[Choice]]]:
    """Compare the outputs of several greedy or sampled searches as `choices` does, by few passes of the reference.

    A pass along an output has the logits of all its steps, so that it proves as much as the reference's own search. If
    each token is the reference's choice after the tokens before it, the reference writes this output. Rows of all
    searches and runtimes share a pass, which reads and widens the weights once.
    """
    c = reference.config
    limits = [[limit_of(c, search.options, len(source)) for source in search.sources] for search, _ in runs]
    found: list[list[list[Choice]]] = [[[] for _ in outputs] for _, outputs in runs]
    rows = [
        (len(search.sources[row]) + min(len(ids), limit), i, row)
        for i, (search, outputs) in enumerate(runs)
        for row, (ids, limit) in enumerate(zip(outputs, limits[i], strict=True))
    ]
    for part in _parts(sorted(rows), c.vocab_size):
        places = [(*runs[i], row, limits[i][row]) for _, i, row in part]
        logits = teacher_forced(
            reference,
            [search.sources[row] for search, _, row, _ in places],
            [outputs[row][: limit - 1] for _, outputs, row, limit in places],
            [search.options for search, *_ in places],
        )
        for (_, i, row), known, (search, outputs, _, limit) in zip(part, logits, places, strict=True):
            found[i][row] = _along(outputs[row], known, search, row, limit, c)
    return found


def _parts(rows: Sequence[tuple[int, int, int]], width: int) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Split rows (length, ...), the shortest first, into passes of at most `MOST_SCORES` logits, padding included."""
    part: list[tuple[int, int, int]] = []
    for row in rows:
        if part and (len(part) + 1) * row[0] * width > MOST_SCORES:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _along(
    ids: Sequence[int], logits: Array, search: Search, row: int, limit: int, c: TransformerConfig
) -> list[Choice]:
    """Compare each token of a sentence's output with the reference's choice, by the logits (n+1,V) along it."""
    tokens = [*ids, None] if len(ids) < limit else list(ids)  # None: an end token
    if not tokens or len(tokens) > limit:
        return [Choice(0, 0, 0.0, 0.0, problem=f"{len(tokens)} tokens, the limit is {limit}")]
    options, chosen = search.options, list[Choice]()
    own = None if search.candidates is None else search.candidates[row]
    for i, token in enumerate(tokens):
        known = among(logits[i], own, c, options)
        scores = greedy_scores(known, read(c, search.sources[row], options), ids[:i], c, options)
        chosen.append(_choice(scores, i, row, token, forced(i, limit, c, options), c, options))
    return chosen


def until_parting(ids: Sequence[int], chosen: Sequence[Choice]) -> list[int]:
    """The reference's output up to the first token that differs from `ids`, by the choices along `ids`.

    Its rest would be another text, which proves nothing and takes a pass of the network per token.
    """
    place = next((i for i, choice in enumerate(chosen) if choice.token != choice.best), len(ids))
    return [*ids[:place], *(choice.best for choice in chosen[place : place + 1])]


def judge_choices(rows: Sequence[Sequence[Choice]], budget: float) -> list[Judged]:
    """Judge each output by its choices. budget: the largest allowed error of a logit."""
    judged = list[Judged]()
    for row, chosen in enumerate(rows):
        verdict = Judged()
        for i, (token, best, gap, errors, more, problem) in enumerate(chosen):
            tie = errors * budget + more
            place = f"sentence {row}, token {i}: {token}, reference {best}, gap {gap:.3g}"
            if problem:
                verdict = Judged(problem=f"sentence {row}: {problem}")
            elif gap > tie:
                verdict = Judged(problem=f"{place} (a tie would be at most {tie:.3g})")
                break
            elif token != best:
                verdict = Judged(tie=place)
        judged.append(verdict)
    return judged


def _choice(
    scores: Array,
    step: int,
    row: int,
    token: int | None,
    forced_id: int | None,
    c: TransformerConfig,
    o: Options,
) -> Choice:
    """Compare a token with the reference's.

    scores (V,): after the rules. token: None for an end token; the likeliest is returned. forced_id: the forced token
    here, if any.
    """
    last = ends(c, o)
    if forced_id is not None:
        same = forced_id in last if token is None else token == forced_id
        return Choice(forced_id if same or token is None else token, forced_id, 0.0 if same else np.inf, 0.0)
    best = int(scores.argmax())
    if token is None:
        token = best if best in last else max(last, key=lambda end: float(scores[end]))
    errors = 2 * _stretched(o)
    if not np.isfinite(scores[best]):  # the rules leave no token, so none is wrong
        return Choice(token, token, 0.0, errors)
    if not o.sample:
        return Choice(token, best, float(scores[best] - scores[token]), errors)
    best, gap = drawn(scores, noise(o.seed, step, np.array([row]), c.vocab_size)[0], token)
    # Rounding of float32 sums: a block's probabilities, and scores plus noise.
    more = UNIT * (2 * BLOCK + 4 * float(np.abs(scores).max(where=np.isfinite(scores), initial=0)))
    return Choice(token, best, gap, errors, more)


def _stretched(o: Options) -> float:
    """Largest factor by which the repetition penalty enlarges an error."""
    return max(o.repetition_penalty, 1 / o.repetition_penalty)


def judge_beam(reference: Reference, sentences: Sequence[BeamState], outputs: Outputs, budget: float) -> list[Judged]:
    """Judge each sentence's hypotheses by the reference's own beam search, `sentences`.

    Other ids than the reference's pass only if some decision of its search was a tie, and only with the score that the
    reference gives them. budget: the largest allowed error of a logit.
    """
    c = reference.config
    pairs = {
        (row, place): (s, output, known)
        for row, (s, found) in enumerate(zip(sentences, outputs, strict=True))
        for place, (output, known) in enumerate(zip(found, s.finished[: s.options.n_best], strict=False))
    }
    tied = {
        key: (s, list(ids))
        for key, (s, (ids, _), (_, best)) in pairs.items()
        if list(ids) != without_end(best.tokens, c, s.options) and s.margin <= 2 * _room(best, s.options, budget)
    }
    along: dict[tuple[int, int], tuple[float, Hypothesis]] = {}
    lengths = sorted((len(s.source) + len(ids), *key) for key, (s, ids) in tied.items())
    for part in _parts(lengths, c.vocab_size):
        keys = [(row, place) for _, row, place in part]
        along |= zip(keys, scored_along(reference, [tied[key] for key in keys]), strict=True)
    judged = [Judged() for _ in sentences]
    for (row, place), (s, output, known) in pairs.items():
        name = f"sentence {row}, number {place + 1}" if place else f"sentence {row}"
        verdict = _of_hypothesis(name, s, output, known, along.get((row, place)), budget, c)
        if not judged[row].problem and (verdict.problem or not judged[row].tie):
            judged[row] = verdict
    for row, (s, found) in enumerate(zip(sentences, outputs, strict=True)):
        expected = min(s.options.n_best, len(s.finished))
        if len(found) != expected:
            judged[row] = Judged(problem=f"sentence {row}: {len(found)} hypotheses, reference {expected}")
        elif judged[row].problem:
            continue
        elif not s.options.end_ids and len({tuple(ids) for ids, _ in found}) < expected:
            judged[row] = Judged(problem=f"sentence {row}: a hypothesis is there twice")
        elif any(later > score for (_, score), (_, later) in pairwise(found)):
            judged[row] = Judged(problem=f"sentence {row}: the best hypothesis isn't first")
    return judged


def _of_hypothesis(
    name: str,
    s: BeamState,
    output: tuple[list[int], float],
    known: tuple[float, Hypothesis],
    along: tuple[float, Hypothesis] | None,
    budget: float,
    c: TransformerConfig,
) -> Judged:
    """Judge a hypothesis. known: the reference's in this place. along: at a tie, the reference's score of other ids."""
    (ids, score), (_, best) = output, known
    expected, room = without_end(best.tokens, c, s.options), _room(best, s.options, budget)
    if list(ids) != expected and along is None:
        common = min(len(ids), len(expected))
        first = next((i for i in range(common) if ids[i] != expected[i]), common)
        message = f"{name}, token {first}: {list(ids)}, reference {expected}"
        return Judged(problem=f"{message}; closest decision {s.margin:.3g}, a tie would be {2 * room:.3g}")
    score_there, scored = along or known
    if not (np.isfinite(score_there) and abs(score - score_there) <= _room(scored, s.options, budget)):
        whose = f" of {list(ids)}" if along else ""
        return Judged(problem=f"{name}: score{whose} {score:.9g}, reference {score_there:.9g}")
    return Judged(tie=f"{name}: closest decision of the reference {s.margin:.3g}") if along else Judged()


def _room(h: Hypothesis, o: Options, budget: float) -> float:
    """Largest error of a hypothesis's score: that of two logits for each log-probability, plus a float32 sum's."""
    return len(h.tokens) * 2 * budget * _stretched(o) + 1e-6 * abs(h.log_p)


def candidates_of(file: str | Path | None, checkpoint: Checkpoint) -> CandidatesOf | None:
    """Open the shortlist for searches, by default the model's own; None without a shortlist."""
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
    """Yield the logits of half of all tokens, for engines with graphs for a shortlist. truth: all tokens' logits."""
    if not engine.capabilities.among or engine.capabilities.shows != "everything" or case.target_ids is None:
        return
    c = engine.config
    own = [c.pad_id, c.bos_id, c.eos_id, *case.target_ids.reshape(-1)]
    ids = np.unique([*half_of(c, case.target_ids[0].tolist()), *own])
    if len(ids) == c.vocab_size:  # all ids are candidates: a search would use the ordinary graphs
        return
    got, why = attempt(lambda: engine.logits_among(case, ids))
    of_ids = replace(truth, t64=truth.t64[..., ids], bits=None)
    yield Sample(engine, AMONG_PATH, "logits", case, Deviation.of(got, of_ids, why), truth.scale)
