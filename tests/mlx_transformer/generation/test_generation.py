"""The search against enumeration and against a plain beam search, on a model that is a table."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import Toy, close, exhaustive, penalty, plain_beam

from mlx_transformer.decoding.arrays import NumpyArrays, first_of, top_k
from mlx_transformer.decoding.options import Options, expected_tokens
from mlx_transformer.decoding.search import batches, generate, search
from mlx_transformer.decoding.steps import running_sentences
from mlx_transformer.system.errors import UserError

ROWS = [[3, 4, 2], [2], [5, 2], [6, 3, 7, 5, 2], [4, 2], [7, 7, 2]]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5, -0.7])
@pytest.mark.parametrize(("min_new", "prefix"), [(0, []), (2, []), (0, [3]), (3, [4, 3])])
def test_a_beam_of_everything_finds_the_best_of_all_outputs(alpha, min_new, prefix, monkeypatch):
    monkeypatch.setattr(
        "mlx_transformer.decoding.search.check_options", lambda *_: None
    )  # nobody may ask for so wide a one
    toy = Toy(vocab_size=5, seed=3)
    results = search(
        toy, [[3, 2]], [prefix], beam=64, n_best=20, max_new_tokens=4, min_new_tokens=min_new, length_penalty=alpha
    )
    expected = exhaustive(toy, [3, 2], 4, alpha, min_new, prefix)
    close(results[0], expected[:20])
    assert len(results[0]) == min(20, len(expected))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("alpha", [0.6, 0.0, -1.0, 2.0])
@pytest.mark.parametrize("beam", [2, 3, 5])
def test_narrow_beams_follow_the_rules(beam, alpha, early):
    for seed in range(4):
        toy = Toy(seed=seed, eos_bias=seed - 1.0)
        results = search(
            toy,
            ROWS,
            beam=beam,
            n_best=beam,
            max_new_tokens=9,
            length_penalty=alpha,
            early_stopping=early,
            min_new_tokens=seed,
        )
        for row, hypotheses in zip(ROWS, results, strict=True):
            close(hypotheses, plain_beam(toy, row, beam, 9, alpha, seed, early=early))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.6, -1.0])
def test_the_penalty_may_be_a_power_of_the_length(alpha, early):
    for seed in range(4):
        toy = Toy(seed=seed, eos_bias=seed - 1.0)
        options = dict(beam=3, n_best=3, max_new_tokens=9, length_penalty=alpha, early_stopping=early)
        results = search(toy, ROWS, penalty_form="length", **options)
        for row, hypotheses in zip(ROWS, results, strict=True):
            close(hypotheses, plain_beam(toy, row, 3, 9, alpha, early=early, form="length"))
        assert alpha == -1.0 or results != search(toy, ROWS, **options)


def test_ragged_prefixes_with_a_beam():
    toy = Toy(seed=5)
    prefix = [[3, 4, 5], [], [6], [7, 7], [4], []]
    results = search(toy, ROWS, prefix, beam=3, n_best=3, max_new_tokens=7)
    for row, forced, hypotheses in zip(ROWS, prefix, results, strict=True):
        assert all(h.ids[: len(forced)] == forced for h in hypotheses)
        close(hypotheses, plain_beam(toy, row, 3, 7, 0.6, prefix=forced))


@pytest.mark.fast("4111")
@pytest.mark.parametrize("vocab_size", [4000, 4111])
def test_a_large_vocabulary_takes_the_blocked_top_k(vocab_size):
    toy = Toy(vocab_size=vocab_size, seed=1, eos_bias=4.0)
    results = search(toy, ROWS[:3], beam=4, n_best=4, max_new_tokens=5)
    for row, hypotheses in zip(ROWS[:3], results, strict=True):
        close(hypotheses, plain_beam(toy, row, 4, 5, 0.6))


def test_default_limit_is_fifty_more_than_the_source_up_to_the_model():
    toy = Toy(eos_bias=-50.0)  # never ends by itself; the model has 64 positions
    rows = [[2], [3, 4, 5, 2], [3] * 19 + [2]]
    assert [len(ids) for ids in generate(toy, rows)] == [51, 54, 64]
    assert [len(ids) for ids in generate(toy, rows, beam=2)] == [51, 54, 64]


def test_greedy_is_the_argmax_and_its_score_the_formula():
    toy = Toy(seed=8, eos_bias=1.0)
    for row, (hypothesis,) in zip(ROWS, search(toy, ROWS, max_new_tokens=12, length_penalty=0.8), strict=True):
        ids, total = [], 0.0
        while len(ids) < 12 and (not ids or ids[-1] != 2):
            logp = toy.log_probabilities(row, ids)
            ids.append(max((id for id in range(8) if id not in (0, 1)), key=lambda id: logp[id]))
            total += logp[ids[-1]]
        close([hypothesis], [(ids[:-1] if ids[-1] == 2 else ids, total / penalty(len(ids), 0.8))])
    for row, ids in zip(ROWS, generate(toy, ROWS, max_new_tokens=12), strict=True):
        (plain, _), *_ = plain_beam(toy, row, 1, 12, 0.6, early=True)
        assert ids == plain


def test_minimum_and_maximum_count_eos():
    toy = Toy(eos_bias=50.0)  # would end at once
    assert generate(toy, ROWS) == [[]] * len(ROWS)
    for beam in (1, 3):
        assert {len(ids) for ids in generate(toy, ROWS, min_new_tokens=3, max_new_tokens=8, beam=beam)} == {3}
        assert {len(ids) for ids in generate(toy, ROWS, min_new_tokens=4, max_new_tokens=4, beam=beam)} == {4}
    for ids in generate(Toy(eos_bias=-50.0), ROWS, max_new_tokens=5, beam=3):
        assert len(ids) == 5
        assert not {0, 1, 2} & set(ids)


def test_n_best_is_in_order_and_distinct():
    for hypotheses in search(Toy(seed=2), ROWS, beam=6, n_best=6, max_new_tokens=8):
        scores = [h.score for h in hypotheses]
        assert len(scores) == 6
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(h.ids) for h in hypotheses}) == 6


def test_generate_returns_the_best_alone():
    """More of them are not silently left out."""
    with pytest.raises(UserError, match="n_best=2: generate returns only the best output; search returns several"):
        generate(Toy(seed=2), ROWS, beam=2, n_best=2)


def test_early_stopping_takes_fewer_steps():
    steps = {}
    for early in (False, True):
        toy = Toy(seed=4, eos_bias=2.0, spread=0.5)
        search(toy, ROWS, beam=3, max_new_tokens=40, early_stopping=early, length_penalty=2.0)
        steps[early] = toy.steps
    assert steps[True] < steps[False]


@pytest.mark.parametrize("options", [{}, {"beam": 4, "n_best": 4}, {"sample": True, "seed": 7, "top_p": 0.9}])
def test_batches_change_nothing(options):
    rows = np.random.default_rng(0).integers(3, 8, (40, 6)).tolist()
    rows = [[*row[: 1 + i % 6], 2] for i, row in enumerate(rows)]
    prefix = [[3, 4][: i % 3] for i in range(40)]
    together = Toy(seed=1, eos_bias=1.0)
    results = search(together, rows, prefix, max_new_tokens=25, **options)
    assert together.batches == [40]
    separate = Toy(seed=1, eos_bias=1.0)
    assert search(separate, rows, prefix, max_new_tokens=25, batch_tokens=40, **options) == results
    assert len(separate.batches) > 8
    if not options.get("sample"):  # a draw belongs to its row number
        single = [
            search(Toy(seed=1, eos_bias=1.0), [r], [p], max_new_tokens=25, **options)[0]
            for r, p in zip(rows, prefix, strict=True)
        ]
        assert [[h.ids for h in hs] for hs in single] == [[h.ids for h in hs] for hs in results]


def test_finished_rows_leave_the_batch():
    sizes = []

    class Watched(Toy):
        def start(self, rows):
            decoder, logits = super().start(rows)
            step = decoder.step
            decoder.step = lambda ids: sizes.append(ids.shape[0]) or step(ids)
            return decoder, logits

    rows = [[3 + i % 5, 3 + i // 5, 2] for i in range(25)]
    for options, width in (({}, 1), ({"beam": 3}, 3)):
        sizes.clear()
        generate(Watched(seed=2, eos_bias=1.5), rows, max_new_tokens=30, **options)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < sizes[0] / 2
        assert all(n % width == 0 for n in sizes)


def test_who_goes_on_stays_where_it_can():
    """No sentence within the new size moves; those beyond it take the places that became free, in their order."""
    finished = np.array([0, 1, 0, 1, 1, 0, 0, 1], bool)
    assert running_sentences(finished, 4).tolist() == [0, 5, 2, 6]
    assert running_sentences(~finished, 4).tolist() == [4, 1, 7, 3]
    assert running_sentences(finished[:1], 1).tolist() == [0]


def test_batches_hold_the_budget_and_everything_once():
    lengths = np.random.default_rng(1).integers(1, 60, 500)
    limits, options = lengths + 50, Options(beam=2, batch_tokens=2000)
    indices = list(batches(lengths, lengths + 10, limits, options))
    assert sorted(np.concatenate(indices).tolist()) == list(range(500))
    for index in indices:
        assert len(index) * 2 * (2 * lengths[index].max() + 10) <= 2000
    assert len(indices) < 50
    assert [len(index) for index in batches(*[np.array([5000])] * 3, options)] == [1]
    limits = np.array([10, 55])
    bounded = list(batches(np.array([900, 5]), limits, limits, Options(batch_tokens=10**6), positions=920))
    assert [index.tolist() for index in bounded] == [[0], [1]]


def test_batches_are_planned_for_translations_as_long_as_their_sources():
    lengths, limits, prefix = np.array([9, 9, 9, 60]), np.array([59, 59, 59, 40]), [[], [4] * 20, [], []]
    prefix = [np.array(row, int) for row in prefix]
    assert expected_tokens(lengths, limits, Options(), prefix).tolist() == [9, 20, 9, 40]
    assert expected_tokens(lengths, limits, Options(min_new_tokens=12), prefix).tolist() == [12, 20, 12, 40]
    assert expected_tokens(lengths, limits, Options()).tolist() == [9, 9, 9, 40]
    rows = []

    class Watched(Toy):
        def start(self, sources):
            rows.append(len(sources))
            return super().start(sources)

    for options in ({}, {"max_new_tokens": 60}, {"min_new_tokens": 30}):
        generate(Watched(seed=2), [[3, 4, 2]] * 20, batch_tokens=120, **options)
    assert rows == [20, 20, *[3] * 6, 2]  # 3 source tokens and 3 new ones, or 30


def test_nothing_in_nothing_out():
    assert search(Toy(), []) == []


def test_decoder_only_counts_its_prompt():
    toy = Toy(eos_bias=-50.0, architecture="decoder", encoder_layers=0, tie_embeddings="target-output")
    assert [len(ids) for ids in generate(toy, [[3], [4] * 60])] == [51, 5]
    with pytest.raises(UserError, match="prompt row 0: 65 tokens, the model takes at most 64"):
        generate(toy, [[3] * 65])
    with pytest.raises(UserError, match="max_new_tokens=6: prompt row 1 leaves room for 5 tokens"):
        generate(toy, [[3], [4] * 60], max_new_tokens=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam=0 must be a whole number of at least 1"),
        ({"beam": 2, "n_best": 3}, "n_best=3 is more than beam=2"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 is more than max_new_tokens=4"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 65}, "max_new_tokens=65: source row 0 leaves room for 64"),
        ({"sample": True, "temperature": 0.0}, "temperature=0.0 must be a number of at least 0.001 and at most 1,000"),
        ({"sample": True, "temperature": 1e-40}, "temperature=1e-40 must be"),
        ({"sample": True, "top_p": 1e-46}, "top_p=1e-46 must be"),
        ({"beam": 9}, "beam=9 is more than the vocabulary's 8 tokens"),
        ({"beam": 2**32}, "beam=4294967296 must be .* at most 256"),
        ({"length_penalty": 1000}, "length_penalty=1000 must be a number of at least -10 and at most 10"),
        ({"length_penalty": -65536.0}, "length_penalty=-65536.0 must be"),
        ({"min_new_tokens": 2**63}, "min_new_tokens=9223372036854775808 must be"),
        ({"max_new_tokens": 10**20}, "max_new_tokens=100000000000000000000 must be"),
        ({"top_k": 2**64, "sample": True}, "top_k=18446744073709551616 must be"),
        ({"batch_tokens": 2**40}, "batch_tokens=1099511627776 must be"),
        ({"early_stopping": 1}, "early_stopping=1 must be true or false"),
        ({"sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"sample": True, "top_p": 0.0}, "top_p=0.0"),
        ({"sample": True, "top_k": -1}, "top_k=-1"),
        ({"sample": True, "beam": 2}, "sample=True .* beam=2"),
        ({"top_k": 5}, "top_k=5 .* sample=True"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"penalty_form": "hf"}, "penalty_form=.hf. is not one of gnmt, length"),
        ({"prefix": [[3]] * 2}, "prefix has 2 rows for 6 inputs"),
        ({"prefix": [[3, 2], [], [], [], [], []]}, "prefix row 0, position 1: eos_id 2 can't be forced"),
        ({"prefix": [[3, 9], [], [], [], [], []]}, "prefix row 0, position 1: id 9 is outside the vocabulary"),
        (
            {"prefix": [[3, 3], [], [], [], [], []], "max_new_tokens": 1},
            "prefix row 0: 2 tokens, .* is 1",
        ),
    ],
)
def test_contradictions_are_named(options, message):
    with pytest.raises(UserError, match=message):
        search(Toy(), ROWS, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[3, 2], []], "source row 1 is empty"),
        ([[3, 2], [3, 8]], r"source row 1, position 1: id 8 is outside the vocabulary \(0 to 7\)"),
        ([[3, -1]], "source row 0, position 1: id -1"),
        ([[3.5]], "source row 0: ids must be whole numbers"),
        ([[3] * 65], "source row 0: 65 tokens, the model takes at most 64"),
    ],
)
def test_bad_ids_are_named(rows, message):
    with pytest.raises(UserError, match=message):
        generate(Toy(), rows)


def test_weights_that_are_not_finite_are_noticed():
    for beam in (1, 2):
        toy = Toy()
        toy.device_table[:] = np.nan
        with pytest.raises(UserError, match="source row 0: the model's logits are not finite"):
            generate(toy, [[3, 2]], beam=beam)


@pytest.mark.parametrize("width", [3, 8, 100, 700, 4096, 5001])
def test_top_k_is_a_stable_sort(width):
    rng = np.random.default_rng(width)
    for count in (1, 2, 8):
        if count > width:
            continue
        x = rng.integers(0, 40, (5, width)).astype(np.float32)  # many ties
        order = np.argsort(-x, axis=1, kind="stable")[:, :count]
        for choose in (top_k, first_of) if width <= 100 else (top_k,):
            values, indices = choose(NumpyArrays(), x, count)
            np.testing.assert_array_equal(indices, order)
            np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=1))
