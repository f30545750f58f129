"""Residual connections and norms: what each of them does, with the other and without.

Dong et al. 2021 (2103.03404): attention without residual connections makes all positions one, doubly exponentially.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.layers import DecoderLayer, EncoderLayer, Tap, no_tap
from mlx_transformer.nn.masks import Mask
from mlx_transformer.nn.positions import Rotation

from .drawing import canvas, curves, draw_key, heat_map, logarithmic
from .measure import largest, number
from .network import copying, tiny
from .row import Found, Row, above, below, equal

VARIANTS = {
    "both": (True, True),
    "the residual alone": (True, False),
    "the norm alone": (False, True),
    "neither": (False, False),
}
"""Residual connections and norms, there or not."""

DEPTHS = (1, 2, 4, 8, 16, 24)

SEEDS = 4

SubLayer = Callable[[mx.array], mx.array]


def sub_layers(layer: EncoderLayer | DecoderLayer, memory: mx.array | None = None) -> list[tuple[SubLayer, nn.Module]]:
    """Each sub-layer of a layer and the norm that is its own, in their order. `memory`: what a decoder's looks at."""
    found: list[tuple[SubLayer, nn.Module]] = []
    if isinstance(layer, EncoderLayer):
        attend = partial(layer.attend_self, mask=None, rotation=None, tap=no_tap)
        found.append((attend, layer.self_attention_norm))
    else:
        assert memory is not None
        attend = partial(layer.attend_self, mask="causal", rotation=None, past=None, tap=no_tap)
        found.append((attend, layer.self_attention_norm))
        cross = layer.cross_attention.keys_values(memory)
        found.append((partial(layer.attend_cross, cross=cross, mask=None, tap=no_tap), layer.cross_attention_norm))
    return [*found, (partial(layer.transform, tap=no_tap), layer.feed_forward_norm)]


def through(layer: EncoderLayer, x: mx.array, residual: bool, norm: bool) -> mx.array:
    """A post-norm layer, without its residual connections or without its norms."""
    for sub_layer, normed in sub_layers(layer):
        y = sub_layer(x)
        y = x + y if residual else y
        x = normed(y) if norm else y
    return x


def residuals() -> Found:
    told, gradients = told_apart(), gradients_by_depth()
    deepest = {name: values[-1] / values[DEPTHS.index(2)] for name, values in gradients.items()}
    fourth = DEPTHS.index(4)
    return (
        {
            "largest |LayerNorm(x + Sublayer(x)) - output|, every layer of both stacks": formula_error("post"),
            "largest |x + Sublayer(LayerNorm(x)) - output|, pre-norm": formula_error("pre"),
            "the first, if half of attention is added": formula_error("post", added=0.5),
        }
        | {f"share of 4 layers' output that tells positions apart: {name}": told[name][fourth] for name in VARIANTS}
        | {f"gradient at the input, 24 layers / 2: {name}": deepest[name] for name in VARIANTS}
    )


def formula_error(placement: str, added: float = 1.0) -> float:
    """Of every layer, its output beside the formula. `added`: how much of the first sub-layer is."""
    model = tiny(norm_placement=placement)
    seen: dict[str, mx.array] = {}
    ids = mx.array([[5, 6, 7, 2]])
    model(ids, ids, tap=seen.__setitem__)
    memory = seen["encoder.norm" if placement == "pre" else f"encoder.layers.{len(model.encoder.layers) - 1}"]
    worst = 0.0
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        x = seen[f"{name}.embedding"]
        for i, layer in enumerate(stack.layers):
            for k, (sub_layer, norm) in enumerate(sub_layers(layer, memory)):
                share = added if k == 0 else 1.0
                x = norm(x + share * sub_layer(x)) if placement == "post" else x + share * sub_layer(norm(x))
            worst = max(worst, largest(x - seen[f"{name}.layers.{i}"]))
            x = seen[f"{name}.layers.{i}"]
    return worst


@lru_cache
def told_apart() -> dict[str, np.ndarray]:
    """|X - mean over positions| / |X| after each of `DEPTHS` fresh layers, by variant; mean of the seeds."""
    found = {}
    for name, variant in VARIANTS.items():
        rows = []
        for seed in range(SEEDS):
            model, x = fresh(seed, max(DEPTHS))
            shares = []
            for layer in model.encoder.layers:
                x = through(layer, x, *variant)
                shares.append(number(mx.linalg.norm(x - mx.mean(x, axis=1, keepdims=True)) / mx.linalg.norm(x)))
            rows.append([shares[depth - 1] for depth in DEPTHS])
        found[name] = np.mean(rows, axis=0)
    return found


@lru_cache
def gradients_by_depth() -> dict[str, np.ndarray]:
    """Norm of the gradient of a random projection of the stack's output by its input, at `DEPTHS`, by variant;
    geometric mean of the seeds."""
    return {name: np.array([_gradient(depth, *variant) for depth in DEPTHS]) for name, variant in VARIANTS.items()}


