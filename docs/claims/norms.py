"""Layer norm, and batch norm beside it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.nn.norms import LayerNorm
from mlx_transformer.nn.parameters import named_parameters

from .drawing import LINE, Table, canvas, draw_key, heat_map
from .measure import largest, number
from .row import Found, Row, above, below, equal

TOKENS = (
    (50.147, 3314.825, 8463.361, 8.021),
    (1242.223, 688.123, 434.944, 149.442),
    (9.370, 4606.674, 944.705, 21189.444),
)
"""The notes' three tokens of four features."""

EPSILON = 1e-5

HEADINGS = {
    "scope": "what a statistic is taken over",
    "training dynamics": "change of a sample's output between training and use",
    "applicability": "a batch of one",
    "robustness": "change of a sample's output by its batch mates",
    "parametrisation": "parameters of a width of 16",
    "input dependence": "mean and variance of each sample after it",
}


def worked() -> Found:
    normed = np.array(LayerNorm(4, EPSILON)(mx.array(TOKENS)))
    found = {f"LN({', '.join(f'{x:g}' for x in row)})": out.tolist() for row, out in zip(TOKENS, normed, strict=True)}
    return {**found, "least and largest (between 0 and 1 in the notes)": [normed.min(), normed.max()]}


def list_normed() -> Table:
    """The notes' three tokens, what is taken off, what they are divided by, and what comes out."""
    lines = []
    for row, out in zip(np.array(TOKENS), np.array(LayerNorm(4, EPSILON)(mx.array(TOKENS))), strict=True):
        mean, deviation = row.mean(), np.sqrt(row.var() + EPSILON)
        texts = (
            ", ".join(f"{x:.3f}" for x in row),
            f"{mean:.4f}",
            f"{deviation:.4f}",
            ", ".join(f"{x:.4f}" for x in out),
        )
        lines.append(texts)
    return Table(("x", "μ", "σ", "(x − μ) / σ"), tuple(lines))


def batch_mates() -> Found:
    layer, batch = LayerNorm(16, EPSILON), nn.BatchNorm(16)
    return {
        "change of a sample's output by other batch mates, layer norm": mates_change(layer),
        "batch norm": mates_change(batch),
        "by padding, layer norm": mates_change(layer, padding=True),
        "batch norm, by padding": mates_change(batch, padding=True),
    }


def mates_change(norm: LayerNorm | nn.BatchNorm, padding: bool = False) -> float:
    """Largest change of a sample's output."""
    before, after = among_mates(norm, padding)
    return largest(before - after)


def among_mates(norm: LayerNorm | nn.BatchNorm, padding: bool = False) -> tuple[mx.array, mx.array]:
    """Outputs (6, 16) of one sample of a batch of four, and with other mates, or the batch padded with zeros."""
    mx.random.seed(0)
    sample, mates, others = (mx.random.normal((n, 6, 16)) for n in (1, 3, 3))
    before = mx.concatenate([sample, 5 * mates])
    after = mx.pad(before, [(0, 0), (0, 4), (0, 0)]) if padding else mx.concatenate([sample, 5 * others])
    return norm(before)[0], norm(after)[0, :6]


def transposed() -> Found:
    mx.random.seed(0)
    x = mx.random.normal((12, 16)) * 3 + 1
    layer, batch = LayerNorm(16, EPSILON), nn.BatchNorm(12, eps=EPSILON)
    normed = np.array(layer(x), dtype=np.float64)
    restored = LayerNorm(16, EPSILON)
    centre, width = mx.mean(x, axis=1, keepdims=True), mx.sqrt(mx.var(x, axis=1, keepdims=True) + EPSILON)
    restored.weight, restored.bias = mx.full((16,), number(width[0])), mx.full((16,), number(centre[0]))
    return {
        "largest |LN(x) - BN(x^T)^T|": np.abs(normed - np.array(batch(x.T).T)).max(),
        "layer norm, change between training and use": use_change(LayerNorm(16, EPSILON)),
        "batch norm, the same": use_change(nn.BatchNorm(16)),
        "largest output of a batch of one token, layer norm": largest(layer(x[:1])),
        "batch norm refuses a batch of one token": refuses_one(x[:1]),
        "parameters, layer norm and batch norm": [count(LayerNorm(16, EPSILON)), count(nn.BatchNorm(16))],
        "largest |mean| after it": np.abs(normed.mean(axis=1)).max(),
        "largest |variance - 1| after it": np.abs(normed.var(axis=1) - 1).max(),
        "largest |x - LN(x)|, gamma and beta the width and centre of x": largest(restored(x[:1]) - x[:1]),
    }


def refuses_one(token: mx.array) -> int:
    try:
        nn.BatchNorm(token.shape[-1])(token)
    except ValueError:
        return 1
    return 0


def use_change(norm: LayerNorm | nn.BatchNorm) -> float:
    mx.random.seed(1)
    x = mx.random.normal((4, 6, 16)) * 3 + 1
    training = norm.train()(x)
    return largest(training - norm.eval()(x))


