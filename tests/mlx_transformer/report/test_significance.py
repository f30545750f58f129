"""Paired bootstrap: sacreBLEU's scores and draws, and what p and intervals say."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from mlx_transformer.report.result import RESAMPLES, measures, sentence_scores

WORDS = "the a man woman dog rides runs sees big small red bicycle".split()


def texts(lines: int = 60, seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """References, and two systems that get a tenth and a third of the words wrong."""
    rng = np.random.default_rng(seed)
    references = [[str(word) for word in rng.choice(WORDS, rng.integers(5, 12))] for _ in range(lines)]

    def worse(share: float) -> list[str]:
        return [" ".join(w if rng.random() > share else "x" for w in line) for line in references]

    return [" ".join(line) for line in references], worse(0.1), worse(0.33)


def test_scores_and_intervals_are_sacrebleus(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    references, a, b = texts()
    metrics = {"BLEU": BLEU(references=[references]), "chrF": CHRF(references=[references])}
    _, theirs = PairedTest([("a", a), ("b", b)], metrics, None, "bs", RESAMPLES)()
    found = {each.name: each for each in measures(a, b, references)}
    for name, key in (("BLEU", "BLEU"), ("chrF", "chrF2")):
        ours = found[name]
        intervals = (ours.interval_a, ours.interval_b)
        for value, (low, high), result in zip((ours.a, ours.b), intervals, theirs[key], strict=True):
            assert value == result.score
            # sacreBLEU gives half its width, of scores computed in float32: a few roundings of either end.
            assert abs((high - low) / 2 - result.ci) <= 16 * np.spacing(np.float32(high))
    assert found["exact match"].a == 100 * sum(x == r for x, r in zip(a, references, strict=True)) / len(references)


def test_a_clear_difference_is_found():
    references, a, b = texts()
    for each in measures(a, b, references):
        assert each.difference < 0
        assert each.interval[1] < 0
        assert each.p == 2 / (RESAMPLES + 1)
    for there, back in zip(measures(a, b, references), measures(b, a, references), strict=True):
        assert (there.p, there.interval) == (back.p, (-back.interval[1], -back.interval[0]))


@pytest.mark.slow
def test_chance_is_not_taken_for_a_difference():
    """Two systems of the same quality: p below 0.05 is as rare as it says."""
    found = []
    for seed in range(10):
        references, a, _ = texts(25, seed)
        _, b, _ = texts(25, 1000 + seed)
        mixed = [x if i % 2 else y for i, (x, y) in enumerate(zip(a, references, strict=True))]
        other = [y if i % 2 else x for i, (x, y) in enumerate(zip(a, references, strict=True))]
        assert b != a
        found += [each.p for each in measures(mixed, other, references)[1:2]]
    assert sum(p < 0.05 for p in found) <= 4  # of 10, each with a chance of one in twenty: more once in 15,000 times
    assert max(found) > 0.5


def test_equal_systems_do_not_differ():
    references, a, _ = texts(10)
    for each in measures(a, list(a), references):
        assert (each.a, each.difference, each.interval, each.p) == (each.b, 0, (0, 0), 1)


def test_p_and_interval_agree():
    found = []
    for seed in range(6):
        references, a, b = texts(12, seed)
        nearly = [y if i < 2 * seed else x for i, (x, y) in enumerate(zip(a, b, strict=True))]
        found += measures(a, nearly, references)
    assert {each.p < 0.05 for each in found} == {True, False}
    assert all(each.p >= 0.05 or each.interval[0] > 0 or each.interval[1] < 0 for each in found)


def test_scores_of_sentences():
    references, a, _ = texts(5)
    assert sentence_scores(references, references) == [100.0] * 5
    assert sentence_scores(a, references) == [
        CHRF().sentence_score(x, [r]).score for x, r in zip(a, references, strict=True)
    ]
    assert sentence_scores([], []) == []
