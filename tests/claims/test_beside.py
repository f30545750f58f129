"""Controls of the rows that only the table's own test asserts: what is measured there can come out otherwise."""

import mlx.core as mx
import numpy as np
import pytest
from claims import cost, embedding, network, norms, order, recurrent, rejected, worked
from claims.table import ROWS

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import attention_weights
from mlx_transformer.nn.norms import LayerNorm

ROUNDING = 1e-5
"""Of values of size 1: some BLAS kernels round by where their operands lie, the same numbers otherwise."""


def test_gradients_grow_with_raw_positions_alone() -> None:
    raw, coded = rejected.gradient_by_position()
    assert np.all(np.diff(raw) > 0)
    np.testing.assert_allclose(raw, np.hypot(np.linalg.norm(rejected.LION_KILLS_DEER[0]), np.arange(1, 1001)), 1e-6)
    np.testing.assert_allclose(coded, 16, rtol=1e-6)  # sqrt(d / 2)


def test_twice_the_width_by_the_formula() -> None:
    for d in (512, 1024):
        assert cost.layer_size(d) == 12 * d * d + 9 * d
        four_projections, scores_and_sums, two_matrices = 4 * 100 * d * d, 2 * 100 * 100 * d, 2 * 100 * d * 4 * d
        assert cost.layer_multiplications(100, d) == four_projections + scores_and_sums + two_matrices
    times = {label: ratio for label, *_, ratio in cost.list_double_width().rows}
    assert list(times.values()) == ["4.00", "3.94", "3.82"]


def test_both_cats_by_hand() -> None:
    for found, place in zip(worked.sums(), worked.POSITIONS.values(), strict=True):
        np.testing.assert_allclose(found, np.add(worked.WORDS["CAT"], place), rtol=1e-15)
    assert set(worked.SENTENCE) == set(worked.WORDS)
    assert [place for place, word in enumerate(worked.SENTENCE) if word == "CAT"] == list(worked.POSITIONS)


def test_float32_would_be_seen() -> None:
    """Its sums are not those of the notes to the third decimal."""
    first, _ = worked.sums(mx.float32)
    assert [f"{value:.3f}" for value in first[1:3]] == ["11356.482", "11813.219"]
    assert not ROWS[43].numbers["first CAT"].holds(first)
    assert ROWS[43].numbers["first CAT"].holds(worked.sums()[0])


def test_the_table_of_sums_has_all_words() -> None:
    """Eighteen lines of five features: a word, its position, their sum; what the notes don't give is said."""
    lines = {line[0]: line[1:] for line in worked.list_worked_sums().rows}
    assert list(lines)[:3] == ["YOUR", "+ position 0", "= YOUR at 0"]
    assert len(worked.list_worked_sums().rows) == 18
    assert lines["LOVELY"] == ("6422.693", "6315.080", "9358.778", "2141.081", "735.147")
    assert lines["= CAT at 5"] == ("1452.869", "11179.240", "10105.789", "5292.638", "15409.093")
    assert [name for name, cells in lines.items() if "not given" in cells] == [
        line
        for i, word in ((0, "YOUR"), (2, "IS"), (3, "A"), (4, "LOVELY"))
        for line in (f"+ position {i}", f"= {word} at {i}")
    ]


def test_words_that_come_twice_are_matched() -> None:
    """Both THE of the sentence: the first with the first, and the tables are put in the old order again."""
    assert network.ids_of("the cat the".split(), "cat the the".split()) == [[4, 3, 4], [3, 4, 4]]
    unmoved = order.reordered("the cat sat on the mat", "the cat sat on the mat")
    assert unmoved == {"none": 0, "sinusoidal": 0}
    assert order.word_changes("a b a", "a a b")["b"]["sinusoidal"] > 0.1


def test_the_same_sentence_gives_the_same_vector(monkeypatch) -> None:
    monkeypatch.setattr(embedding, "SENTENCES", (embedding.SENTENCES[0],) * 2)
    embedded, encoded = embedding.bank()
    assert np.array_equal(embedded[0], embedded[1])
    assert np.abs(encoded[0] - encoded[1]).max() < ROUNDING


def test_norms_agree_over_one_axis_alone() -> None:
    """Of the untransposed matrix they differ."""
    mx.random.seed(0)
    x = mx.random.normal((12, 16)) * 3 + 1
    from mlx import nn

    assert mx.abs(LayerNorm(16, norms.EPSILON)(x) - nn.BatchNorm(16, eps=norms.EPSILON)(x)).max().item() > 0.1
    assert norms.use_change(LayerNorm(16, 1e-5)) == 0 < norms.use_change(nn.BatchNorm(16))
    assert norms.mates_change(LayerNorm(16, 1e-5)) == 0 < norms.mates_change(nn.BatchNorm(16))


@pytest.mark.parametrize("d_model", [256, 512])
def test_multiplications_grow_with_the_square_of_the_length(d_model: int) -> None:
    """Four projections, and two products of n x n: 4 n d^2 + 2 n^2 d."""
    for n in (10, 20):
        assert cost.multiplications(8, n, d_model) == 4 * n * d_model**2 + 2 * n * n * d_model


