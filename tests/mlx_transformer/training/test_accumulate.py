"""Several batches a step, the loss in chunks, layers computed again, lower types: the same gradient, less memory."""

import mlx.core as mx
import numpy as np
import pytest
from choices import both_choices, gpu_in_slow
from combined import slow
from mlx.utils import tree_flatten
from tiny_step import BETAS, V, batch, classifier_of, model, run, step_with

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data.batches import Batch
from mlx_transformer.nn.checkpointing import checkpoint_layers, checkpointed
from mlx_transformer.nn.dropout import Dropout
from mlx_transformer.nn.feedforward import FeedForward
from mlx_transformer.nn.layers import EncoderLayer
from mlx_transformer.training import loss as losses
from mlx_transformer.training.loss import label_smoothed_loss
from mlx_transformer.training.step import FIRST_FACTOR, Arithmetic

pytestmark = both_choices


def moments(step):
    """After the first step Adam's m is (1 - beta1) times the gradient."""
    return {name: np.array(m) / (1 - BETAS[0]) for name, m in tree_flatten(step.state) if name.endswith(".m")}


def assert_same_gradients(step, other, rtol=1e-4, atol=1e-6):
    expected = moments(other)
    assert moments(step).keys() == expected.keys()
    for name, gradient in moments(step).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=rtol, atol=atol, err_msg=name)


def joined(batches):
    """One batch of the rows of all."""
    sides = ("source", "target_in", "target_out")
    return Batch(
        *(np.concatenate([getattr(b, side) for b in batches]) for side in sides), sum(b.tokens for b in batches)
    )


def test_small_batches_give_the_gradient_of_the_big_one():
    """Weighted by tokens: the three have 45, 27 and 53 of them."""
    parts = [batch(seed=1), batch(rows=3, seed=2), batch(rows=4, seed=3, ragged=False)]
    assert len({part.tokens for part in parts}) == 3
    several, one = step_with(model()), step_with(model())
    loss, norm, finite = run(several, parts)
    expected = run(one, joined(parts))
    assert finite
    assert (loss, norm) == pytest.approx(expected[:2], rel=1e-5)
    assert_same_gradients(several, one)


