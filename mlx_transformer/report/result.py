"""The result of a comparison: scores with significance tests, JSON, and the rows that page, terminal and notebook show.

Paired bootstrap resampling tells whether a model is better or was lucky with its sentences (Koehn 2004, "Statistical
Significance Tests for Machine Translation Evaluation"). Scores and draws are the same as in `sacrebleu --paired-bs`.
sacreBLEU itself isn't used for the test, since it keeps all resamples in memory, gigabytes for a long text. It also
gives no interval of the difference, and its p, computed from the sizes of differences, could contradict such an
interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED = 12345
RESAMPLES = 1000
TAIL = RESAMPLES // 40
"""Resamples left out at either end of a 95 % interval."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """A score of both models, e.g. BLEU, in percent. Intervals hold 95 % of the resamples.

    p: twice the share of resamples in which the worse model is as good or better. If p < 0.05, the interval of the
    difference doesn't contain 0.
    """

    name: str
    signature: str
    a: float
    b: float
    interval_a: Interval
    interval_b: Interval
    interval: Interval
    """Of the difference b - a."""
    p: float

    @property
    def difference(self) -> float:
        return self.b - self.a


@dataclass(frozen=True)
class _Statistics:
    """A score's statistics, one row per sentence, e.g. n-gram counts. `score(sum of rows)` is a percentage."""

    name: str
    signature: str
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    score: Callable[[NDArray[np.float64]], float]


def measures(a: Sequence[str], b: Sequence[str], references: Sequence[str]) -> list[Measure]:
    """BLEU, chrF and exact match of two translations of the same sentences; all use the same resamples."""
    statistics = _statistics(a, b, references)
    count = len(references)
    rng = np.random.default_rng(SEED)
    drawn: list[list[tuple[float, float]]] = [[] for _ in statistics]
    for _ in range(RESAMPLES):
        times = np.bincount(rng.choice(count, count, replace=True), minlength=count).astype(np.float64)
        for values, each in zip(drawn, statistics, strict=True):
            values.append((each.score(times @ each.a), each.score(times @ each.b)))
    return [_measure(each, np.array(values)) for each, values in zip(statistics, drawn, strict=True)]