def test_a_net_that_forgets_nothing_would_be_seen(monkeypatch) -> None:
    """One that adds its input to its state, without a bound, passes the whole gradient on."""
    claimed = ROWS[33].numbers["gradient over 64 positions / over 4, recurrent"]
    monkeypatch.setattr(recurrent, "recurrent", lambda seed: lambda x: mx.cumsum(x, axis=1))
    recurrent.gradient_by_distance.cache_clear()
    try:
        found = recurrent.forgetting()
    finally:
        recurrent.gradient_by_distance.cache_clear()
    assert found["what a step leaves of it, recurrent: 4 to 8, to 16, to 32, to 64"] == pytest.approx([1] * 4, abs=0.2)
    assert not claimed.holds([found["gradient over 64 positions / over 4, recurrent"]])


@pytest.mark.parametrize(("slower", "ratio"), [(1, 1), (3, 3), (0.5, 0.5)])
def test_a_slower_width_would_be_seen(monkeypatch, slower: float, ratio: float) -> None:
    """Time is taken per multiplication: a clock that counts them gives 1, and shows a width that takes longer."""

    def counted(product, rounds):
        tokens, width = product().shape[0], product().shape[1] // 4
        return 1e-9 * tokens * 4 * width**2 * (slower if width == 510 else 1)

    monkeypatch.setattr(cost, "_least", counted)
    cost.powers_of_two.cache_clear()
    try:
        (found,) = cost.powers_of_two().values()
    finally:
        cost.powers_of_two.cache_clear()
    assert found == pytest.approx(ratio, rel=1e-12)


def test_blocks_of_the_jacobian_that_must_be_zero_are() -> None:
    """Of a net that sees only the past all of the upper triangle, of one convolution all but two diagonals."""
    past = recurrent.sensitivity(recurrent.recurrent())
    assert not np.triu(past, 1).any()
    assert np.tril(past).any()
    one = recurrent.sensitivity(recurrent.convolutions(1, dilated=True))
    assert np.count_nonzero(one) == 2 * recurrent.WORDS - 1


def test_a_net_that_sees_no_order_would_be_seen(monkeypatch) -> None:
    """A mean over all words beside each word: no output changes, as with attention."""
    monkeypatch.setattr(recurrent, "cell", lambda name: lambda x: x + mx.mean(x, axis=1, keepdims=True))
    found = recurrent.keeping_order()
    for name in recurrent.CELLS:
        what = f"lion, kills, deer to deer, kills, lion: change of each word's output, {name}"
        assert not ROWS[46].numbers[what].holds(found[what])
    monkeypatch.undo()
    monkeypatch.setattr(recurrent, "self_attention", recurrent.recurrent)
    assert not ROWS[46].numbers["the same, self-attention"].holds(recurrent.keeping_order()["the same, self-attention"])


@pytest.mark.usefixtures("on_cpu")
def test_words_in_front_that_change_nothing_would_be_seen() -> None:
    """Without positions no score changes, but neither does it tell one place from another."""
    assert order.score_change("none") < 1e-5
    assert order.place_seen("none") < 1e-5
    for kind in order.RELATIVE:
        assert order.score_change(kind) < 1e-4 < 0.01 < order.place_seen(kind)
    for kind in order.ABSOLUTE:
        assert order.score_change(kind) > 0.1
    assert len(order.IN_FRONT.split()) == 4


@pytest.mark.usefixtures("on_cpu")
def test_only_a_larger_u_explodes() -> None:
    """A step multiplies the gradient by as much as U grows, where no tanh is in the way."""
    once, twice = (recurrent.by_distance(lambda seed, k=k: recurrent.grown(k, False, seed)) for k in (1, 2))
    steps = np.array(recurrent.LENGTHS) - 1
    np.testing.assert_allclose(np.log2(twice / once), steps, atol=0.01)
    np.testing.assert_allclose(
        recurrent.by_distance(lambda seed: recurrent.grown(1, seed=seed)), recurrent.by_distance(recurrent.recurrent)
    )


def test_another_scale_than_8_would_be_seen(monkeypatch) -> None:
    monkeypatch.setattr(
        worked, "attention_weights", lambda q, k, scale=None: attention_weights(q, k, None, scale or 1 / 64)
    )
    found = worked.thinking_machines()
    assert not ROWS[50].numbers["softmax"].holds(found["softmax"])
    assert ROWS[50].numbers["q · k of both words"].holds(found["q · k of both words"])


def test_a_recurrent_cell_is_in_no_group() -> None:
    base = TransformerConfig.preset("base", 37_000)
    assert cost.groups(base)["others"] == 0
    for options in ({"decoder_self_attention": "ssru"}, {"positions": "learned"}, {"token_types": 2, **ENCODER}):
        assert cost.groups(TransformerConfig.preset("base", 37_000, **options))["others"] > 0


ENCODER = {"architecture": "encoder", "decoder_layers": 0}
