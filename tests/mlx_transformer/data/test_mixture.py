"""Several corpora: shares that are exact in every epoch, every pair as often as the others, bounds that hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transformer.data.batches import SortedBatches, TokenBatches
from mlx_transformer.data.epochs import Mixture, shares
from mlx_transformer.data.ragged import Pairs
from mlx_transformer.system.errors import UserError

EOS = 2
CORPORA = st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100)), min_size=1, max_size=4)


def pairs(count: int, seed: int = 0, longest: int = 20) -> Pairs:
    """The first source token says which pair it is."""
    random = np.random.RandomState(seed)
    lengths = random.randint(2, longest, (count, 2)).tolist()
    return Pairs(
        [[1000 + i, *[5] * (s - 2), EOS] for i, (s, _) in enumerate(lengths)],
        [[6] * (t - 1) + [EOS] for _, t in lengths],
    )


@given(CORPORA, st.integers(0, 3))
def test_shares_are_exact_and_pairs_are_seen_equally_often(corpora, seed):
    sizes, weights = zip(*corpora, strict=True)
    text = pairs(sum(sizes), seed)
    mixture = Mixture(text, sizes, weights, 99, seed)
    own = np.repeat(np.arange(len(sizes)), sizes)
    slots, seen = np.arange(len(mixture)), Counter()
    for epoch in range(70):
        members = mixture.members(slots, epoch)
        seen.update(members.tolist())
        assert np.bincount(own[members], minlength=len(sizes)).tolist() == mixture.counts
        assert (text.source_lengths[members] <= mixture.source_lengths).all()
        assert (text.target_lengths[members] <= mixture.target_lengths).all()
        assert all(abs(seen[i] - (epoch + 1) * mixture.counts[own[i]] / sizes[own[i]]) < 1 for i in range(len(text)))
    assert mixture.members(slots, 10**9).max() < len(text)


@given(st.integers(1, 10**7), st.lists(st.floats(0.001, 1000), min_size=1, max_size=6))
def test_shares_follow_the_weights(total, weights):
    counts = shares(total, weights)
    exact = [weight / sum(weights) * total for weight in weights]
    assert all(abs(count - part) < 1 or count == 1 for count, part in zip(counts, exact, strict=True))
    assert sum(counts) == total or min(counts) == 1


def test_weights_as_sizes_leave_every_pair_once_an_epoch():
    text = pairs(90)
    mixture = Mixture(text, [30, 60], [1, 2], 99, 1)
    for epoch in (0, 1, 7):
        assert sorted(mixture.members(np.arange(90), epoch).tolist()) == list(range(90))
    assert sorted(mixture.source_lengths) == sorted(text.source_lengths)


@pytest.mark.parametrize("kind", [TokenBatches, SortedBatches])
def test_batches_of_every_epoch_are_cut_alike_and_hold_the_shares(kind):
    text = pairs(400, longest=30)
    mixture = Mixture(text, [300, 100], [1, 3], 28, 1)
    batches = kind(mixture, batch_tokens=200, max_length=28, seed=3)
    kept = len(mixture)
    assert batches.dropped == 400 - kept
    seen = Counter()
    for epoch in range(6):
        found = list(batches.batches(epoch))
        assert len(found) == len(batches)
        assert all(batch.shape[0] * max(batch.shape[1:]) <= 200 for batch in found)
        first = np.concatenate([batch.source[:, 0] for batch in found])
        members = first[first != 0] - 1000
        assert len(members) == kept
        assert np.sum(members >= 300) == mixture.counts[1]
        assert abs(mixture.counts[1] - 0.75 * kept) <= 0.5
        seen.update(members.tolist())
    assert len(seen) == kept  # six epochs go through the first corpus, of which one takes a third


@pytest.mark.parametrize("kind", [TokenBatches, SortedBatches])
def test_resuming_at_any_step_sees_the_same_batches(kind):
    def batches():
        return kind(Mixture(pairs(80), [50, 30], [5, 1], 99, 4), batch_tokens=100, seed=4)

    walk, count = batches().from_step(0), len(batches())
    straight = [next(walk) for _ in range(2 * count + 3)]
    for step in (0, 1, count - 1, count, 2 * count + 1):
        again = next(batches().from_step(step))
        np.testing.assert_array_equal(again.source, straight[step].source)
        np.testing.assert_array_equal(again.target_out, straight[step].target_out)
    other = next(kind(Mixture(pairs(80), [50, 30], [5, 1], 99, 5), batch_tokens=100, seed=5).from_step(0))
    assert not np.array_equal(other.source, straight[0].source)


def test_a_corpus_of_long_pairs_alone_is_named():
    with pytest.raises(UserError, match="corpus 2: no pair has 1 to 9 tokens a side; raise max_length"):
        Mixture(Pairs([[5] * 5, [5] * 10], [[6] * 5, [6] * 5]), [1, 1], [1, 1], 9, 1)
