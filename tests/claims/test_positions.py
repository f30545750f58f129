"""What the notes claim about positions: sinusoids, learned rows, and the simpler designs that fail."""

import itertools
import re

import mlx.core as mx
import numpy as np
import pytest
from claims import positions as study
from claims import rejected
from claims.table import claimed
from mlx.utils import tree_flatten

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import relative_buckets, sinusoids
from mlx_transformer.nn import positions
from mlx_transformer.nn.positions import Positions, positions_of
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import field_docs


def table(length: int, d_model: int = 512, kind: str = "sinusoidal") -> np.ndarray:
    """The rows that a model adds: what `Positions` makes of zeros."""
    config = TransformerConfig(vocab_size=8, d_model=d_model, heads=1, positions=kind)
    return np.array(Positions(config, "encoder")(mx.zeros((1, length, d_model)), positions_of(length)).x)[0]


def test_interleaved_sinusoids() -> None:
    pe = table(2)
    assert pe[0].tolist() == list(claimed(2, "PE(0), first four").values[:2]) * 256
    assert claimed(2, "PE(1), first four").holds(pe[1, :4])
    assert claimed(2, "PE(1), last two").holds(pe[1, -2:])
    for name, base, right in (
        ("longest wave of the paper's 10000, in positions", 10000, True),
        ("longest wave of the paper's 10000, in positions", 1000, False),
        ("of a base of 1000, once in the notes", 1000, True),
    ):
        wave = 2 * np.pi * base ** (510 / 512)
        assert claimed(2, name).holds([wave]) == right
        assert study.longest_wave(512, base) == pytest.approx(wave, rel=1e-12)
    for position, i in ((7, 0), (7, 3), (99, 100)):
        angle = position / 10000 ** (2 * i / 512)
        np.testing.assert_allclose(table(100)[position, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-6)
    angle = 99 / 9999 ** (200 / 512)  # another base would be seen
    assert np.abs(table(100)[99, 200:202] - [np.sin(angle), np.cos(angle)]).max() > 1e-5


def test_concatenated_sinusoids_have_other_frequencies() -> None:
    concatenated, interleaved = table(2, kind="sinusoidal_concat"), table(2)
    assert claimed(3, "second sine of PE(1)").holds(concatenated[1, 1:2])
    assert claimed(3, "the same in row 2").holds(interleaved[1, 2:3])
    difference = np.abs(np.sort(concatenated[1]) - np.sort(interleaved[1])).max()
    assert claimed(3, "largest difference of the sorted PE(1)").holds([difference])  # so no permutation
    assert claimed(3, "PE(0), PE(1), PE(2) of four features").holds(table(3, 4, "sinusoidal_concat").flatten())


def test_the_label_of_the_halves_names_whose_frequencies_they_are() -> None:
    """tensor2tensor's get_timing_signal_1d: its last timescale is 10000. Published Marian folders have the paper's."""
    log_increment = np.log(10000 / 1) / (512 // 2 - 1)
    scaled = np.arange(50.0)[:, None] * np.exp(-log_increment * np.arange(512 // 2))
    theirs = np.concatenate([np.sin(scaled), np.cos(scaled)], axis=1)
    np.testing.assert_allclose(sinusoids(50, 512, "sinusoidal_concat", np.float64), theirs, rtol=0, atol=1e-12)
    marian = sinusoids(50, 512, dtype=np.float64)[:, [*range(0, 512, 2), *range(1, 512, 2)]]
    assert np.abs(marian - theirs).max() > 0.01
    label = re.search(r"sinusoidal_concat: ([^;.]*)", field_docs(TransformerConfig)["positions"])
    assert label is not None
    assert "tensor2tensor's" in label[1]
    assert "Marian" not in label[1]


@pytest.mark.usefixtures("on_cpu")  # queries too short for a gradient on a GPU
def test_learned_positions_receive_gradient_and_end() -> None:
    config = TransformerConfig.preset("tiny", 20, positions="learned", max_positions=6, dropout=0.0)
    model = Transformer(config)
    ids = mx.array([[3, 4, 5, 6]])

    def loss(parameters):
        model.update(parameters)
        return mx.sum(mx.square(model(ids, ids)))

    gradient = dict(tree_flatten(mx.grad(loss)(model.parameters())))["decoder.positions.weight"]
    assert mx.all(mx.any(gradient[:4] != 0, axis=1)).item()
    assert not mx.any(gradient[4:] != 0).item()
    with pytest.raises(UserError, match="7 tokens is longer than the 6 learned positions"):
        model.encode([[3] * 7])
    cache = model.start(model.encode(ids))
    model.step([[3] * 6], cache)
    with pytest.raises(UserError, match="7 tokens"):
        model.step([[3]], cache)


def test_rejected_appending_the_raw_position() -> None:
    words = [[0.2, 0.8, 0.5], [0.6, 0.1, 0.3], [0.9, 0.4, 0.7]]  # Lion Kills Deer
    found = rejected.append_position(words)
    gains = claimed(5, "last feature of Lion, Kills, Deer").values
    assert found.tolist() == [[*word, gain] for word, gain in zip(words, gains, strict=True)]
    largest = rejected.append_position(np.zeros((1000, 3))).max()
    assert claimed(5, "largest feature of 1000 positions").holds([largest])  # unbounded
    assert np.abs(table(1000)).max() <= 1


def test_rejected_positions_normalised_to_one() -> None:
    five, nine = rejected.normalised_positions(5), rejected.normalised_positions(9)
    assert (five[0], five[-1], nine[0], nine[-1]) == (0, 1, 0, 1)
    assert set(np.diff(five)) == set(claimed(6, "one step, of five words").values)
    assert set(np.diff(nine)) == set(claimed(6, "one step, of nine words").values)
    assert np.array_equal(table(9)[:5], table(5))  # the sinusoids' rows don't depend on the length


def test_rejected_a_single_sine() -> None:
    assert claimed(7, "sin 1, sin 2, sin 3").holds(rejected.single_sine([1, 2, 3])[:, 0])
    collision = np.abs(rejected.single_sine(11) - rejected.single_sine(344))
    assert claimed(7, "|sin 11 - sin 344|").holds(collision)


def test_rejected_one_sine_cosine_pair() -> None:
    p = np.arange(3000)
    gap = np.linalg.norm(study.sine_cosine(p + 710, 1) - study.sine_cosine(p, 1), axis=1)
    assert claimed(8, "distance of p and p+710").holds([gap.max()])
    assert claimed(8, "distance of p and p+710").holds([gap.min()])


def test_rejected_a_second_pair_of_half_the_frequency() -> None:
    p = np.arange(3000)
    few = study.sine_cosine(p + 1420, 1, 0.5) - study.sine_cosine(p, 1, 0.5)
    assert claimed(9, "distance of p and p+1420").holds([np.linalg.norm(few, axis=1).max()])
    smallest = min(study.offset_distance(512, gap) for gap in range(1, 5000))
    assert claimed(9, "smallest of 512 features, gaps 1..4999").holds([smallest])
    assert np.linalg.norm(table(2001)[2000] - table(2001)[580]) > smallest  # the very gap 1420


def test_sinusoids_are_unique_bounded_and_of_constant_distance_per_offset() -> None:
    pe = sinusoids(400, 512, dtype=np.float64)
    assert np.abs(pe).max() <= 1
    assert len(np.unique(pe, axis=0)) == 400
    assert np.array_equal(table(400), pe.astype(np.float32))  # deterministic, and what models add
    for k in (1, 2, 17, 300):
        distances = np.sum((pe[k:] - pe[:-k]) ** 2, axis=1)
        np.testing.assert_allclose(distances, study.offset_distance(512, k) ** 2, rtol=1e-9)
    products = np.array([np.sum(pe[:97] * pe[k : 97 + k], axis=1) for k in range(4)])
    for t in range(97):
        assert claimed(10, "PE(t) · PE(t+k), k = 0..3").holds(products[:, t])


def test_an_offset_is_a_rotation() -> None:
    pe = sinusoids(300, 512, dtype=np.float64)
    for offset in (1, 5, 64):
        rotation = study.offset_rotation(512, offset)
        np.testing.assert_allclose(pe[:200] @ rotation.T, pe[offset : 200 + offset], rtol=0, atol=1e-12)
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(512), rtol=0, atol=1e-12)
        angle = offset * study.frequencies(512)[3]
        block = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        np.testing.assert_array_equal(rotation[6:8, 6:8], block)


def test_frequency_falls_as_in_a_counter() -> None:
    assert study.counter_bits(3) == "000 001 010 011 100 101 110 111".split()
    counted = itertools.pairwise(study.counter_bits(3))
    changes = sum(np.array(list(before)) != np.array(list(after)) for before, after in counted)
    # The last digit is the fastest; in the encoding it is the first feature.
    assert claimed(12, "changes of each digit, 000 to 111").holds(changes)
    crossings = study.zero_crossings(1000, 32)
    assert claimed(12, "zero crossings of the first feature, 1000 positions").holds(crossings[:1])  # 999 / pi
    fast = crossings[crossings > 0]
    assert len(fast) >= 8
    assert np.all(np.diff(crossings) <= 0)
    assert np.all(np.diff(study.frequencies(32)) < 0)


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_concat"])
def test_computed_once_and_extended_bit_for_bit(kind: str) -> None:
    config = TransformerConfig.preset("tiny", 8, d_model=64, positions=kind)
    short = positions.sinusoid_table(10, config)
    assert positions.sinusoid_table(900, config) is short
    longer = positions.sinusoid_table(short.shape[0] + 1, config)
    assert longer.shape[0] > short.shape[0]
    assert mx.array_equal(longer[: short.shape[0]], short).item()
    assert np.array_equal(np.array(longer), sinusoids(longer.shape[0], 64, kind))


def test_rotary_tables_extend_bit_for_bit() -> None:
    config = TransformerConfig.preset("tiny", 8, positions="rotary")
    short, longer = positions.rotary_table(10, config), positions.rotary_table(2000, config)
    for a, b in zip(short, longer, strict=True):
        assert b.shape[0] >= 2000 > a.shape[0]
        assert mx.array_equal(b[: a.shape[0]], a).item()


def test_a_model_reads_further_than_the_first_table() -> None:
    model = Transformer(TransformerConfig.preset("tiny", 8, d_model=16, d_ff=16)).eval()
    memory = model.encode(mx.full((1, positions.CHUNK + 3), 5))
    assert memory.shape == (1, positions.CHUNK + 3, 16)
    assert mx.all(mx.isfinite(memory)).item()


def test_positions_are_added_to_scaled_embeddings() -> None:
    # YOUR CAT IS A LOVELY CAT: first feature of the word CAT, and of positions 1 and 5.
    config = TransformerConfig(vocab_size=8, d_model=1, heads=1, positions="learned", max_positions=6)
    added = Positions(config, "encoder")
    added.weight = mx.array([[0.0], [1664.068], [0.0], [0.0], [0.0], [1281.458]])
    cat = mx.full((1, 6, 1), 171.411)
    sums = added(cat, positions_of(6)).x
    assert sums.shape == cat.shape  # added, not concatenated: the width stays d
    first, second = np.array(sums)[0, [1, 5]]
    assert claimed(14, "first feature of the first CAT").holds(first)
    assert claimed(14, "of the second").holds(second)


def test_embeddings_are_scaled_so_that_positions_do_not_dominate() -> None:
    mx.random.seed(0)
    rows = {}
    for scale in (True, False):
        model = Transformer(TransformerConfig(vocab_size=50, scale_embeddings=scale)).eval()
        seen = {}
        model.encode(mx.arange(50)[None], tap=seen.__setitem__)
        rows[scale] = np.array(seen["encoder.embedding"])[0] - sinusoids(50, 512)
        gathered = np.array(model.embedding.weight) * np.float32(512**0.5 if scale else 1)
        np.testing.assert_allclose(rows[scale], gathered, atol=1e-6)
    size = np.sqrt(np.mean(sinusoids(50, 512) ** 2))  # 1/sqrt(2) at any position
    assert np.sqrt(np.mean(rows[True] ** 2)) > size
    assert np.sqrt(np.mean(rows[False] ** 2)) < size / 10


@pytest.mark.parametrize("causal", [True, False])
def test_relative_buckets_are_t5s(causal: bool) -> None:
    """T5's 32 buckets up to a distance of 128 (Raffel et al. 2020): where each begins, counted from the query."""
    config = TransformerConfig(vocab_size=8, positions="relative")
    buckets = relative_buckets(300, config, causal)
    before, after = buckets[299::-1], buckets[299:]
    if causal:
        begins = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
        assert not after.any()
    else:
        begins = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
        assert [int(np.argmax(after == 16 + i)) for i in range(1, 16)] == begins[1:]
    assert [int(np.argmax(before == i)) for i in range(len(begins))] == begins
    assert len(set(before)) == len(begins)


def test_relative_positions_know_no_place() -> None:
    """The same words moved by three places attend to each other as before; in the other order they don't."""
    config = TransformerConfig(vocab_size=8, d_model=16, heads=2, positions="relative")
    mx.random.seed(0)
    positions = Positions(config, "encoder")
    near, far = (positions(mx.zeros((1, n, 16)), positions_of(n)).masks[0] for n in (4, 7))
    assert isinstance(near, mx.array)
    assert isinstance(far, mx.array)
    assert mx.array_equal(near, far[..., 3:, 3:]).item()
    assert not mx.allclose(near, near.swapaxes(-1, -2)).item()


@pytest.mark.parametrize("layout", ["sinusoidal", "sinusoidal_halves"])
def test_other_frequencies_are_not_tensor2tensors(layout: str) -> None:
    signal = study.timing_signal(50, 64)
    name = "largest difference from get_timing_signal_1d(), float64, 5000 positions, d = 4, 64, 512, 1024"
    claim = claimed(51, name)
    assert not claim.holds([float(np.abs(sinusoids(50, 64, layout, np.float64) - signal).max())] * 4)
    assert claim.holds([float(np.abs(sinusoids(50, 64, "sinusoidal_concat", np.float64) - signal).max())] * 4)
    assert not np.array_equal(study.timing_signal(50, 64, start_index=1), signal)