def test_accumulated_steps_clip_and_skip_as_one_does():
    parts = [batch(seed=1), batch(seed=2)]
    several, one = step_with(model(), clip_norm=0.01), step_with(model(), clip_norm=0.01)
    assert run(several, parts)[1] == pytest.approx(run(one, joined(parts))[1], rel=1e-5)
    assert_same_gradients(several, one, atol=1e-8)
    before = {name: np.array(value) for name, value in tree_flatten(several.model.parameters())}
    several.model.embedding.weight = several.model.embedding.weight.at[3, 0].add(mx.array(float("inf")))
    assert run(several, parts)[2] is False
    after = dict(tree_flatten(several.model.parameters()))
    assert all(np.array_equal(np.array(after[name]), before[name]) for name in before if name != "embedding.weight")


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 39, 40])
def test_the_loss_in_chunks_is_the_loss(rows, cap, monkeypatch):
    """Of 40 positions, some of them padding, in a vocabulary of 23."""
    rng = np.random.default_rng(rows)
    h, w, b = (mx.array(rng.standard_normal(shape), mx.float32) for shape in ((40, 8), (V, 8), (V,)))
    y = mx.array(rng.integers(0, 5, 40))

    def value_and_gradients():
        def loss(h, w, b):
            return 3 * label_smoothed_loss(h, classifier_of(w, b, logit_cap=cap), y, 0.1, 0)

        return mx.value_and_grad(loss, argnums=(0, 1, 2))(h, w, b)

    loss, gradients = value_and_gradients()
    monkeypatch.setattr(losses, "MAX_LOGITS", rows * V)
    in_chunks, their_gradients = value_and_gradients()
    assert in_chunks.item() == pytest.approx(loss.item(), rel=1e-6)
    classifier = classifier_of(w, b, logit_cap=cap)
    smoothed, plain = losses.losses(h, classifier, y, 0.1, 0)
    assert 3 * smoothed.item() == pytest.approx(loss.item(), rel=1e-6)
    assert plain.item() == pytest.approx(label_smoothed_loss(h, classifier, y, 0.0, 0).item(), rel=1e-6)
    for ours, expected in zip(their_gradients, gradients, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_frozen_classifier_has_smaller_chunks_and_no_gradient(cap, monkeypatch):
    rng = np.random.default_rng(1)
    h, w = (mx.array(rng.standard_normal(shape), mx.float32) for shape in ((40, 8), (V, 8)))
    y = mx.array(rng.integers(0, 5, 40))
    classifier = classifier_of(w, logit_cap=cap)
    run = mx.value_and_grad(lambda h: label_smoothed_loss(h, classifier, y, 0.1, 0))
    expected, gradient = run(h)
    classifier.layer.freeze()
    monkeypatch.setattr(losses, "FROZEN_LOGITS", 0)
    monkeypatch.setattr(losses, "FROZEN_ROWS", 7)
    products = []
    monkeypatch.setattr(losses, "_product", lambda *inputs, whole=losses._product: products.append(1) or whole(*inputs))
    loss, found = run(h)
    assert len(products) == 14 if cap else 6
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(np.array(found), np.array(gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("cap", [None, 2.0])
def test_chunks_take_the_memory_of_one(cap, monkeypatch):
    h, w = mx.random.normal((2000, 8)), mx.random.normal((500, 8))
    y = mx.ones((2000,), mx.int32)
    mx.eval(h, w, y)

    def peak():
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        classifier = classifier_of(w, logit_cap=cap)
        mx.eval(mx.value_and_grad(lambda h: label_smoothed_loss(h, classifier, y, 0.1, 0))(h))
        return mx.get_peak_memory() - before

    whole = peak()
    monkeypatch.setattr(losses, "MAX_LOGITS", 100 * 500)
    assert peak() < whole / 5


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_networks_gradient_computes_the_activation_again(activation):
    """The same numbers, without what is within the activation: 3 arrays of the inner width are stored, not 5 or 6."""
    mx.random.seed(2)
    config = TransformerConfig(vocab_size=V, d_model=8, heads=1, d_ff=64, gated=True, activation=activation)
    layers, x = [FeedForward(config) for _ in range(30)], mx.random.normal((2, 100, 8))
    given = [layer.parameters() for layer in layers]
    mx.eval(given, x)

    def run(training):
        def loss(x, parameters):
            for layer, own in zip(layers, parameters, strict=True):
                layer.update(own)
                x = x + layer.train(training)(x)
            return (x * x).sum()

        mx.reset_peak_memory()
        before = mx.get_active_memory()
        _, gradients = mx.value_and_grad(loss, (0, 1))(x, given)
        mx.eval(gradients)
        return mx.get_peak_memory() - before, [np.array(array) for _, array in tree_flatten(gradients)]

    (peak, ours), (plain, expected) = run(True), run(False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert peak < 0.75 * plain


def test_a_layer_checkpointed_drops_what_it_dropped():
    """Otherwise its gradient would be that of another function than the one whose value was taken."""
    dropout = Dropout(0.5)

    def loss(x, again):
        mx.random.seed(3)
        y = checkpointed(dropout, dropout, x) if again else dropout(x)
        return (y * y).sum(), y

    x = mx.random.normal((50, 20))
    (_, y), gradient = mx.value_and_grad(lambda x: loss(x, True))(x)
    np.testing.assert_allclose(np.array(gradient), 4 * np.array(y), rtol=1e-6)  # d(y^2) = 2y * 1/0.5 where kept
    assert 0.4 < (np.array(y) == 0).mean() < 0.6
    mx.random.seed(3)
    assert not np.array_equal(np.array(checkpointed(dropout, dropout, x)), np.array(checkpointed(dropout, dropout, x)))


def of_config(**values):
    mx.random.seed(1)
    sizes = {"vocab_size": V, "d_model": 16, "heads": 2, "d_ff": 24, "dropout": 0.0}
    made = Transformer(TransformerConfig(**{**sizes, "encoder_layers": 2, "decoder_layers": 2, **values}))
    mx.eval(made.parameters())
    return made.train()


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative"])
def test_checkpointed_layers_give_the_same_gradient(positions):
    plain, again = (step_with(of_config(positions=positions)) for _ in range(2))
    checkpoint_layers(again.model)
    results = run(plain, batch()), run(again, batch())
    assert results[1][:2] == pytest.approx(results[0][:2], rel=1e-5)
    assert_same_gradients(again, plain)
    assert again.model.weights().keys() == plain.model.weights().keys()
    again.model.eval()
    plain.model.update(again.model.parameters())
    ids = mx.array(batch().source)
    np.testing.assert_array_equal(np.array(again.model(ids, ids)), np.array(plain.model.eval()(ids, ids)))


def test_checkpointed_layers_are_others_with_the_same_parts():
    made = of_config().freeze(recurse=True, keys=["bias"])
    before = list(made.encoder.layers)
    trained = {name for name, _ in tree_flatten(made.trainable_parameters())}
    checkpoint_layers(made)
    for old, new in zip(before, made.encoder.layers, strict=True):
        assert type(old) is EncoderLayer
        assert isinstance(new, EncoderLayer)
        assert new is not old
        assert new.self_attention is old.self_attention
        assert new.training
    assert {name for name, _ in tree_flatten(made.trainable_parameters())} == trained
    assert not made.eval().encoder.layers[0].training


@slow
@gpu_in_slow
@pytest.mark.usefixtures("on_cpu")
def test_checkpointed_layers_take_less_than_half_of_the_memory():
    """Of a deep stack: what is left is a layer's insides, every layer's input, and the parameters four times."""

    def peak(checkpointing):
        step = step_with(of_config(encoder_layers=6, decoder_layers=6, d_ff=64, heads=4), streams=1)
        if checkpointing:
            checkpoint_layers(step.model)
        data = batch(rows=32, source=64, target=64, ragged=False)
        run(step, data)
        mx.reset_peak_memory()
        run(step, data)
        return mx.get_peak_memory()

    assert peak(True) < peak(False) / 2


def test_dropout_in_checkpointed_layers():
    """It draws otherwise than without, and again at each step; that a layer's draws are repeated is checked above."""
    plain, again = step_with(model(0.3)), step_with(model(0.3))
    checkpoint_layers(again.model)
    losses = [run(again, batch(), 0.0)[0] for _ in range(2)]
    assert len({run(plain, batch(), 0.0)[0], *losses}) == 3


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_types_keep_float32_parameters_and_moments(precision):
    low, full = step_with(model(), precision=precision), step_with(model())
    loss, norm, finite = run(low, batch())
    expected = run(full, batch())
    assert finite
    assert (loss, norm) == pytest.approx(expected[:2], rel=0.02)
    kept = [value.dtype for name, value in tree_flatten([low.model.parameters(), low.state]) if "step" not in name]
    assert set(kept) == {mx.float32}
    one, other = (np.concatenate([m.ravel() for m in moments(step).values()]) for step in (low, full))
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    assert 1e-5 < error < 0.03  # it is rounded, and by no more than the type's bits


@pytest.mark.usefixtures("on_cpu")
def test_the_factor_of_float16():
    """Halved where a gradient overflows, doubled after many steps without; it leaves no trace in the gradient."""
    arithmetic = Arithmetic("float16")
    assert arithmetic.scaled(mx.array(2.0)).item() == 2 * FIRST_FACTOR
    assert arithmetic.unscaled({"w": mx.array(3.0)})["w"].item() == 3 / FIRST_FACTOR
    arithmetic.settle(mx.array(False))
    assert arithmetic.state["loss_factor"].item() == FIRST_FACTOR / 2
    for _ in range(1999):
        arithmetic.settle(mx.array(True))
    assert arithmetic.state["loss_factor"].item() == FIRST_FACTOR / 2
    arithmetic.settle(mx.array(True))
    assert arithmetic.state["loss_factor"].item() == FIRST_FACTOR
    assert arithmetic.state["steps_of_loss_factor"].item() == 0
    step = step_with(model(), precision="float16")
    step.arithmetic.state["loss_factor"] = mx.array(2.0**40)
    assert run(step, batch())[2] is False
    assert step.state["loss_factor"].item() == 2.0**39
    assert step.state["step"].item() == 0
