"""Batches that fit their sentences: every pair once an epoch, within the budget, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transformer.data.batches import SortedBatches
from mlx_transformer.system.errors import UserError

EOS = 2


def pairs(lengths, seed=0):
    """Sequences of these (source, target) lengths, eos counted; the first source token numbers the pair."""
    rng = np.random.default_rng(seed)
    source = [[*[1000 + i, *rng.integers(3, 99, s).tolist()][: s - 1], EOS] for i, (s, _) in enumerate(lengths)]
    target = [[*rng.integers(3, 99, t - 1).tolist(), EOS] for _, t in lengths]
    return source, target


def random_pairs(count=300, longest=24, seed=0):
    rng = np.random.default_rng(seed)
    return pairs(
        [(s, max(2, s + d)) for s, d in zip(rng.integers(2, longest, count), rng.integers(-3, 4, count), strict=True)]
    )


def rows_of(batch):
    """(source, target) of every row that is no padding, without padding."""
    pairs = []
    for source, target in zip(batch.source, batch.target_out, strict=True):
        if source.any():
            pairs.append((source[source != 0].tolist(), target[target != 0].tolist()))
    return pairs


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)


@given(LENGTHS, st.integers(80, 300), st.integers(1, 3), st.integers(0, 3))
def test_every_pair_once_an_epoch_within_the_budget(lengths, budget, multiple, epoch):
    source, target = pairs(lengths)
    budget = max(budget, 48 * multiple)
    corpus = SortedBatches(source, target, batch_tokens=budget, row_multiple=multiple, seed=3)
    batches = list(corpus.batches(epoch))
    assert len(batches) == len(corpus)
    all_rows = [row for batch in batches for row in rows_of(batch)]
    assert sorted(all_rows) == sorted(zip(source, target, strict=True))
    for batch in batches:
        rows, longest_source = batch.source.shape
        longest_target = batch.target_out.shape[1]
        assert rows % multiple == 0
        assert rows * max(longest_source, longest_target) <= budget
        assert batch.tokens == (batch.target_out != 0).sum()
        assert (batch.source != 0).sum(axis=1).max() == longest_source
        assert (batch.target_out != 0).sum(axis=1).max() == longest_target
        for before, out in zip(batch.target_in, batch.target_out, strict=True):
            length = int((out != 0).sum())
            assert before[:length].tolist() == ([1, *out[: length - 1]] if length else [])
            assert not before[length:].any()


def test_hardly_any_padding():
    source, target = random_pairs(3000)
    corpus = SortedBatches(source, target, batch_tokens=400)
    batches = list(corpus.batches(0))
    positions = sum(batch.target_out.size for batch in batches)
    tokens = sum(batch.tokens for batch in batches)
    assert tokens / positions > 0.97
    assert sum((batch.source != 0).sum() for batch in batches) / sum(batch.source.size for batch in batches) > 0.9


def test_epochs_differ_and_repeat_by_seed():
    source, target = random_pairs()
    corpora = [SortedBatches(source, target, batch_tokens=300, seed=seed) for seed in (5, 5, 6)]

    def order(corpus, epoch):
        return [rows_of(batch) for batch in corpus.batches(epoch)]

    assert order(corpora[0], 2) == order(corpora[1], 2)
    assert order(corpora[0], 2) != order(corpora[2], 2)
    first, second = order(corpora[0], 0), order(corpora[0], 1)
    assert first != second
    # not only the batches change places: pairs of equal lengths meet others
    assert {str(sorted(batch)) for batch in first} != {str(sorted(batch)) for batch in second}


def test_resuming_at_any_step_sees_the_same_batches():
    source, target = random_pairs(80)
    corpus = SortedBatches(source, target, batch_tokens=200)
    walk = corpus.from_step(0)
    straight = [next(walk) for _ in range(2 * len(corpus) + 3)]
    for step in (0, 1, len(corpus) - 1, len(corpus), 2 * len(corpus) + 1):
        batch = next(corpus.from_step(step))
        np.testing.assert_array_equal(batch.source, straight[step].source)
        np.testing.assert_array_equal(batch.target_out, straight[step].target_out)


def test_the_plan_of_one_corpus():
    """Lengths 2, 2, 2, 4, 4, 8 and 32 tokens: five rows of 4 would be padded to six, so four are taken."""
    corpus = SortedBatches(*pairs([(n, n) for n in (8, 2, 4, 2, 4, 2)]), batch_tokens=32, max_length=8)
    assert sorted(batch.shape for batch in corpus.batches(0)) == [(2, 8, 8), (4, 4, 4)]
    assert sorted(corpus.shapes) == [(2, 8, 8), (4, 4, 4)]


def test_long_pairs_are_dropped_and_counted():
    corpus = SortedBatches(*pairs([(3, 3), (30, 3), (3, 30), (4, 4)]), batch_tokens=64, max_length=10)
    assert corpus.dropped == 2
    assert sum(len(rows_of(batch)) for batch in corpus.batches(0)) == 2
    with pytest.raises(UserError, match="no pair has 1 to 2 tokens"):
        SortedBatches(*pairs([(3, 3)]), batch_tokens=64, max_length=2)
    with pytest.raises(UserError, match="batch_tokens is 20"):
        SortedBatches(*pairs([(30, 30)]), batch_tokens=20)
