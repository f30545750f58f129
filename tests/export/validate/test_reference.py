"""The NumPy reference against formulas written out by hand, published numbers, and what the architecture promises."""

import math
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from options import fitted
from random_models import random_weights
from small_models import CHOICES

from export.validate import compare
from export.validate.reference import Reference, network
from export.validate.reference import layers as reference
from export.validate.reference.layers import attention
from mlx_transformer.core import positions as stored
from mlx_transformer.core.checkpoint import WEIGHTS, save_checkpoint
from mlx_transformer.core.config import NormPlacement, TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system import tensors
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import Stored

RNG = np.random.default_rng


def make(dtype=np.float64, seed=0, **changes) -> Reference:
    sizes = dict(vocab_size=17, d_model=16, heads=4, d_ff=24, encoder_layers=2, decoder_layers=2)
    config = TransformerConfig.from_dict(fitted({**sizes, **changes}))
    rng = RNG(seed)
    weights = {n: (0.3 * rng.standard_normal(s)).astype(np.float32) for n, s in parameter_shapes(config).items()}
    return Reference(config, weights, dtype)


VARIANTS = list(CHOICES.values())


@pytest.mark.parametrize("layout", ["sinusoidal", "sinusoidal_halves", "sinusoidal_concat"])
@pytest.mark.parametrize("d_model", [4, 10, 512])
def test_sinusoids_are_the_stored_tables_bit_for_bit(layout: str, d_model: int) -> None:
    table = stored.sinusoids(700, d_model, layout)
    rows = RNG(1).integers(0, 700, (3, 40))
    assert np.array_equal(reference.sinusoid(rows, d_model, layout).view(np.uint32), table[rows].view(np.uint32))


@pytest.mark.parametrize(("d_k", "base"), [(2, 10000.0), (64, 10000.0), (128, 500000.0)])
def test_rotary_tables_are_the_stored_ones_bit_for_bit(d_k: int, base: float) -> None:
    config = TransformerConfig(vocab_size=9, d_model=128, heads=1, d_k=d_k, d_v=8, rotary_base=base)
    rows = RNG(1).integers(0, 700, (3, 40))
    for computed, table in zip(reference.rotation(rows, config), stored.rotary_tables(700, config), strict=True):
        assert np.array_equal(computed.view(np.uint32), table[rows].view(np.uint32))


def test_position_1_of_512_has_the_published_numbers() -> None:
    interleaved = reference.sinusoid(np.array([1]), 512)[0]
    assert interleaved[:4] == pytest.approx([0.8414, 0.5403, 0.8218, 0.5696], abs=1e-4)
    assert interleaved[-2:] == pytest.approx([1.0366e-4, 1.0], abs=1e-8)
    assert reference.sinusoid(np.array([1]), 512, "sinusoidal_concat")[0, 1] == pytest.approx(0.82178, abs=5e-6)


def test_attention_is_the_formula_written_as_loops() -> None:
    rng = RNG(2)
    Q, K, V = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 4, 5)), rng.standard_normal((2, 4, 6))
    allowed = np.array([[True, False, True, True], [True, True, True, True], [False, False, False, True]])
    expected = np.zeros((2, 3, 6))
    for b in range(2):
        for i in range(3):
            weight = [
                math.exp(float(Q[b, i] @ K[b, j]) / math.sqrt(5)) if allowed[i, j] else 0.0 for j in range(len(K[b]))
            ]
            for j in range(4):
                expected[b, i] += weight[j] / sum(weight) * V[b, j]
    np.testing.assert_allclose(attention(Q, K, V, allowed), expected, rtol=1e-13)


def test_a_query_that_may_look_nowhere_stays_finite_and_disturbs_no_other() -> None:
    Q = RNG(3).standard_normal((1, 2, 4))
    out = attention(Q, Q, Q, np.array([[False, False], [True, False]]))
    assert np.isfinite(out).all()
    assert np.array_equal(out[0, 1], Q[0, 0])


@pytest.mark.parametrize(
    ("name", "at_1", "at_minus_2"),
    [  # x Phi(x), its tanh form, x / (1 + e^-x) from their definitions, to ten digits
        ("relu", 1.0, 0.0),
        ("gelu", 0.8413447461, -0.0455002639),
        ("gelu_tanh", 0.8411919906, -0.0454023059),
        ("silu", 0.7310585786, -0.2384058440),
    ],
)
def test_activations(name: str, at_1: float, at_minus_2: float) -> None:
    values = reference.activation(name, np.array([1.0, -2.0, 0.0, -800.0, 800.0]))
    np.testing.assert_allclose(values, [at_1, at_minus_2, 0.0, 0.0, 800.0], atol=1e-10)


