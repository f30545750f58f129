"""Layer norm, and batch norm beside it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.nn.norms import LayerNorm
from mlx_transformer.nn.parameters import named_parameters

from .measure import largest, number
from .row import Found

ROWS = (
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
    normed = np.array(LayerNorm(4, EPSILON)(mx.array(ROWS)))
    return {f"LN({', '.join(f'{x:g}' for x in row)})": out.tolist() for row, out in zip(ROWS, normed, strict=True)}


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
