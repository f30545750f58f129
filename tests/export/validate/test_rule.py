"""The rule by itself, and the certified tie."""

import platform
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from export.precision.rounding import from_int8_rows, int8_rows
from export.validate.checks import free_running
from export.validate.checks.free_running import (
    Judged,
    Search,
    choices,
    judge_beam,
    judge_greedy,
    side_by_side,
    until_parting,
)
from export.validate.compare import _openblas, one_blas_thread
from export.validate.reference import Reference
from export.validate.reference.rules import without_end
from export.validate.reference.search import BeamState, beam_search, teacher_forced, token_by_token
from export.validate.rule import UNIT, Budget, Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError

BUDGET = Budget(rms=4.0, max=8.0)
ALL = np.ones((2, 50), bool)


def truth(scale: float = 1.0, valid: np.ndarray = ALL, exact: bool = False) -> Truth:
    rng = np.random.default_rng(0)
    t64 = scale * rng.standard_normal((2, 50, 16))
    t32 = (t64 + 1e-7 * scale * rng.standard_normal(t64.shape)).astype(np.float32)
    return Truth.of(t64, t32, valid, exact)


def judge(got: np.ndarray, known: Truth) -> Measurement:
    return Measurement.of(Deviation.of(got, known), known.scale, ErrorScale.pooled([known.scale]), BUDGET)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_errors_are_judged_by_what_float32_does_whatever_the_scale(scale: float) -> None:
    known = truth(scale)
    noise = np.random.default_rng(1).standard_normal(known.t64.shape) * 1e-7 * scale
    assert judge(known.t64 + 2 * noise, known).passed
    assert judge(known.t64 + 2 * noise, known).rms_ratio == pytest.approx(2, rel=0.2)
    assert not judge(known.t64 + 6 * noise, known).passed


def test_one_wrong_value_is_found_by_the_largest_error() -> None:
    known = truth()
    got = known.t64.copy()
    got[1, 7, 3] += 6e-6
    judged = judge(got, known)
    assert not judged.passed
    assert judged.rms_ratio < 4 < 8 < judged.max_ratio
    assert judged.deviation.index == (1, 7, 3)
    assert judged.deviation.max == pytest.approx(6e-6)
    assert judged.deviation.ulp == pytest.approx(6e-6 / np.spacing(np.float32(abs(known.t64[1, 7, 3]))))


def test_a_tensor_that_float32_gets_exactly_may_still_err_by_a_rounding() -> None:
    t64 = np.ones((1, 3, 4))
    known = Truth.of(t64, t64.astype(np.float32), np.ones((1, 3), bool))
    assert judge(t64 + 2 * UNIT, known).passed
    assert not judge(t64 + 9 * UNIT, known).passed


@pytest.mark.parametrize("count", [1, 40])
def test_a_looked_up_row_with_one_large_number_may_be_rounded_to_int8(count: int) -> None:
    """In steps of its largest number, here 40 times the others' rms."""
    rows = np.random.default_rng(3).standard_normal((1, 40, 64))
    rows[0, :count, 9] = 40.0
    rows[0, 0, 10] = 40 / 127 * 7.49
    known = Truth.of(rows, rows.astype(np.float32), np.ones((1, 40), bool), exact=True)
    rounded = from_int8_rows(*int8_rows(rows[0].astype(np.float32)))[None].astype(np.float64)

    def judged(got: np.ndarray, known: Truth = known) -> Measurement:
        scale = known.scale
        deviation = Deviation.of(got, replace(known, bits=None))
        return Measurement.of(deviation, scale, ErrorScale.pooled([scale]), budget_for("int8", "cpu"))

    assert judged(rounded).passed
    by_rms = replace(known, scale=replace(known.scale, largest=0.0))
    assert not judged(rounded, by_rms).passed
    assert not judged(np.roll(rounded, 1, axis=1)).passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_over_any_budget(value: float) -> None:
    known = truth()
    got = known.t64.copy()
    got[0, 2, 5] = value
    judged = judge(got, known)
    assert (judged.passed, judged.deviation.detail, judged.deviation.index) == (False, "not finite", (0, 2, 5))


