"""Check MLX's gradients against finite differences of the float64 reference, for every kind of parameter.

The loss is the trainer's label-smoothed cross entropy of the next token (section 5.4), computed in float64. No
derivative here is derived by hand:

    L = 1/N sum_i [ logsumexp(z_i) - (1 - e) z_i[y_i] - e mean_v z_i[v] ]        over the N targets that aren't padding
    dL/dw . d = (L(w + h d) - L(w - h d)) / 2h + O(h^2)

A parameter of each kind (a name without its layer's number) is drawn at random. d is a random direction through all of
its elements, so that no wrong element is missed, and then some single elements. If two step sizes disagree (e.g. a
relu's kink lies between), another d is drawn. MLX is imported inside functions.

B batch, S source, T target, N targets that count, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import padding, words
from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

Array = NDArray

SMOOTHING = 0.1
LENGTH = 16  # MLX has gradients for this many queries on every device (`mlx_transformer.device`)
STEP = 1e-4
ELEMENTS = 2
TRIES = 8
# As a share of the gradient's size. Worst of 15 configs on a CPU: 9e-7, and 4e-6 if the gradient is zero by symmetry.
BUDGET = 1e-5


@dataclass(frozen=True)
class Gradient:
    """A derivative along `direction` (an element's index, or "all of it"), by MLX (`got`) and by finite differences.

    `error`: |got - expected| divided by a size: the rms of the parameter's gradient, plus a tenth of the whole model's
    (the biases of keys have no gradient), plus |expected|.
    """

    kind: str
    parameter: str
    direction: str
    got: float
    expected: float
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= BUDGET

    @property
    def summary(self) -> str:
        return (
            f"{self.parameter} {self.direction}: {self.got:.9g}, by differences {self.expected:.9g}, "
            f"{self.error / BUDGET:.3g} of the budget"
        )


@dataclass(frozen=True)
class Batch:
    """`inputs`: ids (B,S), then (B,T) for models with both stacks. `mask` (B,S). `targets`: next tokens, or padding."""

    inputs: tuple[Array, ...]
    mask: Array
    targets: Array


def kind_of(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.N.", name)


def check_gradients(config: TransformerConfig, weights: Mapping[str, Array], seed: int) -> list[Gradient]:
    """Check a parameter of each kind; the seed draws parameters, inputs and directions.

    Raises UserError if the model's head isn't of kind "vocabulary".
    """
    if config.head.kind != "vocabulary":
        raise UserError(f"gradients are those of logits of words; the head is of kind {config.head.kind!r}")
    rng = np.random.default_rng(seed)
    batch = _batch(config, rng)
    computed = mlx_gradients(config, weights, batch)
    overall = float(np.sqrt(np.mean(np.concatenate([g.reshape(-1) ** 2 for g in computed.values()]))))
    reference = Reference(config, weights)
    kinds: dict[str, list[str]] = {}
    for name in weights:
        kinds.setdefault(kind_of(name), []).append(name)
    gradients = []
    for kind, names in kinds.items():
        name = str(rng.choice(names))
        gradient = computed[name].astype(np.float64)
        size = float(np.sqrt(np.mean(gradient**2))) + 0.1 * overall
        for k in range(1 + ELEMENTS):
            where, direction, expected = _difference(reference, batch, name, k == 0, rng)
            got = float((gradient * direction).sum())
            gradients.append(Gradient(kind, name, where, got, expected, abs(got - expected) / (size + abs(expected))))
    return gradients


def loss(reference: Reference, batch: Batch, smoothing: float = SMOOTHING) -> float:
    """Compute the loss L (see the module's docstring) in float64."""
    logits = reference(*batch.inputs, mask=batch.mask)
    z = logits.reshape(-1, logits.shape[-1])
    y = batch.targets.reshape(-1)
    top = z.max(axis=-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(axis=-1, keepdims=True)))[:, 0]
    nll = lse - (1 - smoothing) * z[np.arange(len(y)), y] - smoothing * z.mean(axis=-1)
    return float(nll[y != reference.config.pad_id].mean())


def mlx_gradients(config: TransformerConfig, weights: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
    """Compute dL/dw for all parameters with MLX's automatic differentiation, the trainer's loss and TF32 off."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten

    from mlx_transformer.device import gradient_device, set_tf32
    from mlx_transformer.runtime.transformer import Transformer
    from mlx_transformer.training.loss import label_smoothed_loss

    set_tf32(False)
    with mx.stream(gradient_device(min(ids.shape[1] for ids in batch.inputs))):
        model = Transformer.from_weights(config, weights)
        targets, count = mx.array(batch.targets), int((batch.targets != config.pad_id).sum())

        def mean_loss() -> mx.array:
            hidden = model.hidden(*batch.inputs, batch.mask)
            return label_smoothed_loss(hidden, model.classifier(), targets, SMOOTHING, config.pad_id) / count

        _, gradients = nn.value_and_grad(model, mean_loss)()
        return {name: np.array(value) for name, value in tree_flatten(gradients)}  # type: ignore[misc]


def _batch(c: TransformerConfig, rng: np.random.Generator) -> Batch:
    """Draw three rows of different lengths with random next tokens."""
    length = min(LENGTH, c.max_positions - 1)
    mask = padding(np.array([length, max(1, length - 3), max(1, length - 1)]), length, "right", rng)
    ids = np.where(mask, words(c, rng, mask.shape, c.has_encoder), c.pad_id)
    if c.architecture != "encoder-decoder":
        targets = np.where(mask, words(c, rng, mask.shape, False), c.pad_id)
        return Batch((ids,), mask, targets)
    real = padding(np.array([max(1, length - 2), length, max(1, length - 1)]), length, "right", rng)
    outputs = words(c, rng, real.shape, False)
    starts = np.full((len(outputs), 1), c.bos_id, np.int64)
    shifted = np.concatenate([starts, outputs[:, :-1]], axis=1)
    return Batch((ids, shifted), mask, np.where(real, outputs, c.pad_id))


def _difference(
    reference: Reference, batch: Batch, name: str, everywhere: bool, rng: np.random.Generator
) -> tuple[str, Array, float]:
    """Return (direction in words, d of unit length, dL/dw . d by central differences)."""
    for _ in range(TRIES):
        where, d = _direction(reference.weights[name], everywhere, rng)
        coarse, fine = _central(reference, batch, name, d, STEP), _central(reference, batch, name, d, STEP / 2)
        if abs(coarse - fine) <= 1e-6 * max(abs(fine), 1e-3):
            break
    return where, d, fine


def _direction(weight: Array, everywhere: bool, rng: np.random.Generator) -> tuple[str, Array]:
    if everywhere:
        d = rng.standard_normal(weight.shape)
        return "all of it", d / np.linalg.norm(d)
    place = tuple(int(rng.integers(n)) for n in weight.shape)
    d = np.zeros(weight.shape)
    d[place] = 1.0
    return str(list(place)), d


def _central(reference: Reference, batch: Batch, name: str, d: Array, step: float) -> float:
    weight = reference.weights[name]
    try:
        values = []
        for sign in (1, -1):
            reference.weights[name] = weight + sign * step * d
            values.append(loss(reference, batch))
    finally:
        reference.weights[name] = weight
    return (values[0] - values[1]) / (2 * step)


def worst_of_each(gradients: list[Gradient]) -> Iterator[Gradient]:
    """Yield the derivative with the largest error of each kind of parameter."""
    for kind in dict.fromkeys(g.kind for g in gradients):
        yield max((g for g in gradients if g.kind == kind), key=lambda g: g.error)