def test_layer_norm_has_the_numbers_of_the_worked_example() -> None:
    model = make(d_model=4, heads=1, norm_epsilon=1e-12)
    model.weights["encoder.layers.0.feed_forward_norm.weight"] = np.ones(4)
    model.weights["encoder.layers.0.feed_forward_norm.bias"] = np.zeros(4)
    got = model._norm("encoder.layers.0.feed_forward_norm", np.array([[50.147, 3314.825, 8463.361, 8.021]]))
    assert got[0] == pytest.approx([-0.8433, 0.1031, 1.5957, -0.8555], abs=1e-4)


@pytest.mark.parametrize("changes", VARIANTS)
def test_cached_steps_are_the_full_pass(changes: dict) -> None:
    model = make(**changes)
    rng = RNG(4)
    source, target = rng.integers(0, 17, (3, 7)), rng.integers(0, 17, (3, 9))
    mask = np.array([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]], bool)
    full = model(source, target, mask)
    cache = model.start(model.encode(source, mask), mask)
    steps = []
    for part in np.split(target, [4, 5, 6, 7, 8], axis=1):
        logits, cache = model.step(part, cache)
        steps.append(logits)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), full, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
def test_padding_on_either_side_changes_nothing_at_tokens(changes: dict) -> None:
    model = make(**changes)
    rng = RNG(5)
    source, target = rng.integers(0, 17, (1, 5)), rng.integers(0, 17, (1, 4))
    unpadded = model(source, target)
    for before, after in [(3, 0), (0, 3), (2, 1)]:
        padded = np.pad(source, [(0, 0), (before, after)], constant_values=6)
        mask = np.zeros(padded.shape, bool)
        mask[:, before : before + 5] = True
        np.testing.assert_allclose(model(padded, target, mask), unpadded, rtol=1e-11, atol=1e-12)


def test_a_left_padded_prompt_of_a_decoder_gives_the_unpadded_logits() -> None:
    model = make(architecture="decoder", encoder_layers=0, tie_embeddings="target-output", positions="rotary")
    ids = RNG(6).integers(0, 17, (1, 5))
    padded = np.pad(ids, [(0, 0), (3, 0)])
    mask = np.arange(8)[None] >= 3
    np.testing.assert_allclose(model(padded, mask=mask)[:, 3:], model(ids), rtol=1e-11, atol=1e-12)


def test_a_decoder_sees_no_future_token_and_a_later_source_token_counts() -> None:
    model = make()
    source, target = RNG(7).integers(0, 17, (1, 5)), RNG(8).integers(0, 17, (1, 6))
    before = model(source, target)
    target[0, 4] = (target[0, 4] + 1) % 17
    after = model(source, target)
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])
    source[0, -1] = (source[0, -1] + 1) % 17
    assert not np.allclose(model(source, target)[:, 0], after[:, 0])


def test_without_positions_an_encoder_is_equivariant_and_with_them_it_is_not() -> None:
    ids, order = RNG(9).permutation(17)[None, :6], np.array([3, 1, 5, 0, 2, 4])
    bag = make(positions="none")
    np.testing.assert_allclose(bag.encode(ids[:, order]), bag.encode(ids)[:, order], rtol=1e-11, atol=1e-12)
    ordered = make()
    assert not np.allclose(ordered.encode(ids[:, order]), ordered.encode(ids)[:, order])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    model = make(positions="rotary")
    q, k = RNG(10).standard_normal((2, 1, 4, 1, 4))
    layer = model.config
    near = [
        model._turn(q, np.array([[p]]), layer) @ model._turn(k, np.array([[p + 3]]), layer).swapaxes(-1, -2)
        for p in (0, 40)
    ]
    np.testing.assert_allclose(near[0], near[1], atol=1e-6)