def test_padding_does_not_count() -> None:
    valid = ALL.copy()
    valid[1, 30:] = False
    known = truth(valid=valid)
    got = known.t64.copy()
    got[1, 30:] = np.nan
    assert judge(got, known).passed
    got[1, 29] += 1
    assert judge(got, known).deviation.index[:2] == (1, 29)


def test_another_shape_and_a_missing_tensor_fail_in_words() -> None:
    known = truth()
    assert judge(known.t64[:, :3], known).deviation.detail == "shape (2, 3, 16), expected (2, 50, 16)"
    missing = Deviation.of(None, known, "failed: out of memory")
    assert missing.detail == "failed: out of memory"
    assert not Measurement.of(missing, known.scale, known.scale, BUDGET).passed


def test_gathers_are_compared_by_their_bits() -> None:
    known = truth(exact=True)
    assert known.bits is not None
    got = known.bits.copy()
    assert judge(got, known).deviation.same_bits
    got[1, 2, 3] = np.nextafter(got[1, 2, 3], np.float32(9))
    judged = judge(got, known)
    assert not judged.passed
    assert judged.rms_ratio < 4
    assert judged.deviation.detail == "1 values differ in their bits, first [1, 2, 3]"


def test_a_small_sample_leans_on_all_inputs() -> None:
    lucky = ErrorScale(rms=1e-9, max=1e-9, size=1.0, tokens=1, worst=1e-9)
    usual = ErrorScale(rms=1e-7, max=4e-7, size=1.0, tokens=400, worst=3e-7)
    pool = ErrorScale.pooled([lucky, usual])
    rms, largest = lucky.limits(pool)
    assert rms == pytest.approx((1e-14 + 9e-14) ** 0.5, rel=1e-2)  # one token, as bad as the worst of them
    assert largest == 4e-7
    assert usual.limits(pool)[0] == pytest.approx(1e-7, rel=2e-2)  # a large sample stands on its own


def test_a_budget_that_nobody_calibrated_is_an_error() -> None:
    with pytest.raises(UserError, match="no budget for int3 on abacus"):
        budget_for("int3", "abacus")


@pytest.fixture(scope="module")
def model() -> Reference:
    config = TransformerConfig(vocab_size=20, d_model=16, heads=2, d_ff=24, encoder_layers=1, decoder_layers=1)
    rng = np.random.default_rng(5)
    return Reference(config, {name: rng.standard_normal(s) * 0.4 for name, s in parameter_shapes(config).items()})


EIGHT = Options(max_new_tokens=8)
RARE = (17, 18, 19)
SOURCES = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 2]]


def greedy(model: Reference, source: list[int], limit: int) -> list[int]:
    """Without cache or batch: the whole prefix again for each token."""
    c, tokens = model.config, []
    while len(tokens) < limit:
        logits = model([source], [[c.bos_id, *tokens]])[0, -1]
        logits[[c.pad_id, c.bos_id]] = -np.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == c.eos_id:
            return tokens[:-1]
    return tokens


def test_greedy_tokens_are_judged_one_by_one(model: Reference) -> None:
    outputs = [greedy(model, source, 8) for source in SOURCES]
    assert [j for j in judge_greedy(model, SOURCES, outputs, EIGHT, 1e-6) if j.problem or j.tie] == []
    changed = [list(row) for row in outputs]
    changed[1][2] = next(i for i in range(3, 20) if i != outputs[1][2])
    judged = judge_greedy(model, SOURCES, changed, EIGHT, 1e-6)
    assert [bool(j.problem) for j in judged] == [False, True, False]
    assert judged[1].problem.startswith(f"sentence 1, token 2: {changed[1][2]}, reference {outputs[1][2]}, gap ")
    too_long = judge_greedy(model, SOURCES, [[*row, *[3] * 8] for row in outputs], EIGHT, 1e-6)
    assert all(j.problem for j in too_long)


