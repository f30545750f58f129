"""BPE dropout: other tokens of the same text, decided by (seed, epoch, pair) alone, within bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlx_transformer.data.batches import SortedBatches
from mlx_transformer.data.training_text import BpeDropout, DroppedPairs
from mlx_transformer.text.tokenizer import Tokenizer

LINES = [
    "Two young, white males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "  spaces,\tdigits 1234 and 漢字 𝄞 \0 ",
] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 400)


def numbers(seed: int):
    random = np.random.RandomState(seed)
    while True:
        yield random.random_sample()


def test_without_dropout_tokens_are_the_tokenizers(tokenizer):
    bpe = BpeDropout(tokenizer, 0.0)
    assert [bpe.ids(line, numbers(1)) for line in LINES] == tokenizer.encode_batch(LINES)
    assert bpe.ids("", numbers(1)) == tokenizer.encode("")


def test_with_all_merges_dropped_tokens_are_bytes(tokenizer):
    ids = BpeDropout(tokenizer, 1.0).ids(LINES[2], itertools.repeat(0.5))
    assert len(ids) == len(LINES[2].encode()) + 1
    assert max(ids) < 260


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_text_stays_the_same(tokenizer, dropout):
    bpe, random = BpeDropout(tokenizer, dropout), numbers(3)
    drawn = [bpe.ids(line, random) for line in LINES]
    assert tokenizer.decode_batch(drawn) == LINES
    assert sum(map(len, drawn)) > sum(map(len, tokenizer.encode_batch(LINES)))


def test_the_share_of_a_merge_that_is_made_is_one_minus_p():
    """A word of one possible merge: it is left out with probability p, once."""
    tokenizer = Tokenizer.train(["ab"] * 9, 261)
    bpe, random = BpeDropout(tokenizer, 0.3), numbers(5)
    merged = sum(len(bpe.ids("ab", random)) == 2 for _ in range(4000)) / 4000
    assert abs(merged - 0.7) < 5 * (0.3 * 0.7 / 4000) ** 0.5


def test_the_first_learned_of_the_merges_left_is_made():
    """Merges ab, then bc: abc is ab c, and where ab is left out a bc."""
    tokenizer = Tokenizer.train(["ab"] * 9 + ["bc"] * 5, 262)
    bpe = BpeDropout(tokenizer, 0.5)
    a, b, c, ab, bc = (tokenizer.encode(text)[0] for text in ("a", "b", "c", "ab", "bc"))
    assert bpe.ids("abc", iter([0.9]))[:-1] == [ab, c]  # bc is worse, and not asked for
    assert bpe.ids("abc", iter([0.1, 0.9]))[:-1] == [a, bc]
    assert bpe.ids("abc", iter([0.1, 0.1]))[:-1] == [a, b, c]


def dropped(tokenizer, seed=1, max_length=60) -> DroppedPairs:
    return DroppedPairs(LINES, LINES[::-1], tokenizer, 0.2, max_length, seed)


def as_lists(rows) -> list[list[list[int]]]:
    return [[row.tolist() for row in side] for side in rows]


def test_tokens_follow_from_seed_epoch_and_pair(tokenizer):
    everything = np.arange(len(LINES))
    whole = as_lists(dropped(tokenizer).rows(everything, 3))
    assert whole == as_lists(dropped(tokenizer).rows(everything, 3))
    assert [side[7:8] for side in whole] == as_lists(dropped(tokenizer).rows(np.array([7]), 3))
    assert whole != as_lists(dropped(tokenizer).rows(everything, 4))
    assert whole != as_lists(dropped(tokenizer, seed=2).rows(everything, 3))
    assert whole[0][0] != whole[0][5]  # the same line in another pair


def test_no_pair_is_longer_than_its_bound(tokenizer):
    tight = max(map(len, tokenizer.encode_batch(LINES))) + 1
    pairs = dropped(tokenizer, max_length=tight)
    assert max(pairs.source_lengths.max(), pairs.target_lengths.max()) == tight
    plain = 0
    for epoch in range(20):
        source, target = pairs.rows(np.arange(len(LINES)), epoch)
        assert all(len(row) <= bound for row, bound in zip(source, pairs.source_lengths, strict=True))
        assert all(len(row) <= bound for row, bound in zip(target, pairs.target_lengths, strict=True))
        assert tokenizer.decode_batch([row.tolist() for row in source]) == LINES
        plain += sum(row.tolist() == tokenizer.encode(line) for row, line in zip(source, LINES, strict=True))
    assert plain > 0  # what would always be too long is there, too


def test_batches_are_cut_alike_in_every_epoch(tokenizer):
    batches = SortedBatches(dropped(tokenizer, max_length=200), batch_tokens=500, max_length=200)
    for epoch in range(4):
        found = list(batches.batches(epoch))
        assert len(found) == len(batches)
        assert all(batch.shape[0] * max(batch.shape[1:]) <= 500 for batch in found)
