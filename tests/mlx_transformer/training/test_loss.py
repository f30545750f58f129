"""The fused loss against the formula of section 5.4 written out in float64, and against autodiff; a step's loss against
that of the network's own logits, for every option."""

import mlx.core as mx
import numpy as np
import pytest
from combined import each_value
from covering_configs import COVERING, config_of, name_of
from mlx.utils import tree_flatten
from random_models import random_weights
from tiny_step import classifier_of

from mlx_transformer import Transformer
from mlx_transformer.training.loss import label_smoothed_loss, losses
from mlx_transformer.training.optimizers import Optimizer
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.step import TrainStep

pytestmark = pytest.mark.gpu_path

PAD, N, V, D = 0, 12, 17, 5


def inputs(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    h, W, b = rng.normal(size=(N, D)) * scale, rng.normal(size=(V, D)), rng.normal(size=V)
    y = rng.integers(1, V, N)
    y[[3, 7]] = PAD
    y[5] = y[4]  # the same row of W twice: its gradients must add up
    return h, W, b, y


def plain(h, W, b, y, smoothing):
    """-sum_v q_v log p_v with q = (1 - e) onehot(y) + e / V; the sum, and its gradients for h, W, b. Float64."""
    z = h @ W.T + b
    z -= z.max(axis=1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    p = np.exp(logp)
    q = (1 - smoothing) * np.eye(V)[y] + smoothing / V
    counted = (y != PAD)[:, None]
    dz = (p - q) * counted
    return -(q * logp * counted).sum(), dz @ W, dz.T @ h, dz.sum(axis=0)


def fused(h, W, b, y, smoothing, dtype=mx.float32):
    arrays = [mx.array(x, dtype=dtype) for x in (h, W, b)]
    targets = mx.array(y, dtype=mx.int32)

    def loss(h, W, b):
        return label_smoothed_loss(h, classifier_of(W, b), targets, smoothing, PAD)

    loss, gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)
    return loss, *gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_value_and_gradients_are_the_formula(smoothing):
    for computed, expected in zip(fused(*inputs(), smoothing), plain(*inputs(), smoothing), strict=True):
        np.testing.assert_allclose(np.array(computed), expected, rtol=2e-5, atol=2e-5)


def test_gradients_are_those_of_autodiff_whatever_comes_after():
    h, W, b, y = (mx.array(x, dtype=mx.float32) for x in inputs())
    y = y.astype(mx.int32)

    def by_definition(h, W, b):
        logp = mx.log(mx.softmax(h @ W.T + b, axis=-1))
        q = 0.9 * (y[:, None] == mx.arange(V)) + 0.1 / V
        return (-(q * logp).sum(axis=-1) * (y != PAD)).sum() ** 2 / 7

    def with_our_loss(h, W, b):
        return label_smoothed_loss(h, classifier_of(W, b), y, 0.1, PAD) ** 2 / 7

    expected, computed = (mx.grad(f, argnums=(0, 1, 2))(h, W, b) for f in (by_definition, with_our_loss))
    for one, other in zip(computed, expected, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-4)


def test_no_bias_and_more_axes_mean_the_same():
    h, W, _, y = (mx.array(x) for x in inputs())
    flat = label_smoothed_loss(h, classifier_of(W, mx.zeros(V)), y, 0.1, PAD)
    shaped = label_smoothed_loss(h.reshape(3, 4, D), classifier_of(W), y.reshape(3, 4), 0.1, PAD)
    assert flat.item() == shaped.item()
    assert flat.shape == ()


def test_a_batch_of_padding_gives_zero_and_no_gradient():
    h, W, b, _ = inputs()
    for computed in fused(h, W, b, np.full(N, PAD), 0.1):
        assert np.array(mx.abs(computed).max()) == 0


def test_large_logits_stay_finite():
    values = inputs(scale=1e4)
    for computed, expected in zip(fused(*values, 0.1), plain(*values, 0.1), strict=True):
        np.testing.assert_allclose(np.array(computed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_low_precision_stays_in_type_and_near_the_formula(dtype):
    """The formula of the rounded inputs. Measured: a gradient is off by one epsilon of its norm at most."""
    rounded = [np.array(mx.array(x).astype(dtype).astype(mx.float32), np.float64) for x in inputs()[:3]]
    y = inputs()[3]
    loss, *gradients = fused(*rounded, y, 0.1, dtype=dtype)
    expected, *exact = plain(*rounded, y, 0.1)
    eps = mx.finfo(dtype).eps
    assert loss.dtype == mx.float32
    assert [g.dtype for g in gradients] == [dtype] * 3
    np.testing.assert_allclose(loss.item(), expected, rtol=eps)
    for computed, reference in zip(gradients, exact, strict=True):
        assert np.linalg.norm(np.array(computed.astype(mx.float32)) - reference) < 4 * eps * np.linalg.norm(reference)


@pytest.mark.parametrize(("dtype", "unit"), [(mx.float16, 2.0**-11), (mx.bfloat16, 2.0**-8)])
def test_low_types_add_up_in_float32(dtype, unit):
    """The bias's gradient sums over all rows: with 4096 of one sign a sum in bfloat16 stands still at 256 terms."""
    rows = 4096
    h, W, b = mx.zeros((rows, D), dtype), mx.zeros((V, D), dtype), mx.zeros(V, dtype)
    y = mx.ones((rows,), mx.int32)
    computed = mx.grad(lambda b: label_smoothed_loss(h, classifier_of(W, b), y, 0.1, PAD))(b)
    expected = rows * (1 / V - 0.1 / V - 0.9 * (np.arange(V) == 1))
    np.testing.assert_allclose(np.array(computed.astype(mx.float32)), expected, rtol=2 * unit)


@pytest.mark.parametrize("choice", each_value(COVERING), ids=name_of)
def test_training_and_a_search_among_ids_take_the_logits_of_the_network(choice):
    """All options of logits are in all three: values and gradients are those of the logits that the model gives."""
    config, e = config_of(choice), 0.1
    model = Transformer.from_weights(config, random_weights(config, 1)).eval()
    rng, length = np.random.default_rng(2), 16
    sizes = {"encoder-decoder": (config.source_vocab_size, config.vocab_size)}
    ids = [rng.integers(0, size, (2, length)) for size in sizes.get(config.architecture, (config.vocab_size,))]
    targets = mx.array(rng.integers(0, config.vocab_size, (2, length)))
    step = TrainStep(model, Optimizer(model, TrainingOptions(steps=9)), smoothing=e)

    def by_definition(parameters):
        z = model.update(parameters)(*ids)
        log_p = z - mx.logsumexp(z, axis=-1, keepdims=True)
        right = mx.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return -mx.sum(((1 - e) * right + e * mx.mean(log_p, axis=-1)) * (targets != config.pad_id))

    def of_a_step(parameters):
        model.update(parameters)
        return step.loss(targets, None, *map(mx.array, ids))

    parameters = model.parameters()
    (expected, gradients), (found, fused) = (mx.value_and_grad(f)(parameters) for f in (by_definition, of_a_step))
    model.update(parameters)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert step._loss_by(losses, targets, None, [*map(mx.array, ids)])[0].item() == pytest.approx(
        found.item(), rel=1e-5
    )
    norm = np.sqrt(sum(float(mx.sum(mx.square(g))) for _, g in tree_flatten(gradients)))
    for (name, gradient), (_, ours) in zip(tree_flatten(gradients), tree_flatten(fused), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(gradient), rtol=1e-3, atol=1e-5 * norm, err_msg=name)

    hidden, chosen = model.hidden(*ids), mx.array([5, 6, 1])
    among = model.classifier().among(chosen)(hidden)
    np.testing.assert_allclose(np.array(among), np.array(model.logits(hidden)[..., chosen]), rtol=1e-5, atol=1e-5)
