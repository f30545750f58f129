"""One optimizer step: streams, clipping, Adam, steps that are not finite; the compiled step is the same step."""

import mlx.core as mx
import numpy as np
import pytest
from choices import both_choices
from mlx import nn
from mlx.utils import tree_flatten
from runtimes import mlx_gpu
from tiny_step import BETAS, EPSILON, batch, model, run, step_with

from mlx_transformer.data.batches import Batch
from mlx_transformer.training.step import TrainStep

pytestmark = both_choices


def flat(tree):
    return {name: np.array(value) for name, value in tree_flatten(tree)}


def first_gradients(step):
    """After the first step Adam's m is (1 - beta1) times the gradient."""
    return {name: v / (1 - BETAS[0]) for name, v in flat(step.optimizer.state).items() if name.endswith(".m")}


def plain_gradients(made, data, smoothing=0.1):
    """Of the mean over target tokens of the smoothed cross entropy, by autodiff of the whole batch at once."""
    source, before, out = (mx.array(x) for x in (data.source, data.target_in, data.target_out))

    def loss():
        logits = made(source, before, mx.array(data.source != 0))
        losses = nn.losses.cross_entropy(logits, out, label_smoothing=smoothing, reduction="none")
        return (losses * (out != 0)).sum() / data.tokens

    value, gradients = nn.value_and_grad(made, loss)()
    return value.item(), {f"{name}.m": value for name, value in flat(gradients).items()}


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("streams", [None, 1, 2, 3, 9])
def test_streams_compute_the_gradient_of_the_whole_batch(streams, ragged):
    step = step_with(model(), streams)
    data = batch(ragged=ragged)
    loss, gradients = plain_gradients(step.model, data)
    computed, norm, finite = run(step, data)
    assert finite
    assert computed == pytest.approx(loss, rel=1e-5)
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in gradients.values())), rel=1e-5)
    assert first_gradients(step).keys() == gradients.keys()
    for name, gradient in first_gradients(step).items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_streams_give_the_parameters_of_one():
    parameters = []
    for streams in (1, 2, None):
        step = step_with(model(), streams)
        for seed in range(3):
            run(step, batch(rows=6, seed=seed))
        parameters.append(flat(step.model.parameters()))
    for name, one in parameters[0].items():
        for other in parameters[1:]:
            np.testing.assert_allclose(other[name], one, atol=3e-5, err_msg=name)


