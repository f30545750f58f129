"""Documents packed into rows."""

import itertools

import numpy as np
import pytest

from mlx_transformer.data.documents import PackedBatches
from mlx_transformer.system.errors import UserError

EOS, BOS, PAD = 2, 1, 0


def documents(count=60, longest=30, seed=0):
    rng = np.random.default_rng(seed)
    return [[BOS, *rng.integers(5, 50, rng.integers(1, longest)).tolist(), EOS] for _ in range(count)]


def read_back(batches):
    """(what is read, what is to be predicted) of each document of an epoch."""
    found = []
    for batch in batches:
        assert batch.tokens == (batch.targets != PAD).sum()
        for row in range(len(batch.ids)):
            numbers = np.where(batch.ids[row] != PAD, 1, 0) if batch.segments is None else batch.segments[row]
            assert np.array_equal(numbers == 0, batch.ids[row] == PAD)
            for number in range(1, numbers.max() + 1):
                place = numbers == number
                found.append((batch.ids[row][place].tolist(), batch.targets[row][place].tolist()))
    return sorted(found)


def test_every_document_is_learned_once_in_each_epoch():
    given = documents()
    made = PackedBatches(given, batch_tokens=128, row_length=32)
    expected = sorted((ids[:-1], ids[1:]) for ids in given)
    for epoch in (0, 1):
        assert read_back(made.batches(epoch)) == expected
    assert {batch.ids.shape for batch in made.batches(0)} == {(4, 32)}
    first, second = ([batch.ids.tobytes() for batch in made.batches(epoch)] for epoch in (0, 1))
    assert sorted(first) != sorted(second)
    assert len(made) == len(first)


def test_rows_are_nearly_full():
    made = PackedBatches(documents(2000), batch_tokens=1024, row_length=64)
    slots = sum(batch.ids.size for batch in made.batches(0))
    assert sum(batch.tokens for batch in made.batches(0)) > 0.98 * (slots - 1024)  # the last batch may be empty


def test_a_long_document_is_cut_and_nothing_of_it_lost():
    ids = [*range(5, 45), EOS]
    made = PackedBatches([[BOS, *ids]], batch_tokens=64, row_length=16)
    pieces = sorted(read_back(made.batches(0)), key=lambda piece: piece[1][0] if piece[1][0] != EOS else 99)
    assert [len(targets) for _, targets in pieces] == [16, 16, 9]
    assert [token for _, targets in pieces for token in targets] == ids
    # Each piece begins with the token before it.
    assert [read for read, _ in pieces] == [[BOS, *ids[:15]], ids[15:31], ids[31:40]]


def test_a_prompt_is_read_and_not_learned():
    rows = [[BOS, 5, 6, 7, EOS], [BOS, 8, 9, EOS], [BOS, *[4] * 16, 3, EOS]]
    learned = [[id not in (BOS, 4, 5, 6) for id in ids] for ids in rows]
    made = PackedBatches(rows, learned, batch_tokens=32, row_length=16)
    assert made.dropped == 1
    assert read_back(made.batches(0)) == [([BOS, 5, 6, 7], [PAD, PAD, 7, EOS]), ([BOS, 8, 9], [8, 9, EOS])]
    batch = next(made.batches(0))
    assert batch.tokens == 5
    assert batch.segments is not None


def test_of_a_long_conversation_the_parts_with_answers_are_read():
    ids = [BOS, *range(5, 45), EOS]
    learned = [id in (8, 30, 31) for id in ids]
    made = PackedBatches([ids], [learned], batch_tokens=32, row_length=8)
    assert [[t for t in targets if t != PAD] for _, targets in read_back(made.batches(0))] == [[8], [30, 31]]


def test_rows_of_one_document_need_no_mask():
    made = PackedBatches([[BOS, *[5] * 12, EOS], [BOS, *[6] * 12, EOS]], batch_tokens=32, row_length=16)
    assert next(made.batches(0)).segments is None


def test_resuming_goes_on_where_it_was():
    made = PackedBatches(documents(), batch_tokens=64, row_length=32, seed=3)
    whole = [batch.ids for batch in itertools.islice(made.from_step(0), 2 * len(made))]
    later = list(itertools.islice(made.from_step(5), 2 * len(made) - 5))
    assert all(np.array_equal(a, b.ids) for a, b in zip(whole[5:], later, strict=True))


def test_what_does_not_fit():
    with pytest.raises(
        UserError, match=r"batch_tokens is 20; 2 rows of max_length = 16 need 32: raise batch_tokens or"
    ):
        PackedBatches([[BOS, 5, EOS]], batch_tokens=20, row_length=16)
    assert PackedBatches([[BOS, 5, EOS]], batch_tokens=20, row_length=16, grow=True).batch_tokens == 32
    with pytest.raises(UserError, match="no document fits rows of 16 tokens; raise max_length"):
        PackedBatches([[BOS, *[4] * 16, 5, EOS]], [[False] * 17 + [True] * 2], row_length=16)
