"""Masks: who may look at whom."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.attention import attention, attention_weights
from mlx_transformer.nn.masks import Mask, as_array, as_numbers, causal_mask, causal_padding_mask, padding_mask

from .drawing import canvas, heat_map, write_cells
from .measure import largest
from .row import Found, Row, above, below, equal


def masks() -> dict[str, Mask]:
    """The kinds of masks, over five positions."""
    tokens = mx.array([[True, True, True, False, False]])
    return {
        "causal": causal_mask(5, 5),
        "padding": padding_mask(tokens),
        "causal and padding": causal_padding_mask(tokens),
    }


def masked() -> Found:
    mx.random.seed(0)
    q = mx.random.normal((1, 1, 5, 16))
    hidden, sums, gradients = 0.0, [], key_gradients()
    for mask in ("causal", *masks().values()):
        weights = np.array(attention_weights(q, q, mask))[0, 0]
        allowed = np.broadcast_to(np.array(as_array(mask, 5, 5)), (1, 1, 5, 5))[0, 0]
        hidden = max(hidden, float(weights[~allowed].max()))
        sums.append(float(np.abs(weights.sum(-1) - 1).max()))
    return {
        "largest masked weight": hidden,
        "largest |sum of a row - 1|": max(sums),
        "change of earlier outputs by a later token": future_change(),
        "gradient into hidden keys and values": gradients[0],
        "into seen ones": gradients[1],
        "sums of the rows but the last, zeros set after the softmax instead": (
            (np.array(attention_weights(q, q))[0, 0] * np.tri(5)).sum(-1)[:-1].tolist()
        ),
    }


def key_gradients() -> tuple[float, float]:
    """Largest gradient of the first two outputs of four into the last two keys and values, and into the others."""
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, 1, 4, 16)) for _ in range(3))

    def outputs(k: mx.array, v: mx.array) -> mx.array:
        return mx.sum(attention(q, k, v, causal_mask(4, 4))[:, :, :2])

    slopes = mx.stack(mx.grad(outputs, argnums=(0, 1))(k, v))
    return largest(slopes[..., 2:, :]), largest(slopes[..., :2, :])


def future_change() -> float:
    mx.random.seed(0)
    model = Transformer(TransformerConfig.preset("tiny", 30, d_model=32, d_ff=32, dropout=0.0))
    a, b = (model([[5, 6, 7, 2]], [ids]) for ids in ([1, 10, 11, 12, 13], [1, 10, 11, 20, 21]))
    return largest(a[:, :3] - b[:, :3])


def draw_mask_pictures() -> Any:
    """Scores, the mask as numbers, and the weights that the softmax makes of their sum."""
    kinds = masks()
    figure, panels = canvas(3, len(kinds), width=7.2, height=6.6)
    mx.random.seed(0)
    q = mx.random.normal((1, 1, 5, 16))
    scores = np.array((q / 4) @ q.swapaxes(-1, -2))[0, 0]
    for row, (name, mask) in enumerate(kinds.items()):
        array = as_array(mask, 5, 5)
        assert array is not None
        numbers = np.broadcast_to(np.array(as_numbers(array, mx.float32)), (1, 1, 5, 5))[0, 0]
        weights = np.array(attention_weights(q, q, mask))[0, 0]
        written, summed, after = panels[3 * row : 3 * row + 3]
        heat_map(written, np.isinf(numbers).astype(float), most=2.5)
        write_cells(written, [["0" if value == 0 else "−∞" for value in line] for line in numbers])
        written.set(title=f"{name}: mask", ylabel="query")
        heat_map(summed, np.where(np.isinf(numbers), 0, scores), signed=True, most=6.0)
        write_cells(summed, [[f"{v:.1f}" if np.isfinite(v) else "−∞" for v in line] for line in scores + numbers])
        summed.set_title("before the softmax")
        heat_map(after, weights, most=1.2)
        write_cells(after, [["0" if value == 0 else f"{value:.2f}" for value in line] for line in weights])
        after.set_title("after")
        for axes in (written, summed, after):
            axes.set(xticks=[], yticks=[])
    return figure


ROWS = (
    Row(
        21,
        "A mask is 0 where a word may look and minus infinity where not: the softmax makes an exact zero of it.",
        "softmax(Q K^T / √d_k + M), M = 0 or -∞",
        {
            "largest masked weight": equal(0),
            "largest |sum of a row - 1|": below(1e-6),
            "change of earlier outputs by a later token": equal(0),
            "gradient into hidden keys and values": equal(0),
            "into seen ones": above(0.1),
            "sums of the rows but the last, zeros set after the softmax instead": below(0.99, 0.99, 0.99, 0.99),
        },
        masked,
        (causal_mask, padding_mask),
        (
            "claims/test_attention.py::test_a_masked_weight_is_exactly_zero",
            "claims/test_attention.py::test_a_future_token_changes_no_earlier_output",
        ),
        figure=draw_mask_pictures,
    ),
)