@pytest.mark.usefixtures("on_cpu")
def test_same_seed_same_bits_and_dropout_differs_between_parts_and_steps():
    first, again = (step_with(model(dropout=0.3), 2) for _ in range(2))
    rows = batch(rows=1, ragged=False)
    data = Batch(*(np.repeat(x, 2, axis=0) for x in (rows.source, rows.target_in, rows.target_out)), 2 * rows.tokens)
    losses = []
    for step in (first, again):
        mx.random.seed(5)
        losses.append([run(step, data, rate=0.0)[0] for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    mx.random.seed(5)
    twice = run(step_with(model(dropout=0.3), 1), rows, rate=0.0)[0]
    assert twice != losses[0][0], "the second row, on the second stream, has the dropout of the first"


def test_clipping_scales_all_gradients_together():
    free, clipped, loose = (step_with(model(), clip_norm=norm) for norm in (0.0, 0.01, 1e6))
    norms = [run(step, batch())[1] for step in (free, clipped, loose)]
    order = 1e-6 if mlx_gpu() else 0  # in which a GPU's threads add up a table's gradient
    np.testing.assert_allclose(norms, norms[0], rtol=order)  # before clipping
    assert norms[0] > 0.1
    unclipped = first_gradients(free)
    for name, gradient in first_gradients(clipped).items():
        np.testing.assert_allclose(gradient, unclipped[name] * 0.01 / norms[0], rtol=1e-3, atol=1e-9)
    for name, gradient in first_gradients(loose).items():
        np.testing.assert_allclose(gradient, unclipped[name], rtol=0, atol=order * np.abs(gradient).max())


class Recording(TrainStep):
    """Hands on each step's gradients: what a compiled function computes leaves it as a result or not at all."""

    def _finish(self, loss, gradients):
        return *super()._finish(loss, gradients), gradients


def test_adam_with_bias_correction():
    """Kingma and Ba 2015, algorithm 1, in float64, fed with the same gradients; the rate changes every step."""
    step = step_with(model(), streams=1, kind=Recording)
    weights = {name: w.astype(np.float64) for name, w in flat(step.model.parameters()).items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for t, rate in enumerate((1e-3, 2e-3, 3e-3, 1e-3, 5e-4), start=1):
        *results, gradients = step(batch(seed=t), rate)
        step.evaluate(*results)
        for name, gradient in flat(gradients).items():
            g = gradient.astype(np.float64)
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
            corrected = m[name] / (1 - BETAS[0] ** t), v[name] / (1 - BETAS[1] ** t)
            weights[name] -= rate * corrected[0] / (np.sqrt(corrected[1]) + EPSILON)
        for name, weight in flat(step.model.parameters()).items():
            np.testing.assert_allclose(weight, weights[name], rtol=1e-5, atol=1e-6, err_msg=f"step {t}, {name}")
    assert step.state["step"].item() == 5


def spoilable(step):
    """The loss times `model._factor`: one of the model's arrays, since a compiled step reads nothing else anew."""
    original, step.model._factor = step.loss, mx.array(1.0)
    step.loss = lambda *arguments: original(*arguments) * step.model._factor
    return step


def state_of(step):
    return {**flat(step.model.parameters()), **flat(step.optimizer.state)}


def check_a_bad_step_changes_nothing(step, factor):
    run(step, batch(seed=1))
    before = state_of(step)
    step.model._factor = mx.array(factor)
    assert run(step, batch(seed=2))[2] is False
    after = state_of(step)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].tobytes() == value.tobytes(), name
    step.model._factor = mx.array(1.0)
    assert run(step, batch(seed=2))[2] is True
    assert np.isfinite(np.concatenate([x.ravel() for x in state_of(step).values()])).all()
    assert state_of(step)["step"] == before["step"] + 1


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("streams", [None, 1, 2])
def test_a_step_that_is_not_finite_changes_nothing(streams, factor):
    check_a_bad_step_changes_nothing(spoilable(step_with(model(), streams, clip_norm=1.0)), factor)


def test_a_batch_of_padding_changes_no_weight_to_nan():
    step = step_with(model(), 2)
    empty = batch()
    empty = Batch(*(np.zeros_like(x) for x in (empty.source, empty.target_in, empty.target_out)), 0)
    assert run(step, empty) == (0.0, 0.0, True)
    assert all(np.isfinite(w).all() for w in flat(step.model.parameters()).values())


@pytest.fixture
def compiler():
    """MLX compiles C++ at run time on Linux CPUs, which g++ 13 and later refuse (ml-explore/mlx#2281)."""
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * x)(mx.array(1.0)))
    except RuntimeError as error:
        pytest.skip(f"MLX can't compile here: {str(error)[:99]}")


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_compiled_step_is_the_same_step():
    eager, compiled = step_with(model(), clip_norm=1.0), step_with(model(), clip_norm=1.0, streams=0)
    traces = []
    original = compiled.loss
    compiled.loss = lambda *arguments: (traces.append(1), original(*arguments))[1]
    for seed, rate in enumerate((1e-3, 2e-3, 3e-3)):
        ones, others = run(eager, batch(seed=seed), rate), run(compiled, batch(seed=seed), rate)
        assert ones == pytest.approx(others, rel=1e-4)
    assert len(traces) == 1, "a new learning rate or step must not trace again"
    state = state_of(compiled)
    for name, value in state_of(eager).items():
        np.testing.assert_allclose(state[name], value, rtol=1e-3, atol=2e-5, err_msg=name)
    run(compiled, batch(ragged=False))
    assert len(traces) == 2  # without a mask it is another function


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_compiled_step_draws_new_dropout_and_skips_bad_steps():
    step = step_with(model(dropout=0.3), streams=0)
    losses = [run(step, batch(), rate=0.0)[0] for _ in range(3)]
    assert len(set(losses)) == 3
    mx.random.seed(9)
    once = run(step, batch(), rate=0.0)[0]
    mx.random.seed(9)
    assert run(step, batch(), rate=0.0)[0] == once

    factor = mx.array(1.0)  # read as an input of the compiled step: its weights
    step = step_with(model(), clip_norm=1.0, streams=0)
    run(step, batch(seed=1))
    bias = step.model.output_proj.bias
    before = state_of(step)
    step.model.output_proj.bias = bias * mx.array(float("nan")) * factor
    spoiled = state_of(step)
    assert run(step, batch(seed=2))[2] is False
    for name, value in state_of(step).items():
        assert value.tobytes() == spoiled[name].tobytes(), name
    step.model.output_proj.bias = bias
    assert run(step, batch(seed=2))[2] is True
    assert state_of(step)["step"] == before["step"] + 1