def sentence_scores(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF of each sentence, in percent. On single sentences chrF is more stable than BLEU."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    return [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]


def _statistics(a: Sequence[str], b: Sequence[str], references: Sequence[str]) -> list[_Statistics]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    statistics = []
    for name, metric in (("BLEU", BLEU()), ("chrF", CHRF())):
        # Private methods, as in sacreBLEU's own significance tests.
        of_a, of_b = (np.array(metric._extract_corpus_statistics(h, [references]), np.float64) for h in (a, b))
        statistics.append(_Statistics(name, str(metric.get_signature()), of_a, of_b, _scorer(metric)))
    of_a, of_b = (np.array([[h == r] for h, r in zip(side, references, strict=True)], np.float64) for side in (a, b))
    share = 100 / len(references)
    return [*statistics, _Statistics("exact match", "", of_a, of_b, lambda sums: float(share * sums[0]))]


def _scorer(metric: Any) -> Callable[[NDArray[np.float64]], float]:
    return lambda sums: metric._compute_score_from_stats(sums.tolist()).score


def _measure(of: _Statistics, drawn: NDArray[np.float64]) -> Measure:
    a, b = of.score(of.a.sum(axis=0)), of.score(of.b.sum(axis=0))
    differences = drawn[:, 1] - drawn[:, 0]
    against = min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    p = min(1.0, 2 * (against + 1) / (RESAMPLES + 1))  # never 0, which so few draws couldn't show
    intervals = (_interval(drawn[:, 0]), _interval(drawn[:, 1]), _interval(differences))
    return Measure(of.name, of.signature, a, b, *intervals, p)


def _interval(values: NDArray[np.float64]) -> Interval:
    ordered = np.sort(values)
    return float(ordered[TAIL]), float(ordered[-TAIL - 1])


NONE = "–"
LIKELY = 0.05
"""A smaller p counts as a real difference."""


@dataclass(frozen=True)
class Side:
    """One of the two models. seconds and tokens: per batch; tokens are counted with the model's tokenizer (None if it
    has none). size: bytes of its files."""

    name: str
    facts: dict[str, str]
    size: int
    outputs: list[str]
    seconds: list[float]
    tokens: list[int] | None
    memory: int | None
    """Peak bytes of its process while it translated, with Python and libraries."""
    array_memory: int | None
    overlong: int = 0
    """Lines too long for the model."""

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else sum(self.tokens) / max(sum(self.seconds), 1e-9)

    def to_dict(self) -> dict[str, Any]:
        total = sum(self.seconds)
        lines = sum(bool(line.strip()) for line in self.outputs)
        return {
            "name": self.name,
            **self.facts,
            "file_bytes": self.size,
            "peak_memory_bytes": self.memory,
            **({} if self.array_memory is None else {"peak_array_bytes": self.array_memory}),
            "seconds": round(total, 4),
            "lines_per_second": round(lines / max(total, 1e-9), 2),
            "tokens_per_second": None if self.tokens is None else round(self.tokens_per_second or 0, 2),
            "overlong_lines": self.overlong,
            "batch_seconds": [round(each, 5) for each in self.seconds],
        }


@dataclass(frozen=True)
class Likelihood:
    """A model's log p of its own outputs (`own`) and of the other model's (`other`), each the mean over lines.

    prefers_own: of the `differing` lines, those where it gives its own output more probability. If it gives the other
    output more, its own search has missed that output.
    """

    own: float
    other: float
    lines: int
    prefers_own: int
    differing: int


@dataclass(frozen=True)
class SentencePair:
    """A line with different outputs a and b. Scores are their chrF; without a reference `similarity` is the chrF of b
    against a."""

    line: int
    source: str
    reference: str | None
    a: str
    b: str
    score_a: float | None = None
    score_b: float | None = None
    similarity: float | None = None
    log_p: dict[str, float | None] = field(default_factory=dict)
    """{"a of b": model A's log p of output b, ...}."""

    @property
    def difference(self) -> float:
        """score_b - score_a; without a reference 100 - similarity. In percent."""
        if self.score_a is None or self.score_b is None:
            return 100 - (self.similarity or 0)
        return self.score_b - self.score_a


@dataclass(frozen=True)
class Comparison:
    """Two models on the same lines. sentences: the lines with different outputs, greatest difference first."""

    a: Side
    b: Side
    lines: int
    batches: int
    options: dict[str, Any]
    sentences: list[SentencePair]
    measures: list[Measure] = field(default_factory=list)
    likelihoods: tuple[Likelihood | None, Likelihood | None] = (None, None)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def agreement(self) -> float:
        """Share of lines with the same output, in percent."""
        return 100 * (1 - len(self.sentences) / self.lines)

    def to_dict(self) -> dict[str, Any]:
        scores = {}
        for each in self.measures:
            values = {name: round(getattr(each, name), 4) for name in ("a", "b", "difference", "p")}
            for name in ("interval_a", "interval_b", "interval"):
                values[name] = [round(end, 4) for end in getattr(each, name)]
            scores[each.name.replace(" ", "_").lower()] = {**values, "signature": each.signature}
        likely = {name: value and _plain(value) for name, value in zip("ab", self.likelihoods, strict=True)}
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "lines": self.lines,
            "batches": self.batches,
            "options": self.options,
            "differing": len(self.sentences),
            "agreement": round(self.agreement, 4),
            **({"scores": scores} if scores else {"log_p": likely}),
            "sentences": [_plain(sentence) for sentence in self.sentences],
            "versions": self.versions,
        }

    def __repr__(self) -> str:
        """The result in one line, without the sentences, which would fill pages."""
        return f"Comparison({self.a.name}, {self.b.name}: {sentence_of(self)})"

    def _repr_html_(self) -> str:
        """The figures as a table for notebooks; the sentences are only on the page."""
        from mlx_transformer.page import table

        heads = ("", self.a.name, self.b.name, "")
        return table(sentence_of(self), [heads, *rows(self)], head=True)


