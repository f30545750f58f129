"""Compare two models: both translate the same lines, in turns.

lines -> batches, longest lines first -> both models translate each batch, starting in turn -> Comparison
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.progress import Progress, no_progress

from .result import Comparison, Likelihood, SentencePair, Side, measures, sentence_scores
from .worker import Served, Worker

BATCH = 32  # lines
TRANSLATED = 0.7  # share of the progress bar for translating; the rest is for probabilities

Opener = Callable[[], Served]


def compare(
    a: tuple[str, Opener],
    b: tuple[str, Opener],
    source: Sequence[str],
    reference: Sequence[str] | None = None,
    *,
    batch: int = BATCH,
    overlong: str = "error",
    watch: Progress = no_progress,
    **options: Any,
) -> Comparison:
    """Compare two models on the same lines.

    a, b: (name, picklable function that opens the model); each model runs in its own process. Both translate each batch
    of `batch` lines before the next, so that other work on the machine slows both. The first batch is translated once
    before, to warm up. overlong, options: as in `Translator.n_best`. Without `reference` each model also computes the
    log p of its own outputs and of the other's. Raises the UserError of either model.
    """
    if not source:
        raise UserError("no lines to translate")
    order = sorted(range(len(source)), key=lambda i: -len(source[i].encode(errors="replace")))
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    with ExitStack() as stack:
        workers = [Worker(name, opened) for name, opened in (a, b)]
        for each in workers:
            stack.callback(each.close)
        turns = _Turns(workers, source, overlong, options)
        turns.prepare(batches[0])
        share = (1 if reference is not None else TRANSLATED) / len(batches)
        for number, indices in enumerate(batches, 1):
            turns.take(indices, number % 2 == 0)
            watch(share * number, f"{min(number * batch, len(source)):,} of {len(source):,} lines")
        sides = turns.side(0), turns.side(1)
        first, second = (side.outputs for side in sides)
        differing = [i for i in range(len(source)) if first[i] != second[i]]
        settings = {**options, "overlong": overlong, "batch": batch}
        result: dict[str, Any] = {"lines": len(source), "batches": len(batches), "options": settings}
        result |= {"versions": versions()}
        if reference is None:
            result |= _without_reference(workers, sides, source, differing, watch)
        else:
            result |= _with_reference(sides, source, reference, differing)
        return Comparison(a=sides[0], b=sides[1], **result)


class _Turns:
    """The translations of both models so far, with their times and tokens."""

    def __init__(self, workers: Sequence[Worker], source: Sequence[str], overlong: str, options: dict[str, Any]):
        self.workers, self.source, self.overlong, self.options = workers, source, overlong, options
        self.facts = [worker.ask("describe") for worker in workers]
        self.outputs = [[""] * len(source) for _ in workers]
        self.seconds: list[list[float]] = [[] for _ in workers]
        self.tokens: list[list[int]] = [[] for _ in workers]
        self.long = [0, 0]

    def prepare(self, indices: Sequence[int]) -> None:
        """Find lines that are too long, and translate a batch unmeasured to warm up."""
        for number, worker in enumerate(self.workers):
            try:
                self.long[number] = len(worker.ask("check", self.source, self.overlong))
            except UserError as error:
                raise UserError("{}: {}", worker.name, error) from error
            self._ask(worker, indices)

    def take(self, indices: Sequence[int], reverse: bool) -> None:
        """Translate a batch with both models; `reverse`: B goes first."""
        for number in (1, 0) if reverse else (0, 1):
            texts, seconds, tokens = self._ask(self.workers[number], indices)
            self.seconds[number].append(seconds)
            self.tokens[number] += [] if tokens is None else [sum(tokens)]
            for i, text in zip(indices, texts, strict=True):
                self.outputs[number][i] = text

    def side(self, i: int) -> Side:
        """Results of model i. Call it after the last batch, and before anything else that would raise peak memory."""
        worker, (facts, size) = self.workers[i], self.facts[i]
        memory, arrays = worker.ask("memory")
        took = self.seconds[i], self.tokens[i] or None, memory, arrays, self.long[i]
        return Side(worker.name, facts, size, self.outputs[i], *took)

    def _ask(self, worker: Worker, indices: Sequence[int]) -> Any:
        policy = self.overlong if self.overlong != "error" else "split"  # `check` has found no line too long
        return worker.ask("translate", [self.source[i] for i in indices], overlong=policy, **self.options)


def _with_reference(
    sides: Sequence[Side], source: Sequence[str], reference: Sequence[str], differing: Sequence[int]
) -> dict[str, Any]:
    a, b = (side.outputs for side in sides)
    references = [reference[i] for i in differing]
    of_a, of_b = (sentence_scores([outputs[i] for i in differing], references) for outputs in (a, b))
    sentences = [
        SentencePair(i + 1, source[i], reference[i], a[i], b[i], score_a, score_b)
        for i, score_a, score_b in zip(differing, of_a, of_b, strict=True)
    ]
    sentences.sort(key=lambda each: (-abs(each.difference), each.line))
    return {"sentences": sentences, "measures": measures(a, b, reference)}


def _without_reference(
    workers: Sequence[Worker], sides: Sequence[Side], source: Sequence[str], differing: Sequence[int], watch: Progress
) -> dict[str, Any]:
    a, b = (side.outputs for side in sides)
    questions = [(worker, source, side.outputs) for worker, side in zip(workers, sides, strict=True)]
    lines = [source[i] for i in differing]
    for worker, side in zip(workers, reversed(sides), strict=True):
        questions.append((worker, lines, [side.outputs[i] for i in differing]))
    replies = []
    for number, (worker, *texts) in enumerate(questions):
        watch(TRANSLATED + (1 - TRANSLATED) * number / len(questions), "their probabilities")
        replies.append(worker.ask("log_p", *texts))
    watch(1.0, "")
    own, other = replies[:2], replies[2:]
    likelihoods = tuple(_likelihood(*each, differing) for each in zip(own, other, strict=True))
    similar = sentence_scores([b[i] for i in differing], [a[i] for i in differing])
    sentences = []
    for place, i in enumerate(differing):
        log_p: dict[str, float | None] = {}
        for name, rival, of_own, of_other in zip("ab", "ba", own, other, strict=True):
            if of_own is not None:
                log_p |= {f"{name} of {name}": of_own[i], f"{name} of {rival}": of_other[place]}
        sentences.append(SentencePair(i + 1, source[i], None, a[i], b[i], similarity=similar[place], log_p=log_p))
    sentences.sort(key=lambda each: (-each.difference, each.line))
    return {"sentences": sentences, "likelihoods": likelihoods}


def _likelihood(
    own: list[float | None] | None, other: list[float | None] | None, differing: Sequence[int]
) -> Likelihood | None:
    """Compare a model's log p of its own and the other's outputs, over the lines where both have one."""
    if own is None or other is None:
        return None
    of_other = {**dict(enumerate(own)), **dict(zip(differing, other, strict=True))}
    both = [(i, mine, theirs) for i, mine in enumerate(own) if mine is not None and (theirs := of_other[i]) is not None]
    if not both:
        return None
    differ = set(differing)
    compared = [(mine, theirs) for i, mine, theirs in both if i in differ]
    count = len(both)
    return Likelihood(
        sum(mine for _, mine, _ in both) / count,
        sum(theirs for _, _, theirs in both) / count,
        count,
        sum(mine > theirs for mine, theirs in compared),
        len(compared),
    )