def test_grouped_heads_equal_full_heads_with_repeated_projections() -> None:
    grouped = make(key_value_heads=2)
    full = make()
    for name, weight in grouped.weights.items():
        if weight.shape != full.weights[name].shape:  # a key or value projection of two heads of 4
            weight = np.repeat(weight.reshape(2, 4, 16), 2, axis=0).reshape(16, 16)
        full.weights[name] = weight
    source, target = RNG(11).integers(0, 17, (2, 5)), RNG(12).integers(0, 17, (2, 4))
    np.testing.assert_allclose(full(source, target), grouped(source, target), rtol=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
def test_float32_stays_float32_and_near(changes: dict) -> None:
    exact, single = make(**changes), make(np.float32, **changes)
    source, target = RNG(13).integers(0, 17, (2, 5)), RNG(14).integers(0, 17, (2, 4))
    taps: dict[str, np.ndarray] = {}
    logits = single(source, target, tap=taps.__setitem__)
    assert {a.dtype for a in taps.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(logits, exact(source, target), rtol=2e-4, atol=2e-4)


def test_taps_come_in_the_order_of_the_data() -> None:
    observed: list[str] = []
    make(norm_placement="pre", encoder_layers=1, decoder_layers=1)(
        [[3]], [[1]], tap=lambda name, _: observed.append(name)
    )
    layer = ".layers.0"
    assert observed == [
        *[f"encoder{s}" for s in (".embedding", f"{layer}.self_attention", f"{layer}.feed_forward", layer, ".norm")],
        *["decoder.embedding", f"decoder{layer}.self_attention", f"decoder{layer}.cross_attention"],
        *[f"decoder{layer}.feed_forward", f"decoder{layer}", "decoder.norm", "logits"],
    ]


def test_a_cache_can_be_rearranged_by_rows() -> None:
    model = make()
    source, target = RNG(15).integers(0, 17, (3, 5)), RNG(16).integers(0, 17, (3, 4))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]], bool)
    _, cache = model.step(target[:, :3], model.start(model.encode(source, mask), mask))
    logits, _ = model.step(target[[2, 0, 2], 3:], cache.select([2, 0, 2]))
    np.testing.assert_allclose(logits[:, 0], model(source, target, mask)[[2, 0, 2], 3], rtol=1e-11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m([[17]], [[1]]), "outside 0..16"),
        (lambda m: m([[3]], [[-1]]), "outside 0..16"),
        (lambda m: m([3], [[1]]), "expected \\(batch, length\\)"),
        (lambda m: m([[3]]), "needs target_ids"),
        (lambda m: m([[3] * 13], [[1]]), "past the learned table of 12 rows"),
        (lambda m: m.step([[1]], m.start(batch=1)), "needs start\\(memory, mask\\)"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(make(positions="learned", max_positions=12))


def test_logit_scale_multiplies_what_the_classifier_reads() -> None:
    ids = RNG(6).integers(3, 17, (2, 5))
    plain, scaled = make(output_bias=True), make(output_bias=True, logit_scale=0.25)
    bias = plain.weights["output_proj.bias"]
    np.testing.assert_allclose(scaled(ids, ids) - bias, (plain(ids, ids) - bias) / 4, rtol=1e-9)


def test_embedding_scale_takes_the_place_of_the_root_of_d_model() -> None:
    ids, own = RNG(6).integers(3, 17, (2, 5)), make(positions="none", embedding_scale=2.5)
    rows = own.weights["embedding.weight"][ids]
    np.testing.assert_allclose(own.embed("embedding.weight", "encoder", ids, ids, None), 2.5 * rows, rtol=1e-12)


def test_residual_scale_multiplies_what_is_added() -> None:
    x, name = RNG(5).standard_normal((1, 3, 16)), "encoder.layers.0.feed_forward"
    plain, scaled = (
        make(norm_placement="pre", residual_scale=scale).sublayer(name, x, np.tanh, None) for scale in (None, 0.25)
    )
    np.testing.assert_allclose(scaled - x, (plain - x) / 4, rtol=1e-9)


def test_score_cap_bounds_scores_before_the_mask() -> None:
    rng = RNG(5)
    Q, K, V = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 4, 5)), rng.standard_normal((2, 4, 6))
    weights: dict[str, np.ndarray] = {}

    def observe(name: str, value: np.ndarray) -> np.ndarray:
        return weights.setdefault(name, value)

    attention(Q, K, V, np.tri(3, 4, dtype=bool), observe, score=partial(reference.scores, d_k=5, cap=0.2))
    e = np.exp(0.2 * np.tanh(Q @ K.swapaxes(1, 2) / math.sqrt(5) / 0.2)) * np.tri(3, 4)
    np.testing.assert_allclose(weights["weights"], e / e.sum(-1, keepdims=True), rtol=1e-12)


def test_logit_cap_bounds_what_the_classifier_gives() -> None:
    ids = RNG(6).integers(3, 17, (2, 5))
    plain, capped = make(output_bias=True, logit_scale=0.25), make(output_bias=True, logit_scale=0.25, logit_cap=0.25)
    np.testing.assert_allclose(capped(ids, ids), 0.25 * np.tanh(plain(ids, ids) / 0.25), rtol=1e-9)
    assert np.abs(capped(ids, ids)).max() < 0.25 < np.abs(plain(ids, ids)).max()


