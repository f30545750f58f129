"""Figures of the rows about attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.claims import attention, notes_table
from mlx_transformer.claims.worked import SENTENCE
from mlx_transformer.nn.attention import attention_weights
from mlx_transformer.nn.masks import as_array, as_numbers

from .drawing import SERIES, canvas, frame_cells, heat_map, label_cells, logarithmic, write_beside, write_cells


def worked_tables() -> Any:
    """The notes' table beside ours of Q = K = V = X: diagonals framed, sums beside the rows."""
    tables = {
        "as the notes have it": np.array(notes_table.WEIGHTS),
        "Q = K = V = X, without positions": attention.self_weights(SENTENCE, "none")[0],
        "Q = K = V = X, with positions": attention.self_weights(SENTENCE, "sinusoidal")[0],
    }
    figure, panels = canvas(3, height=3.6, width=11.4)
    for axes, (title, weights) in zip(panels, tables.items(), strict=True):
        heat_map(axes, weights, most=1.4)
        write_cells(axes, [[f"{weight:.3f}" for weight in row] for row in weights], 7)
        label_cells(axes, SENTENCE, SENTENCE)
        frame_cells(axes, [(i, i) for i in range(len(SENTENCE))])
        write_beside(axes, "sum", [f"{row.sum():.3f}" for row in weights])
        axes.set_title(title)
    return figure


def saturation() -> Any:
    figure, (variance, slope) = canvas(2)
    widths, variances, kept, lost = attention.saturation()
    variance.plot(widths, variances, "o-", color=SERIES[1], markersize=4, label="q · k")
    variance.plot(widths, variances / widths, "o-", color=SERIES[0], markersize=4, label="q · k / √d_k")
    variance.set(title="variance of the products", xlabel="d_k")
    logarithmic(variance, x=True)
    slope.plot(widths, lost, "o-", color=SERIES[1], markersize=4, label="without the scale")
    slope.plot(widths, kept, "o-", color=SERIES[0], markersize=4, label="with it")
    slope.set(title="gradient of the softmax, Σ w (1 - w)", xlabel="d_k", ylim=(0, 1.05))
    logarithmic(slope, x=True, y=False)
    for axes, corner in ((variance, "upper left"), (slope, "lower left")):
        axes.grid(True, linewidth=0.6)
        axes.legend(loc=corner)
    return figure


def mask_pictures() -> Any:
    """Scores, the mask as numbers, and the weights that the softmax makes of their sum."""
    masks = attention.masks()
    figure, panels = canvas(3, len(masks), width=7.2, height=6.6)
    mx.random.seed(0)
    q = mx.random.normal((1, 1, 5, 16))
    scores = np.array((q / 4) @ q.swapaxes(-1, -2))[0, 0]
    for row, (name, mask) in enumerate(masks.items()):
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