class Row(NamedTuple):
    """A row of the table: a figure of both models; `difference` is in words, e.g. "1.50 times as fast"."""

    name: str
    a: str
    b: str
    difference: str = ""


def sentence_of(c: Comparison) -> str:
    """The result in one sentence or two, e.g. "3 of 100 outputs differ (3 %). ..."."""
    differ = len(c.sentences)
    if not differ:
        return f"All {c.lines:,} outputs are the same."
    sentence = f"{differ:,} of {c.lines:,} outputs differ ({100 - c.agreement:.3g} %)."
    if not c.measures:
        return sentence
    bleu = c.measures[0]
    better, worse = ("B", "A") if bleu.difference > 0 else ("A", "B")
    if bleu.p >= LIKELY:
        return f"{sentence} Neither is shown to be better (p = {bleu.p:.2g} for BLEU)."
    return f"{sentence} {better} is better than {worse} by {abs(bleu.difference):.2f} BLEU (p = {bleu.p:.2g})."


def rows(c: Comparison) -> list[Row]:
    """Rows for scores, speed, memory and sizes."""
    return [*map(_score_row, c.measures), *_likelihood_rows(c), *_cost_rows(c.a, c.b)]


def _score_row(m: Measure) -> Row:
    low, high = m.interval
    certain = f"{m.difference:+.2f} ({low:+.2f} to {high:+.2f}), p = {m.p:.2g}"
    unit = " %" if m.name == "exact match" else ""
    return Row(m.name, f"{m.a:.2f}{unit}", f"{m.b:.2f}{unit}", certain)


def _likelihood_rows(c: Comparison) -> list[Row]:
    if c.measures:
        return []
    likelihoods = c.likelihoods

    def cells(text: Any) -> Sequence[str]:
        return [NONE if each is None else text(each) for each in likelihoods]

    return [
        Row("log p of its own output", *cells(lambda each: f"{each.own:.3f}")),
        Row("log p of the other's", *cells(lambda each: f"{each.other:.3f}")),
        Row("its own is likelier", *cells(lambda each: f"{each.prefers_own:,} of {each.differing:,}")),
    ]


def _cost_rows(a: Side, b: Side) -> list[Row]:
    first, second = sum(a.seconds), sum(b.seconds)
    faster = f"{first / second:.2f} times as fast" if min(first, second) > 0 else ""
    rows = [
        Row("tokens a second", _number(a.tokens_per_second), _number(b.tokens_per_second)),
        Row("seconds", f"{first:.2f}", f"{second:.2f}", faster),
        Row("peak memory", _megabytes(a.memory), _megabytes(b.memory), _times(a.memory, b.memory)),
    ]
    if (a.array_memory, b.array_memory) != (None, None):
        rows.append(Row("of it MLX's arrays", _megabytes(a.array_memory), _megabytes(b.array_memory)))
    rows.append(Row("files", _megabytes(a.size), _megabytes(b.size), _times(a.size, b.size)))
    if a.overlong or b.overlong:
        rows.append(Row("lines too long", f"{a.overlong:,}", f"{b.overlong:,}"))
    return rows


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _megabytes(size: int | None) -> str:
    return NONE if size is None else f"{size / 1e6:,.1f} MB"


def _times(a: int | None, b: int | None) -> str:
    return f"{b / a:.2f} times as much" if a and b else ""


def _plain(entry: SentencePair | Likelihood) -> dict[str, Any]:
    values = {name: value for name, value in asdict(entry).items() if value not in (None, {})}
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
