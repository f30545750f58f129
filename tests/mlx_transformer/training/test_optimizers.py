"""Each optimizer by its paper's formulas or PyTorch's numbers, over changing rates; decay where it belongs."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from golden_numbers import RATES, numbers
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from tiny_step import batch, classifier_of, model, run, step_with

from mlx_transformer.system.errors import UserError
from mlx_transformer.training.loss import label_smoothed_loss
from mlx_transformer.training.optimizers import KINDS, Optimizer, matching
from mlx_transformer.training.options import TrainingOptions
from mlx_transformer.training.step import _clip

GOLDEN = np.load(Path(__file__).with_name("golden_torch.npz"))


class One(nn.Module):
    """A network of one matrix."""

    def __init__(self):
        super().__init__()
        self.weight = mx.array(numbers(1, 6, 4))
        self.config = SimpleNamespace()


def optimized(monkeypatch, **options):
    """(steps, 6, 4): as make_golden.py has it."""
    for name in ("embedding_names", "added_table_names"):
        monkeypatch.setattr(f"mlx_transformer.training.optimizers.{name}", lambda config: set())
    monkeypatch.setattr("mlx_transformer.training.optimizers.output_weight_name", lambda config: "")
    made = One()
    optimizer, after = Optimizer(made, TrainingOptions(**options)), []
    for step, rate in enumerate(RATES):
        optimizer.set_rate(rate)
        optimizer.update(made, {"weight": mx.array(numbers(100 + step, 6, 4))})
        after.append(np.array(made.weight))
    return np.array(after)


@pytest.mark.parametrize(("optimizer", "decay"), [("adam", None), ("adamw", 0.3)])
def test_adam_and_adamw_are_pytorchs(optimizer, decay, monkeypatch):
    found = optimized(monkeypatch, optimizer=optimizer, weight_decay=decay)
    np.testing.assert_allclose(found, GOLDEN[optimizer], rtol=1e-5, atol=1e-6)


def by_formula(update, decay, rate_factor=1.0):
    """w <- w (1 - rate decay) - rate update(g, t), in float64."""
    w, after = numbers(1, 6, 4).astype(np.float64), []
    for t, rate in enumerate(RATES, start=1):
        rate *= rate_factor
        w = w * (1 - rate * decay) - rate * update(numbers(99 + t, 6, 4).astype(np.float64), t)
        after.append(w)
    return np.array(after)


def lion(b1=0.9, b2=0.98):
    """Chen et al. 2023, program 1."""
    m = np.zeros((6, 4))

    def update(g, t):
        nonlocal m
        c, m = b1 * m + (1 - b1) * g, b2 * m + (1 - b2) * g
        return np.sign(c)

    return update


def adafactor():
    """Shazeer and Stern 2018, algorithm 4, without relative steps or a first moment."""
    rows, columns = np.zeros((6, 1)), np.zeros((1, 4))

    def update(g, t):
        nonlocal rows, columns
        kept, squares = 1 - t**-0.8, g * g + 1e-30
        rows = kept * rows + (1 - kept) * squares.mean(axis=1, keepdims=True)
        columns = kept * columns + (1 - kept) * squares.mean(axis=0, keepdims=True)
        u = g / np.sqrt(rows * columns / rows.mean())
        return u / max(1.0, np.sqrt((u * u).mean()))

    return update


def muon(momentum=0.95):
    """Jordan 2024: Nesterov's momentum, five Newton-Schulz steps; of Adam's size (Liu et al. 2025, equation 4)."""
    v = np.zeros((6, 4))

    def update(g, t):
        nonlocal v
        v = momentum * v + (1 - momentum) * g
        x = (momentum * v + (1 - momentum) * g).T
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return 0.2 * 6**0.5 * x.T

    return update


@pytest.mark.parametrize(
    ("optimizer", "update", "decay"), [("lion", lion, 0.05), ("adafactor", adafactor, 0.0), ("muon", muon, 0.01)]
)
def test_the_others_are_their_papers(optimizer, update, decay, monkeypatch):
    found = optimized(monkeypatch, optimizer=optimizer)
    expected = by_formula(update(), decay, KINDS[optimizer].rate)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    decayed = optimized(monkeypatch, optimizer=optimizer, weight_decay=0.7)
    np.testing.assert_allclose(decayed, by_formula(update(), 0.7, KINDS[optimizer].rate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["smoothed", "plain"])
def test_the_loss_is_pytorchs(name):
    h, w, b = (mx.array(numbers(seed, *shape)) for seed, shape in ((2, (3, 7, 8)), (3, (19, 8)), (4, (19,))))
    targets, smoothing = mx.array(GOLDEN["targets"]), 0.1 if name == "smoothed" else 0.0

    def loss(h, w, b):
        return label_smoothed_loss(h, classifier_of(w, b), targets, smoothing, 0)

    value, gradients = mx.value_and_grad(loss, argnums=(0, 1, 2))(h, w, b)
    assert value.item() == pytest.approx(GOLDEN[f"{name}.loss"].item(), rel=1e-6)
    for part, gradient in zip("hwb", gradients, strict=True):
        np.testing.assert_allclose(np.array(gradient), GOLDEN[f"{name}.{part}"], rtol=1e-4, atol=1e-6)


def test_clipping_is_pytorchs():
    norm, gradients = _clip({"matrix": mx.array(numbers(6, 6, 4)), "vector": mx.array(numbers(7, 4))}, 0.7)
    assert norm.item() == pytest.approx(GOLDEN["clip.norm"].item(), rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(np.array(gradient), GOLDEN[f"clip.{name}"], rtol=1e-5)


@pytest.mark.usefixtures("device_choices")
@pytest.mark.parametrize("optimizer", KINDS)
def test_every_optimizer_lowers_the_loss_and_keeps_float32(optimizer):
    step = step_with(model(), optimizer=optimizer)
    losses = [run(step, batch(ragged=False), 1e-2)[0] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
    kinds = {value.dtype for name, value in tree_flatten(step.state) if not name.endswith("step")}
    assert kinds == {mx.float32}


def test_decay_spares_what_the_patterns_fit():
    """With a gradient of 0 Adam changes nothing, so that what is smaller afterwards has decayed."""

    def shrunk(**options):
        made = model()
        before = {name: np.array(value) for name, value in tree_flatten(made.parameters())}
        optimizer = Optimizer(made, TrainingOptions(optimizer="adamw", weight_decay=0.5, **options))
        optimizer.set_rate(0.1)
        optimizer.update(made, tree_map(mx.zeros_like, made.trainable_parameters()))
        after = dict(tree_flatten(made.parameters()))
        return {
            name for name, value in before.items() if value.any() and np.allclose(np.array(after[name]), 0.95 * value)
        }

    matrices = {name for name, value in tree_flatten(model().parameters()) if value.ndim == 2}
    assert shrunk() == matrices - {"embedding.weight"}
    assert shrunk(no_decay="*_proj.*") == {
        name for name, value in tree_flatten(model().parameters()) if "_proj" not in name and np.array(value).any()
    }


def test_muon_takes_the_matrices_inside_the_stacks():
    made = model()
    moments = {name for name, _ in tree_flatten(step_with(made, optimizer="muon").state)}
    first = {name.removeprefix("states.0.") for name in moments if name.startswith("states.0.")}
    inside = {f"{name}.v" for name, v in tree_flatten(made.parameters()) if v.ndim == 2 and name != "embedding.weight"}
    assert first == inside | {"step", "learning_rate"}


def test_patterns():
    names = ["encoder.layers.0.norm.weight", "encoder.layers.0.up_proj.bias", "embedding.weight"]
    assert matching(names, "encoder.*", "freeze") == frozenset(names[:2])
    assert matching(names, " *.bias , embedding.weight,", "freeze") == frozenset(names[1:])
    assert matching(names, "*.biases", "freeze", strict=False) == frozenset()
    with pytest.raises(UserError, match=r"freeze: 'encodr\.\*' fits no parameter; they are called such as encoder\.l"):
        matching(names, "encoder.*,encodr.*", "freeze")