def test_outputs_of_several_searches_share_a_pass(model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is compared as by itself, also in parts; behind where one parts nothing is searched."""
    outputs = [greedy(model, source, 8) for source in SOURCES]
    changed = [outputs[0], [*outputs[1][:2], next(i for i in range(3, 20) if i != outputs[1][2])], outputs[2]]
    drawn = Options(max_new_tokens=9, sample=True, seed=1)
    runs = [(Search("", SOURCES, EIGHT), outputs), (Search("", SOURCES, EIGHT), changed)]
    runs += [(Search("", SOURCES[:2], drawn), [ids for ids, _ in token_by_token(model, SOURCES[:2], drawn)])]
    one_by_one = [choices(model, search.sources, ids, search.options) for search, ids in runs]
    passes: list[int] = []
    monkeypatch.setattr(free_running, "teacher_forced", lambda *a: passes.append(len(a[1])) or teacher_forced(*a))
    for most, expected in ((1 << 25, [8]), (3 * 14 * 20, None)):
        monkeypatch.setattr(free_running, "MOST_SCORES", most)
        passes.clear()
        for found, alone in zip(side_by_side(model, runs), one_by_one, strict=True):
            for row, known in zip(found, alone, strict=True):
                assert [choice[:2] for choice in row] == [choice[:2] for choice in known]
                np.testing.assert_allclose([c.gap for c in row], [c.gap for c in known], atol=1e-12)
        assert passes == expected or (expected is None and sum(passes) == 8 and max(passes) < 8)
    assert until_parting(changed[1], one_by_one[1][1]) == outputs[1][:3]
    assert until_parting(outputs[0], one_by_one[0][0]) == outputs[0]
    with pytest.raises(ValueError, match="longer"):
        side_by_side(model, [(Search("", SOURCES, EIGHT), outputs[:2])])


class Bigrams:
    """Stands in for the reference: what follows a token depends on that token alone."""

    def __init__(self, following: np.ndarray):
        self.config = TransformerConfig(vocab_size=len(following), d_model=4, heads=1, d_ff=4)
        self.following = np.log(following)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> None:
        pass

    def start(self, hidden: None, mask: np.ndarray) -> "Bigrams":
        return self

    def select(self, rows: list[int]) -> "Bigrams":
        return self

    def step(self, ids: list[list[int]], cache: "Bigrams") -> tuple[np.ndarray, "Bigrams"]:
        return self.following[np.array(ids)], self


def test_greedy_search_ends_with_eos_where_a_beam_of_one_goes_on() -> None:
    following = np.full((7, 7), 0.001)
    following[1, 5] = following[6, 6] = 0.994  # bos 5 6 6 6 6 6 ...
    following[5, [2, 6]] = 0.5, 0.495  # or bos 5 eos
    model: Any = Bigrams(following)
    assert token_by_token(model, [[3, 2]], Options(max_new_tokens=20)) == [
        ([5], pytest.approx(np.log(0.994 * 0.5) / (7 / 6) ** 0.6))
    ]
    assert beam_search(model, [[3, 2]], Options(beam=1, max_new_tokens=20))[0].finished[0][1].tokens == (5, *[6] * 19)


def test_a_greedy_divergence_is_accepted_only_at_a_tie(model: Reference) -> None:
    outputs = [greedy(model, source, 8) for source in SOURCES]
    logits = model([SOURCES[0]], [[1, *outputs[0]]])[0, 0]
    logits[[0, 1]] = -np.inf
    second = int(np.argsort(-logits)[1])
    gap = float(np.sort(-logits)[1] - np.sort(-logits)[0])
    other = [[second], *outputs[1:]]
    limit_of_one = [[row[0]] for row in other]
    accepted = judge_greedy(model, SOURCES, limit_of_one, Options(max_new_tokens=1), gap / 2 * 1.01)[0]
    refused = judge_greedy(model, SOURCES, limit_of_one, Options(max_new_tokens=1), gap / 2 * 0.99)[0]
    assert accepted.tie
    assert not accepted.problem
    assert refused.problem
    assert not refused.tie


def every_hypothesis(model: Reference, source: list[int], limit: int) -> list[tuple[float, tuple[int, ...]]]:
    """All sequences that end with eos or at the limit, with log p / lp, best first."""
    c, done, live = model.config, [], [(0.0, ())]
    for length in range(1, limit + 1):
        longer = []
        for log_p, tokens in live:
            logits = model([source], [[c.bos_id, *tokens]])[0, -1]
            scores = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token in set(range(c.vocab_size)) - {c.pad_id, c.bos_id, *RARE}:
                new = (log_p + float(scores[token]), (*tokens, token))
                (done if token == c.eos_id or length == limit else longer).append(new)
        live = longer
    return sorted(((p / ((5 + len(t)) / 6) ** 0.6, t) for p, t in done), reverse=True)


def test_a_beam_as_wide_as_everything_finds_the_best_of_all(model: Reference) -> None:
    sentences = beam_search(model, SOURCES, Options(beam=256, max_new_tokens=3, suppressed=RARE))
    for sentence, source in zip(sentences, SOURCES, strict=True):
        score, tokens = every_hypothesis(model, source, 3)[0]
        assert sentence.finished[0][1].tokens == tokens
        assert sentence.finished[0][0] == pytest.approx(score, abs=1e-12)


def test_sentences_do_not_disturb_each_other(model: Reference) -> None:
    together = beam_search(model, SOURCES, Options(beam=3, max_new_tokens=6))
    for sentence, source in zip(together, SOURCES, strict=True):
        single = beam_search(model, [source], Options(beam=3, max_new_tokens=6))[0]
        assert [h.tokens for _, h in single.finished] == [h.tokens for _, h in sentence.finished]
        assert single.margin == pytest.approx(sentence.margin, rel=1e-9)


def test_a_beam_divergence_is_accepted_only_at_a_tie(model: Reference) -> None:
    states = beam_search(model, SOURCES, Options(beam=3, n_best=2, max_new_tokens=6))
    outputs = [[(without_end(h.tokens, model.config, EIGHT), score) for score, h in s.finished] for s in states]
    first, second, third = outputs[1]
    tie = [replace(s, margin=0.0) for s in states]

    def judged(states: list[BeamState], *found: tuple[list[int], float]) -> Judged:
        judged = judge_beam(model, states, [outputs[0][:2], [*found], outputs[2][:2]], 1e-6)
        assert [judged[0], judged[2]] == [Judged()] * 2
        return judged[1]

    assert judged(states, first, second) == judged(tie, first, second) == Judged()
    score = judged(states, (first[0], first[1] - 1e-4), second)
    assert score.problem == f"sentence 1: score {first[1] - 1e-4:.9g}, reference {first[1]:.9g}"
    assert judged(states, first, (second[0], np.nan)).problem.startswith("sentence 1, number 2: score nan")
    other = judged(states, second, first).problem
    assert re.match(r"sentence 1, token \d: .*, reference .*; closest decision \d.*, a tie would be \d", other)
    assert judged(tie, second, third) == Judged(tie="sentence 1: closest decision of the reference 0")
    assert judged(tie, second, second).problem == "sentence 1: a hypothesis is there twice"
    assert judged(tie, second, first).problem == "sentence 1: the best hypothesis isn't first"
    assert judged(tie, first).problem == "sentence 1: 1 hypotheses, reference 2"
    # At a tie other ids pass only with their own score, which ids that a rule forbids don't have.
    assert judged(tie, (second[0], first[1]), first).problem.startswith(f"sentence 1: score of {second[0]} ")
    for forbidden in ([0, *first[0][1:]], [*first[0], *[5] * 6]):
        assert judged(tie, (forbidden, first[1]), second).problem.endswith("reference -inf")


def test_one_blas_thread_for_the_time_of_a_comparison() -> None:
    import ctypes

    with one_blas_thread() as libraries:
        counts = [get() for _, _, get in _openblas()]
    for library, name, get in _openblas():
        assert isinstance(library, ctypes.CDLL)
        getattr(library, name)(2)
        with one_blas_thread():
            assert get() == 1
        assert get() == 2
        getattr(library, name)(1)
    assert counts == [1] * libraries
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert libraries >= 1  # NumPy's wheel brings one
