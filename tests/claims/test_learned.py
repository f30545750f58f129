"""Controls of what small trainings show: what is asked of them can be answered otherwise."""

import mlx.core as mx
import pytest
from claims import learned, network
from claims.table import claimed

pytestmark = pytest.mark.usefixtures("on_cpu")  # lengths that a GPU's kernels don't take for a gradient


class Copying:
    """Copies every length."""

    def generate(self, rows: list[list[int]]) -> list[list[int]]:
        return rows


def test_a_copy_of_every_length_would_be_seen(monkeypatch) -> None:
    monkeypatch.setattr(learned, "tiny", lambda **_: Copying())
    monkeypatch.setattr(learned, "last_loss", lambda *_: 0.0)
    learned.exact_by_length.cache_clear()
    try:
        found = learned.unseen_lengths()
    finally:
        learned.exact_by_length.cache_clear()
    for name in ("12 words, all three", "16 words, all three"):
        assert found[name] == [1, 1, 1]
        assert not claimed(45, name).holds(found[name])


def test_words_are_copied_in_batches_of_one_length() -> None:
    batch = network.copied(*learned.TRAINED)
    for i, length in enumerate([*range(3, 9), 3]):
        source, target = batch(i)
        assert source.shape == (32, length)
        assert mx.array_equal(target[:, 1:-1], source).item()
        assert {*target[:, 0].tolist(), *target[:, -1].tolist()} == {network.START, network.END}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_batch_norm_fails_in_use_for_every_seed(seed: int) -> None:
    """The first seed is that of the row; with layer norm, use is as training was."""
    layer, batch = (learned.losses_by_norm(of_batch, seed) for of_batch in (False, True))
    assert claimed(49, "loss in use, batch norm / layer norm").holds([batch[1] / layer[1]])
    assert claimed(49, "loss in training, batch norm / layer norm").holds([batch[0] / layer[0]])
    assert layer[1] < 1.5 * layer[0]
    assert claimed(49, "batch norm, loss in use / in training").holds([batch[1] / batch[0]])
    padded = learned.losses_by_norm(True, seed, one_length=False)
    assert claimed(49, "the same, batches padded to one length").holds([padded[1] / padded[0]])


def test_padding_fills_up_to_the_longest_and_counts_for_nothing() -> None:
    source, target = learned.of_all_lengths(0)
    lengths = [sum(id != 0 for id in row) for row in source.tolist()]
    assert set(lengths) == set(range(2, 9))
    for words, row, n in zip(source.tolist(), target.tolist(), lengths, strict=True):
        assert row == [network.START, *words[:n], network.END, *[0] * (8 - n)]
    model = network.tiny(dropout=0.0)
    longer = [mx.pad(ids, [(0, 0), (0, 3)]) for ids in (source, target)]
    assert learned.unpadded_loss(model, *longer).item() == pytest.approx(
        learned.unpadded_loss(model, source, target).item(), rel=1e-5
    )


def test_the_answer_is_the_value_behind_the_key() -> None:
    ids, values = learned.asked(0)
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        pairs = dict(zip(row[:-1:2], row[1:-1:2], strict=True))
        assert len(pairs) == learned.PAIRS
        assert pairs[row[-1]] == value
        assert max(pairs) < min(pairs.values())
