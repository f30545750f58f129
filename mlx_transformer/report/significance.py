"""Whether one of two systems translates better, or was lucky with its sentences: paired bootstrap resampling.

Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation". Scores and draws are those of
`sacrebleu --paired-bs`. That keeps all resamples in memory at once, gigabytes for a long text, and gives no interval of
the difference; its p, of the sizes of differences, can contradict one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 12345
RESAMPLES = 1000
TAIL = RESAMPLES // 40
"""Resamples beyond either end of a 95 % interval."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """One score of both systems, in percent. Intervals hold 95 % of the resamples. p: twice the share of them in which
    the other system is as good or better; below 0.05 the interval of the difference leaves 0 out."""

    name: str
    signature: str
    a: float
    b: float
    interval_a: Interval
    interval_b: Interval
    interval: Interval
    """The interval of b - a."""
    p: float

    @property
    def difference(self) -> float:
        return self.b - self.a


@dataclass(frozen=True)
class _Statistics:
    """The statistics of a score: a row for each sentence, whose sums count. `score(sums)` is a percentage."""

    name: str
    signature: str
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    score: Callable[[NDArray[np.float64]], float]


def measures(a: Sequence[str], b: Sequence[str], references: Sequence[str]) -> list[Measure]:
    """Compute BLEU, chrF and exact match of two translations of the same sentences, with the same resamples for all."""
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
    """Compute chrF of each sentence by itself, in percent: steadier on one sentence than BLEU."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    return [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]


def _statistics(a: Sequence[str], b: Sequence[str], references: Sequence[str]) -> list[_Statistics]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    statistics = []
    for name, metric in (("BLEU", BLEU()), ("chrF", CHRF())):
        # As sacreBLEU's own tests of significance do.
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
    p = min(1.0, 2 * (against + 1) / (RESAMPLES + 1))  # never 0, of so few draws
    intervals = (_interval(drawn[:, 0]), _interval(drawn[:, 1]), _interval(differences))
    return Measure(of.name, of.signature, a, b, *intervals, p)


def _interval(values: NDArray[np.float64]) -> Interval:
    ordered = np.sort(values)
    return float(ordered[TAIL]), float(ordered[-TAIL - 1])