def test_attention_scale_takes_the_place_of_the_root_of_d_k() -> None:
    rng = RNG(5)
    Q, K, V = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 4, 5)), rng.standard_normal((2, 4, 6))
    np.testing.assert_allclose(
        attention(Q, K, V, score=partial(reference.scores, d_k=5, scale=1.0)),
        attention(Q * math.sqrt(5), K, V),
        rtol=1e-12,
    )
    # As a model's option: queries that are larger by the root.
    plain, scaled = make(), make(attention_scale=1.0)
    for name in plain.weights:
        if name.endswith("query_proj.weight"):
            plain.weights[name] = plain.weights[name] * 2.0
    ids = RNG(6).integers(3, 17, (2, 5))
    np.testing.assert_allclose(scaled(ids, ids), plain(ids, ids), rtol=1e-9)


@pytest.mark.parametrize("placement", get_args(NormPlacement))
def test_each_placement_has_its_norms(placement: str) -> None:
    model, x, name = make(norm_placement=placement), RNG(5).standard_normal((1, 3, 16)), "decoder.layers.1.feed_forward"

    def ln(y: np.ndarray, own: str) -> np.ndarray:
        gamma, beta = (model.weights[f"{name}_{own}.{part}"] for part in ("weight", "bias"))
        return gamma * (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) + beta

    formulas = {
        "post": lambda: ln(x + np.tanh(x), "norm"),
        "pre": lambda: x + np.tanh(ln(x, "norm")),
        "sandwich": lambda: x + ln(np.tanh(ln(x, "norm")), "post_norm"),
        "after": lambda: x + ln(np.tanh(x), "post_norm"),
    }
    np.testing.assert_allclose(model.sublayer(name, x, np.tanh, None), formulas[placement](), rtol=1e-10)
    assert ("decoder.norm.weight" in model.weights) == (placement != "post")


@pytest.mark.parametrize("place", ["before", "after", "width"])
def test_norms_of_queries_and_keys_have_their_place(place: str) -> None:
    """The rotation as a product of complex numbers."""
    model = make(positions="rotary", query_key_norm=True, query_key_norm_place=place, key_value_heads=2, d_k=6)
    name, x = "encoder.layers.0.self_attention.key", RNG(5).standard_normal((1, 3, 16))
    gamma = model.weights[f"{name}_norm.weight"]
    turns = np.exp(1j * np.arange(3)[:, None] * 10000.0 ** (-np.arange(3) / 3))

    def rms(y: np.ndarray) -> np.ndarray:
        return gamma * y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-5)

    def turned(y: np.ndarray) -> np.ndarray:
        z = (y[..., :3] + 1j * y[..., 3:]) * turns
        return np.concatenate([z.real, z.imag], axis=-1)

    y = x[0] @ model.weights[f"{name}_proj.weight"].T  # (S, K*d_k)
    heads = (rms(y) if place == "width" else y).reshape(3, 2, 6).swapaxes(0, 1)
    expected = {"before": lambda: turned(rms(heads)), "after": lambda: rms(turned(heads))}
    keys, _ = model.keys_values("encoder.layers.0.self_attention", x, np.arange(3)[None])
    np.testing.assert_allclose(keys[0], expected.get(place, lambda: turned(heads))(), rtol=1e-5, atol=1e-6)


LARGE = TransformerConfig(
    vocab_size=2000, d_model=256, heads=4, d_ff=1024, encoder_layers=2, decoder_layers=2, max_positions=40
)
"""19 MB of weights, each layer a small part of them."""


def test_large_weights_are_read_when_a_layer_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config, ids = replace(LARGE, output_bias=True), np.arange(12).reshape(2, 6) + 3
    weights = random_weights(config, 1)
    kept = Reference(config, weights)(ids, ids)
    monkeypatch.setattr(network, "KEPT", 0)
    monkeypatch.setattr(tensors, "PART", 1 << 16)  # a matrix in several parts
    later = Reference(config, {name: Stored(x.shape, x.dtype, x.copy) for name, x in weights.items()})
    np.testing.assert_allclose(later(ids, ids), kept, rtol=0, atol=1e-12)
    later.weights["output_proj.bias"] = weights["output_proj.bias"].astype(np.float64) + 1
    np.testing.assert_allclose(later(ids, ids), kept + 1, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_proof_needs_little_memory_beyond_the_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the runtime is the reference itself, in float32."""
    monkeypatch.setattr(network, "KEPT", 1 << 20)
    folder = save_checkpoint(tmp_path / "model", LARGE, random_weights(LARGE, 1))
    tracemalloc.start()
    try:
        assert compare(folder, None, ["reference"], seed=1, longest=8, searches=False).equal
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * (folder / WEIGHTS).stat().st_size
