"""Hidden tokens, words and spans."""

import numpy as np
import pytest

from mlx_transformer.data.batches import SortedBatches, TokenBatches
from mlx_transformer.data.documents import DenoisingBatches, MaskedBatches

PAD, EOS, MASK, V = 0, 2, 100, 101


def texts(count=400, seed=0):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(4, 100, rng.integers(1, 40)).tolist(), EOS] for _ in range(count)]


def clean(given, kind=TokenBatches):
    return kind(given, given, batch_tokens=512, seed=4)


@pytest.mark.parametrize("kind", [TokenBatches, SortedBatches])
def test_masked_tokens(kind):
    given = texts()
    batches = MaskedBatches(clean(given, kind), MASK, range(4, 100))
    plain = {tuple(ids) for ids in given}
    shown, count, seen = [], 0, 0
    for batch in batches.batches(0):
        assert batch.tokens == (batch.targets != PAD).sum()
        restored = batch.ids.copy()
        for row in range(len(restored)):
            learned = batch.targets[row] != PAD
            places = batch.picked[row][learned]
            length = int((batch.ids[row] != PAD).sum())
            if not length:
                assert not learned.any()
                continue
            assert len(set(places)) == len(places) == max(1, round(0.15 * (length - 1)))
            restored[row, places] = batch.targets[row][learned]
            assert tuple(restored[row, :length]) in plain
            shown += [(batch.ids[row, p], restored[row, p]) for p in places]
            count, seen = count + len(places), seen + length - 1
        assert not (batch.targets == EOS).any()
    assert seen == sum(len(ids) - 1 for ids in given)
    masked = sum(now == MASK for now, _ in shown) / count
    same = sum(now == before for now, before in shown) / count
    assert masked == pytest.approx(0.8, abs=0.05)
    assert same == pytest.approx(0.1, abs=0.04)


def test_whole_words():
    given = texts(200)
    words = [[i // 3 for i in range(len(ids) - 1)] + [500] for ids in given]
    batches = MaskedBatches(clean(given), MASK, range(4, 100), share=0.3, words=words)
    parts = whole = 0
    for batch in batches.batches(0):
        for row in range(len(batch.ids)):
            places = batch.picked[row][batch.targets[row] != PAD]
            length = int((batch.ids[row] != PAD).sum()) - 1
            for word in {place // 3 for place in places}:
                size = min(3, length - 3 * word)
                whole += sum(place // 3 == word for place in places) == size
                parts += 1
    # The last word of a row may be cut where the share is reached.
    assert whole / parts > 0.6
    cut = parts - whole
    assert cut <= sum(len(batch.ids) for batch in batches.batches(0))


@pytest.mark.parametrize("kind", [TokenBatches, SortedBatches])
def test_spans(kind):
    given = [ids for ids in texts() if len(ids) > 10]
    batches = DenoisingBatches(clean(given, kind), MASK)
    kept = masks = total = 0
    for batch in batches.batches(0):
        for source, target in zip(batch.source, batch.target_out, strict=True):
            ids, whole = source[source != PAD].tolist(), target[target != PAD].tolist()
            if not whole:
                assert not ids
                continue
            assert ids[-1] == EOS
            pieces = " ".join("*" if id == MASK else str(id) for id in ids[:-1]).split("*")
            text = " " + " ".join(map(str, whole[:-1])) + " "
            place = 0
            for piece in pieces:  # what is left is in the text, in order
                found = text.index(f" {piece.strip()} " if piece.strip() else "", place)
                place = found + len(piece.strip())
            kept, total = kept + sum(id != MASK for id in ids[:-1]), total + len(whole) - 1
            masks += ids.count(MASK)
    assert 1 - kept / total == pytest.approx(0.27, abs=0.06)
    assert 2 < (total - kept) / masks < 4


def test_what_is_hidden_differs_by_epoch_and_not_by_run():
    for made in (MaskedBatches(clean(texts()), MASK, range(4, 100)), DenoisingBatches(clean(texts()), MASK)):
        arrays = [
            [[a.tobytes() for a in batch.arrays(PAD) if a is not None] for batch in made.batches(epoch)]
            for epoch in (0, 0, 1)
        ]
        assert arrays[0] == arrays[1]
        assert sorted(arrays[0]) != sorted(arrays[2])
        later = next(made.from_step(len(made) + 1)).arrays(PAD)
        assert [a.tobytes() for a in later if a is not None] == arrays[2][1]
