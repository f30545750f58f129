"""Free-running outputs of every runtime under the float64 reference: greedy and drawn tokens one by one, beam search
against its own; and both sides of those that part from it.

Runtimes may part only at a certified tie: where the reference's own gap between the two choices is within twice the
budget that their logits have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from export.validate.cases import Case
from export.validate.engines.protocol import Engine
from export.validate.findings import Divergence, Tokens
from export.validate.reference import Reference
from export.validate.reference.search import BeamState, allowed, beam_search, drawn, teacher_forced, token_by_token
from export.validate.rule import UNIT
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.generation.sampling import BLOCK, noise

T = TypeVar("T")
TokenText = Callable[[Sequence[int]], tuple[str, ...]]
"""Gives the words that the report prints for token ids."""

FAILED = "failed: "
"""Begins the message about a run that failed."""

BEAM = 4
SAMPLE = 1  # seed of the drawn tokens: every runtime gets the same noise
MOST_NEW_TOKENS = 20
MOST_SENTENCES = 8


@dataclass(frozen=True)
class Judged:
    """What the reference says of one sentence: a real divergence, or a tie, or (both empty) the same choice."""

    problem: str = ""
    tie: str = ""

    @property
    def summary(self) -> str:
        return self.problem or self.tie


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result, "") of a run, or (None, its error message): a runtime that fails is a mismatch like any other."""
    try:
        return run(), ""
    except Exception as error:  # each runtime has its own exceptions
        return None, f"{FAILED}{' '.join(str(error).split())[:300]}"


def most_positions(engines: Sequence[Engine], config: TransformerConfig) -> int:
    """Return the length that all engines take: graphs of fixed shape may take less than their model."""
    return min([config.max_positions, *(engine.capabilities.longest or config.max_positions for engine in engines)])


def token_text(checkpoint: Checkpoint) -> TokenText:
    """Return what gives the text of tokens where the checkpoint has a tokenizer, otherwise their ids."""
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
) -> Iterator[Tokens]:
    """Search greedily, by beam and by sampling with every runtime, from the rows of the cases that have several."""
    c = reference.config
    if not c.has_decoder:
        return
    room = most_positions(engines, c)
    most = max(1, room // 2)
    sources = [row[:most] for case in reversed(cases) if len(case.ids) > 1 for row in case.rows()][:MOST_SENTENCES]
    longest = max(map(len, sources)) if c.architecture == "decoder" else 1
    limit = min(MOST_NEW_TOKENS, room - longest + 1)
    widest = min(BEAM, c.vocab_size)
    truth = beam_search(reference, sources, widest, limit)

    def reference_outputs(beam: int, sample: int | None) -> list[list[int]]:
        """Return the reference's own outputs, without eos."""
        if beam == 1:
            return [ids for ids, _ in token_by_token(reference, sources, limit, sample)]
        return [[token for token in s.finished[0][1].tokens if token != c.eos_id] for s in truth]

    for engine in engines:
        for name, beam, sample in (("greedy", 1, None), ("sampling", 1, SAMPLE), (f"beam {widest}", widest, None)):
            hypotheses, why = attempt(
                lambda engine=engine, beam=beam, sample=sample: engine.search(sources, beam, limit, sample)
            )
            outputs = [ids for ids, _ in hypotheses or []]
            if hypotheses is None:
                judged = [Judged(problem=why)]
            elif beam == 1:
                judged = judge_greedy(reference, sources, outputs, limit, limits[engine.name], sample)
            else:
                judged = judge_beam(truth, hypotheses, limit, limits[engine.name], c.eos_id)
            parted = [i for i, j in enumerate(judged) if j.summary] if hypotheses is not None else []
            expected = reference_outputs(beam, sample) if parted else []
            yield Tokens(
                runtime=engine.name,
                search=name,
                sentences=len(outputs),
                tokens=sum(map(len, outputs)),
                ties=tuple(j.tie for j in judged if j.tie),
                problems=tuple(j.problem for j in judged if j.problem),
                partings=tuple(
                    Divergence(i, words(outputs[i]), words(expected[i]), judged[i].summary, bool(judged[i].problem))
                    for i in parted
                ),
            )


def judge_greedy(
    reference: Reference,
    sources: Sequence[list[int]],
    outputs: Sequence[list[int]],
    limit: int,
    budget: float,
    sample: int | None = None,
) -> list[Judged]:
    """Hold every token of greedy outputs (without eos) against the reference's logits along that very output; of drawn
    ones, with the noise of the seed `sample`."""
    c = reference.config
    chosen = [[*ids, c.eos_id] if len(ids) < limit else list(ids) for ids in outputs]
    logits = teacher_forced(reference, sources, [tokens[:-1] for tokens in chosen])
    judged = []
    for row, tokens in enumerate(chosen):
        verdict = Judged()
        if not tokens or len(tokens) > limit:
            judged.append(Judged(problem=f"sentence {row}: {len(tokens)} tokens, the limit is {limit}"))
            continue
        for i, token in enumerate(tokens):
            scores = allowed(logits[row][i], c)
            tie = 2 * budget
            if sample is None:
                best = int(scores.argmax())
                gap = float(scores[best] - scores[token])
            else:
                best, gap = drawn(scores, noise(sample, i, np.array([row]), c.vocab_size)[0], token)
                # Sums in float32: of a block's probabilities, and of scores and noise.
                tie += UNIT * (2 * BLOCK + 4 * float(np.abs(scores).max(where=np.isfinite(scores), initial=0)))
            place = f"sentence {row}, token {i}: {token}, reference {best}, gap {gap:.3g}"
            if gap > tie:
                verdict = Judged(problem=f"{place} (a tie would be at most {tie:.3g})")
                break
            if token != best:
                verdict = Judged(tie=place)
        judged.append(verdict)
    return judged


def judge_beam(
    sentences: Sequence[BeamState],
    outputs: Sequence[tuple[list[int], float]],
    limit: int,
    budget: float,
    eos: int,
) -> list[Judged]:
    """Hold the best hypotheses (ids without eos, score) against the reference's own search."""
    judged = []
    for row, (sentence, (ids, score)) in enumerate(zip(sentences, outputs, strict=True)):
        expected, best = sentence.finished[0]
        tokens = tuple(ids) if len(ids) == limit else (*ids, eos)
        # A log-probability errs by at most two logits' errors, a sum by as many as it has terms; the runtimes add up in
        # float32.
        room = len(best.tokens) * 2 * budget + 1e-6 * abs(best.log_p)
        if tokens == best.tokens:
            off = abs(score - expected)
            bad = off > room
            judged.append(Judged(problem=f"sentence {row}: score {score:.9g}, reference {expected:.9g}" if bad else ""))
        elif sentence.margin <= 2 * room:
            judged.append(Judged(tie=f"sentence {row}: closest decision of the reference {sentence.margin:.3g}"))
        else:
            first = next((i for i, (a, b) in enumerate(zip(tokens, best.tokens, strict=False)) if a != b), 0)
            message = f"sentence {row}, token {first}: {list(tokens)}, reference {list(best.tokens)}"
            judged.append(
                Judged(problem=f"{message}; closest decision {sentence.margin:.3g}, a tie would be {2 * room:.3g}")
            )
    return judged
