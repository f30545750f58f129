"""Compare two models: both translate the same lines, in turns. The page shows figures, charts, and the lines on which
they differ; it works offline.

    lines -> batches, longest lines first -> both models translate each batch, starting in turn -> Comparison
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from difflib import SequenceMatcher
from html import escape
from itertools import groupby
from typing import Any

from mlx_transformer import page as kit
from mlx_transformer.system.chart import Curve, colour, figure
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import versions
from mlx_transformer.system.progress import Progress, no_progress

from .result import NONE, Comparison, Likelihood, SentencePair, Side, measures, rows, sentence_of, sentence_scores
from .worker import Served, Worker

SHOWN = 500
"""Most lines on the page, the most different first; the JSON has all of them."""

ORDERS = {"difference": "greatest difference first", "a": "where A is better first", "b": "where B is better first"}
IN_TEXT = {"line": "as in the text"}

# Splits a sentence into words, spaces and punctuation; in scripts without spaces, e.g. Chinese, into characters.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_PARTS = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+|\s+|[^\w\s]")

MAX_WORD_PAIRS = 4_000_000
"""Most pairs of words to compare; longer sentences are marked as a whole."""

Marked = list[tuple[str, bool]]
"""A sentence in pieces: (text, whether the other sentence lacks it)."""

SORT = """
const list = document.getElementById("pairs"), by = document.getElementById("order");
by.addEventListener("change", () => {
  const of = { difference: e => -Math.abs(e.dataset.d), a: e => +e.dataset.d, b: e => -e.dataset.d,
    line: e => +e.dataset.line }[by.value];
  list.append(...[...list.children].sort((x, y) => of(x) - of(y) || x.dataset.line - y.dataset.line));
});
"""


def page(c: Comparison) -> str:
    """Make a self-contained HTML page."""
    body = "".join([_head(c), _figures(c), _charts(c), _sentences(c), _facts(c)])
    css = kit.neighbour_texts(__file__, "curves.css", "comparison.css")
    return kit.page("compare", f"{c.a.name} and {c.b.name}", body, css, SORT if c.sentences else "")


def _head(c: Comparison) -> str:
    names = kit.key((colour(i), f"{letter}: {side.name}") for i, (letter, side) in enumerate(_sides(c)))
    return f'<h1>A and B on {c.lines:,} lines</h1>{names}<p class="lead">{escape(sentence_of(c))}</p>'


def _sides(c: Comparison) -> Sequence[tuple[str, Side]]:
    return (("A", c.a), ("B", c.b))


def _figures(c: Comparison) -> str:
    lines = [tuple(map(escape, row)) for row in rows(c)]
    note = (
        f"Both models translate every batch of up to {c.options['batch']} lines in turns, each in its own process. Its "
        "peak memory includes Python and all libraries."
    )
    if c.measures:
        note += (
            " In brackets: the interval of 95 % of 1,000 resamples of the lines, the same for both models. p: how "
            "likely the other model is as good or better (paired bootstrap; below 0.05 counts as a difference)."
        )
    elif any(c.likelihoods):
        note += (
            " log p: of an output given its source, the mean over lines. A model that gives the other's output more "
            "probability has missed it in its own search."
        )
    table = kit.data_table(("", "A", "B", "B beside A"), lines, numbers=(1, 2), named=True)
    return f'{kit.card(table)}<p class="soft">{escape(note)}</p>'


def _charts(c: Comparison) -> str:
    drawn = []
    if len(c.sentences) > 1 and c.measures:
        ordered = sorted(sentence.difference for sentence in c.sentences)
        curve: Curve = [(place, value) for place, value in enumerate(ordered, 1)]
        drawn.append(figure("chrF of B minus chrF of A, each line that differs", [(0, "B - A", curve)], unit="place"))
    speeds = [(i, letter, _speeds(side)) for i, (letter, side) in enumerate(_sides(c)) if side.tokens]
    if speeds and c.batches > 1:
        drawn.append(figure("output tokens a second, batch by batch, longest lines first", speeds, unit="batch"))
    return f'<div class="charts">{"".join(drawn)}</div>'


def _speeds(side: Side) -> Curve:
    pairs = zip(side.tokens or (), side.seconds, strict=True)
    return [(number, tokens / max(seconds, 1e-9)) for number, (tokens, seconds) in enumerate(pairs, 1)]


def _sentences(c: Comparison) -> str:
    if not c.sentences:
        return ""
    first = c.sentences[:SHOWN]
    of = f" of {len(c.sentences):,}" if len(first) < len(c.sentences) else ""
    count = f'<span class="soft">{len(first):,}{of} lines;</span>'
    orders = ORDERS | IN_TEXT if c.measures else {"difference": "least alike first"} | IN_TEXT
    options = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in orders.items())
    control = f'<label for="order">Order</label><select id="order">{options}</select>'
    cards = "".join(map(_card, first))
    return f'<h2>Lines that differ</h2><div class="controls">{count}{control}</div><div id="pairs">{cards}</div>'


def _card(s: SentencePair) -> str:
    first, second = marked(s.a, s.b)
    parts = [("source", escape(s.source))]
    if s.reference is not None:
        parts.append(("reference", escape(s.reference)))
    parts.append((f"A {_score(s.score_a)}", _html(first, "a") + _log_p(s, "a")))
    parts.append((f"B {_score(s.score_b)}", _html(second, "b") + _log_p(s, "b")))
    body = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in parts)
    return (
        f'<article class="card pair" data-line="{s.line}" data-d="{s.difference:.4f}" aria-label="line {s.line}">'
        f"<dl><dt>line</dt><dd>{s.line:,}</dd>{body}</dl></article>"
    )


def marked(a: str, b: str) -> tuple[Marked, Marked]:
    """Mark in both sentences the words that the other lacks: "a b", "a c" -> [("a ", False), ("b", True)] and so on.

    The pieces of each, joined, are the sentence.
    """
    if a == b:
        return [(a, False)], [(b, False)]
    words = _PARTS.findall(a), _PARTS.findall(b)
    if len(words[0]) * len(words[1]) > MAX_WORD_PAIRS:
        return [(a, True)], [(b, True)]
    codes = SequenceMatcher(None, *words, autojunk=False).get_opcodes()
    first = ((words[0][i:j], tag != "equal") for tag, i, j, _, _ in codes)
    second = ((words[1][i:j], tag != "equal") for tag, _, _, i, j in codes)
    return list(_joined(first)), list(_joined(second))


def _joined(pieces: Iterator[tuple[Sequence[str], bool]]) -> Iterator[tuple[str, bool]]:
    for differs, group in groupby(((word, differs) for words, differs in pieces for word in words), lambda p: p[1]):
        yield "".join(word for word, _ in group), differs


def _score(value: float | None) -> str:
    return "" if value is None else f'<span class="score" title="chrF">{value:.1f}</span>'


def _log_p(s: SentencePair, of: str) -> str:
    """The log p of both models for one output: `of` is "a" or "b"."""
    parts = [f"{name.upper()} {value:.2f}" for name in "ab" if (value := s.log_p.get(f"{name} of {of}")) is not None]
    return f'\n<span class="score">log p by {", by ".join(parts)}</span>' if parts else ""


def _html(pieces: Marked, name: str) -> str:
    text = "".join(f'<mark class="{name}">{escape(part)}</mark>' if new else escape(part) for part, new in pieces)
    return text or f'<span class="soft">{NONE}</span>'


def _facts(c: Comparison) -> str:
    names = dict.fromkeys(name for _, side in _sides(c) for name in side.facts)
    lines = [[escape(name), *(escape(side.facts.get(name, NONE)) for _, side in _sides(c))] for name in names]
    table = kit.data_table(("", "A", "B"), lines, named=True)
    options = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in c.options.items() if value is not None)
    signatures = "".join(f"<li>{escape(m.name)}: {escape(m.signature)}</li>" for m in c.measures if m.signature)
    versions = ", ".join(f"{name} {value}" for name, value in c.versions.items())
    return f"<h2>What was compared</h2>{kit.card(table)}" + kit.card(
        f'<p>Search: {escape(options)}.</p><ul>{signatures}</ul><p class="soft">{escape(versions)}</p>'
    )


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