def count(norm: nn.Module) -> int:
    """Parameters that are learned: batch norm's running statistics aren't."""
    return sum(value.size for name, value in named_parameters(norm) if not name.startswith("running_"))


def draw_normalised_together() -> Any:
    """Which numbers of a batch share a mean and a variance, and what another batch changes of a position."""
    figure, panels = canvas(4, width=8.4, height=3.0)
    samples, positions, features = 4, 6, 16
    for place, norm, name, mark in (
        (0, LayerNorm(features, EPSILON), "layer norm", (0, 0)),
        (2, nn.BatchNorm(features), "batch norm", (..., 0)),
    ):
        shared, strips = panels[place : place + 2]
        together = np.zeros((samples, positions, features))
        together[mark] = 1.0
        heat_map(shared, together.reshape(samples * positions, features), most=1.4)
        for sample in range(1, samples):
            shared.axhline(sample * positions - 0.5, color=LINE, linewidth=1)
        shared.set(title=f"{name}: one mean", xlabel="features", ylabel="positions of each sample", xticks=[])
        middles = [positions * (sample + 0.5) - 0.5 for sample in range(samples)]
        shared.set_yticks(middles, [f"{sample + 1}" for sample in range(samples)], fontsize=8)
        outputs = [np.array(each) for each in among_mates(norm)]
        heat_map(strips, np.stack([each[0] for each in outputs]), signed=True)
        strips.set(title=f"its change: {np.abs(outputs[0] - outputs[1]).max():.2g}", xticks=[])
        strips.set_yticks([0, 1], ["batch", "other"], fontsize=8)
        draw_key(strips)
    return figure


def list_six_headings() -> Table:
    found = transposed()

    def two(layer: str, batch: str) -> tuple[str, str]:
        return tuple(f"{found[name]:.3g}" for name in (layer, batch))  # type: ignore

    use = two("layer norm, change between training and use", "batch norm, the same")
    counts = found["parameters, layer norm and batch norm"]
    mean, variance = two("largest |mean| after it", "largest |variance - 1| after it")
    rows = (
        ("scope", "one position's features", "one feature's positions"),
        ("training dynamics: change from training to use", *use),
        ("applicability: a batch of one", "normed", "refused"),
        (
            "robustness: change by batch mates",
            *(f"{change:.3g}" for change in list(batch_mates().values())[:2]),
        ),
        ("parametrisation: of a width of 16", *(str(int(c)) for c in counts)),  # type: ignore
        ("input dependence: |mean|, |variance - 1| of a position", f"{mean}, {variance}", "of the batch instead"),
    )
    return Table(("heading", "layer norm", "batch norm"), rows)


ROWS = (
    Row(
        23,
        "Layer norm: each position to mean 0 and variance 1 over its features, then a learned scale and shift.",
        "γ (x - μ) / √(σ^2 + ε) + β",
        {
            "LN(50.147, 3314.82, 8463.36, 8.021)": equal(-0.8433, 0.1031, 1.5957, -0.8555, within=5.1e-5),
            "LN(1242.22, 688.123, 434.944, 149.442)": equal(1.5253, 0.1478, -0.4817, -1.1914, within=5.1e-5),
            "LN(9.37, 4606.67, 944.705, 21189.4)": equal(-0.7813, -0.2435, -0.6719, 1.6967, within=5.1e-5),
            "least and largest (between 0 and 1 in the notes)": equal(-1.1914, 1.6967, within=5.1e-5),
        },
        worked,
        (LayerNorm,),
        ("claims/test_network.py::test_layer_norm_numbers",),
        slip="The notes say that γ and β are there because values lie between 0 and 1. These lie between -1.1914 and "
        "1.6967.",
        table=list_normed,
    ),
    Row(
        24,
        "Layer norm looks at one position alone; batch norm mixes in the rest of the batch, and its padding.",
        "μ, σ over the features of one position, or over all positions of one feature",
        {
            "change of a sample's output by other batch mates, layer norm": equal(0),
            "batch norm": above(0.05),
            "by padding, layer norm": equal(0),
            "batch norm, by padding": above(0.05),
        },
        batch_mates,
        (LayerNorm,),
        ("claims/test_network.py::test_layer_norm_ignores_batch_mates_and_batch_norm_does_not",),
        figure=draw_normalised_together,
    ),
    Row(
        40,
        "Layer norm is batch norm of the transposed matrix. Six differences follow, each with a number.",
        "LN(x) = BN(x^T)^T",
        {
            "largest |LN(x) - BN(x^T)^T|": below(1e-5),
            "layer norm, change between training and use": equal(0),
            "batch norm, the same": above(1),
            "largest output of a batch of one token, layer norm": above(1),
            "batch norm refuses a batch of one token": equal(1),
            "parameters, layer norm and batch norm": equal(32, 32),
            "largest |mean| after it": below(1e-6),
            "largest |variance - 1| after it": below(1e-4),
            "largest |x - LN(x)|, gamma and beta the width and centre of x": below(1e-5),
        },
        transposed,
        (LayerNorm,),
        ("claims/test_beside.py::test_norms_agree_over_one_axis_alone",),
        table=list_six_headings,
    ),
)
