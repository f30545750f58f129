"""Free-running tokens under the float64 reference: greedy and drawn ones one by one, beam search against its own.

Runtimes may part only at a certified tie: where the reference's own gap between the two choices is within twice the
budget that their logits have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.validate.reference import Reference
from export.validate.reference.search import BeamState, allowed, drawn, teacher_forced
from export.validate.rule import UNIT
from mlx_transformer.generation.sampling import BLOCK, noise


@dataclass(frozen=True)
class Judged:
    """What the reference says of one sentence: a real divergence, or a tie, or (both empty) the same choice."""

    problem: str = ""
    tie: str = ""


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