def _gradient(depth: int, residual: bool, norm: bool) -> float:
    norms = []
    for seed in range(SEEDS):
        model, x = fresh(seed, depth)
        direction = mx.random.normal((1, 16, 32))

        def output(x: mx.array, layers: list = model.encoder.layers, direction: mx.array = direction) -> mx.array:
            for layer in layers:
                x = through(layer, x, residual, norm)
            return mx.sum(x * direction)

        norms.append(number(mx.linalg.norm(mx.grad(output)(x))))
    return float(np.exp(np.mean(np.log(norms))))


def fresh(seed: int, depth: int) -> tuple[Transformer, mx.array]:
    """An encoder, and an input of 16 random vectors."""
    model = tiny(seed, architecture="encoder", encoder_layers=depth, decoder_layers=0, dropout=0.0)
    return model, mx.random.normal((1, 16, 32))


class Varied(EncoderLayer):
    """A post-norm layer as one of `VARIANTS` has it."""

    def __init__(self, config: TransformerConfig, residual: bool, norm: bool):
        super().__init__(config)
        self.residual, self.norm = residual, norm

    def __call__(self, x: mx.array, mask: Mask = None, rotation: Rotation = None, tap: Tap = no_tap) -> mx.array:
        return through(self, x, self.residual, self.norm)


def trained_loss(name: str, layers: int, seed: int, steps: int = 600) -> float:
    """Loss in nats a word of five words copied, by an encoder of `layers` of this variant before two decoder layers;
    mean of the last 20 steps."""
    model = tiny(seed, dropout=0.0, encoder_layers=layers)
    varied: list[EncoderLayer] = [Varied(model.config, *VARIANTS[name]) for _ in range(layers)]
    model.encoder.layers = varied
    return float(np.mean(copying(model, steps)[-20:]))


def first_sub_layer() -> dict[str, np.ndarray]:
    """Return the input of attention in a fresh layer, what it makes of it, their sum and its norm: (32,), of one
    position."""
    model, x = fresh(0, 1)
    attend, norm = sub_layers(model.encoder.layers[0])[0]
    z = attend(x)
    found = {"X": x, "Z = attention(X)": z, "X + Z": x + z, "its norm": norm(x + z)}
    return {name: np.array(value[0, 0]) for name, value in found.items()}


def draw_residuals() -> Any:
    """Draw what tells positions apart, and the gradient, by variant; and one sub-layer's sum, number by number."""
    figure, (apart, gradient, sums) = canvas(3, width=12.4, height=3.2)
    curves(apart, DEPTHS, told_apart(), (0.42, 0.1))
    apart.set(title="share of the output that tells positions apart", xlabel="layers")
    curves(gradient, DEPTHS, gradients_by_depth(), (0.52, 0.43), 7.5)
    gradient.set(title="norm of the gradient at the input", xlabel="layers")
    for axes, limits in ((apart, (5e-8, 3)), (gradient, (1e-5, 1e10))):  # rounding errors don't move the axis
        logarithmic(axes)
        axes.set_ylim(*limits)
    strips = first_sub_layer()
    heat_map(sums, np.stack(list(strips.values())), signed=True, aspect="auto")
    sums.set(title="the first sub-layer, one position", xlabel="d_model", xticks=[])
    sums.set_yticks(range(len(strips)), list(strips), fontsize=8)
    draw_key(sums)
    return figure


ROWS = (
    Row(
        22,
        "Around each sub-layer: a residual connection, then a norm. Without the residual all positions become one.",
        "LayerNorm(x + Sublayer(x)); a stack tells positions apart by |X - mean(X)| / |X| of its output",
        {
            "largest |LayerNorm(x + Sublayer(x)) - output|, every layer of both stacks": equal(0),
            "largest |x + Sublayer(LayerNorm(x)) - output|, pre-norm": equal(0),
            "the first, if half of attention is added": above(0.1),
            "share of 4 layers' output that tells positions apart: both": above(0.3),
            "share of 4 layers' output that tells positions apart: the residual alone": above(0.3),
            "share of 4 layers' output that tells positions apart: the norm alone": below(1e-3),
            "share of 4 layers' output that tells positions apart: neither": below(1e-3),
            "gradient at the input, 24 layers / 2: both": equal(0.497, within=0.05),
            "gradient at the input, 24 layers / 2: the residual alone": above(1e6),
            "gradient at the input, 24 layers / 2: the norm alone": equal(0.108, within=0.02),
            "gradient at the input, 24 layers / 2: neither": below(1e-3),
        },
        residuals,
        (EncoderLayer, DecoderLayer),
        (
            "claims/test_residual.py::test_each_sub_layer_is_norm_of_x_plus_sublayer_of_x",
            "claims/test_residual.py::test_positions_become_one_without_residuals_and_with_them_do_not",
            "claims/test_residual.py::test_gradients_of_all_four",
            "claims/test_residual.py::test_layers_need_the_residual_to_train",
        ),
        figure=draw_residuals,
        slip="The notes say that residuals avoid vanishing gradients. With both, 24 layers leave 0.497 of what 2 do. "
        "But norms alone leave 0.108 and still make all positions one: the gradient by itself is no proof. What is "
        "added is the sub-layer's input, embedding and position in the first layer alone.",
    ),
)
