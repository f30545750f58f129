"""The attention table of YOUR CAT IS A LOVELY CAT: the notes', and whether it can be what they say it is.

Where Q = K the scores are symmetric, s_ij = s_ji, and log A_ij = s_ij - z_i for a number z_i of each row. So
log A_ij - log A_ji = z_j - z_i: what is left of it measures how far a table is from any such scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlx_transformer.nn.attention import attention_weights
from mlx_transformer.system.errors import UserError

from .drawing import canvas, draw_key, frame_cells, heat_map, label_cells, write_beside, write_cells
from .network import sentence_weights
from .row import Found, Row, above, below, equal
from .worked import SENTENCE


def attention_table(queries: Sequence[str], keys: Sequence[str], weights: ArrayLike) -> str:
    """Rows of weights (T, S), one query word each, under the key words, with three decimals and the row's sum."""
    rows = np.asarray(weights, dtype=np.float64)
    if rows.shape != (len(queries), len(keys)):
        raise UserError(f"attention_table: weights are {rows.shape}, words ask for {(len(queries), len(keys))}")
    cells = [["", *keys, "sum"]]
    cells += [[word, *(f"{w:.3f}" for w in row), f"{row.sum():.3f}"] for word, row in zip(queries, rows, strict=True)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    first, *rest = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], rest, strict=True))])
        for line in cells
    )


NOTES = (
    (0.268, 0.119, 0.134, 0.148, 0.179, 0.152),
    (0.124, 0.278, 0.201, 0.128, 0.154, 0.115),
    (0.147, 0.132, 0.262, 0.097, 0.218, 0.145),
    (0.210, 0.128, 0.206, 0.212, 0.119, 0.125),
    (0.146, 0.158, 0.152, 0.143, 0.227, 0.174),
    (0.195, 0.114, 0.203, 0.103, 0.157, 0.229),
)

HALF_A_DIGIT = 0.0005
"""How far a number of three decimals may be from what it was rounded from."""

LOVELY, A, IS = 4, 3, 2


def asymmetry(weights: ArrayLike) -> float:
    """Largest |log A_ij - log A_ji - (z_j - z_i)| for the z that fit best in the sense of least squares."""
    return float(np.abs(_unfitted(np.log(np.asarray(weights, dtype=np.float64)))).max())


def _unfitted(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    difference = logs - logs.T
    z = difference.mean(axis=0)
    return difference - (z[None, :] - z[:, None])


def explained_by_rounding() -> float:
    """The most by which rounding each weight of the notes can have changed their table's `asymmetry`."""
    weights = np.array(NOTES)
    change = np.zeros_like(weights)
    for place in np.ndindex(*weights.shape):
        moved = np.zeros_like(weights)
        moved[place] = HALF_A_DIGIT / (weights[place] - HALF_A_DIGIT)
        change += np.abs(_unfitted(moved))
    return float(change.max())


def around(first: int, second: int, third: int) -> float:
    """A_ij A_jk A_ki: of symmetric scores the same as A_ik A_kj A_ji, the other way around."""
    return NOTES[first][second] * NOTES[second][third] * NOTES[third][first]


def rounded_up() -> float:
    """Share of random rows of six weights whose three decimals add up to 1.001."""
    scores = np.random.default_rng(0).normal(scale=0.5, size=(100_000, 6))
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    return float(np.mean(weights.round(3).sum(axis=1).round(3) == 1.001))


def self_weights(words: Sequence[str], positions: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights (n, n) of one head without projections, Q = K = V = X, and X (n, 512)."""
    _, x = sentence_weights(words, positions)
    rows = mx.array(x)[None, None]
    return np.array(attention_weights(rows, rows), dtype=np.float64)[0, 0], x


def worked_table() -> Found:
    plain, x = self_weights(SENTENCE, "none")
    placed, _ = self_weights(SENTENCE, "sinusoidal")
    projected, _ = sentence_weights(SENTENCE, "sinusoidal")
    cats = [1, 5]
    return {
        "shape of the input": x.shape,
        "largest difference of the rows of both CATs, without positions": np.abs(plain[1] - plain[5]).max(),
        "each CAT to each CAT, without positions": plain[np.ix_(cats, cats)].ravel().tolist(),
        "each CAT to itself, with positions": placed[cats, cats].tolist(),
        "where each word looks most, with positions": placed.argmax(axis=1).tolist(),
        "sums of the rows": placed.sum(axis=1).tolist(),
        "largest |log A_ij - log A_ji - (z_j - z_i)|, with positions": asymmetry(placed),
        "of a head with projections": asymmetry(projected),
        "of the notes' table": asymmetry(NOTES),
        "of it explained by rounding to three decimals, at most": explained_by_rounding(),
        "LOVELY, A, IS of the notes' table multiplied around, and the other way": [
            around(LOVELY, A, IS),
            around(LOVELY, IS, A),
        ],
        "sums of the rows of the notes' table": np.sum(NOTES, axis=1).tolist(),
        "share of random rows of six whose three decimals sum to 1.001": rounded_up(),
    }


def draw_worked_tables() -> Any:
    """The notes' table beside ours of Q = K = V = X: diagonals framed, sums beside the rows."""
    tables = {
        "as the notes have it": np.array(NOTES),
        "Q = K = V = X, without positions": self_weights(SENTENCE, "none")[0],
        "Q = K = V = X, with positions": self_weights(SENTENCE, "sinusoidal")[0],
    }
    figure, panels = canvas(3, height=3.6, width=11.4)
    for axes, (title, weights) in zip(panels, tables.items(), strict=True):
        heat_map(axes, weights, most=1.4)
        write_cells(axes, [[f"{weight:.3f}" for weight in row] for row in weights], 7)
        label_cells(axes, SENTENCE, SENTENCE)
        frame_cells(axes, [(i, i) for i in range(len(SENTENCE))])
        write_beside(axes, "sum", [f"{row.sum():.3f}" for row in weights])
        axes.set_title(title)
    draw_key(panels[-1], 1.2, most=1.0)
    return figure


ROWS = (
    Row(
        16,
        "The table of YOUR CAT IS A LOVELY CAT, Q = K = V = X. Without positions both CATs look at the same words.",
        "A = softmax(Q K^T / √d_k), 6 × 6; s_ij = s_ji, so log A_ij - log A_ji = z_j - z_i",
        {
            "shape of the input": equal(6, 512),
            "largest difference of the rows of both CATs, without positions": below(1e-6),
            "each CAT to each CAT, without positions": equal(*[0.5] * 4, within=1e-6),
            "each CAT to itself, with positions": equal(0.901, 0.954, within=5e-4),
            "where each word looks most, with positions": equal(*range(6)),
            "sums of the rows": equal(*[1] * 6, within=1e-6),
            "largest |log A_ij - log A_ji - (z_j - z_i)|, with positions": below(1e-5),
            "of a head with projections": above(1),
            "of the notes' table": equal(0.495, within=5e-4),
            "of it explained by rounding to three decimals, at most": equal(0.015, within=5e-4),
            "LOVELY, A, IS of the notes' table multiplied around, and the other way": equal(
                0.00642, 0.00175, within=5e-6
            ),
            "sums of the rows of the notes' table": equal(1, 1, 1.001, 1, 1, 1.001, within=1e-9),
            "share of random rows of six whose three decimals sum to 1.001": equal(0.22, within=0.01),
        },
        worked_table,
        (attention_table, attention_weights),
        (
            "claims/test_attention.py::test_worked_table_of_your_cat_is_a_lovely_cat",
            "claims/test_attention.py::test_the_table_of_the_notes_is_of_no_symmetric_scores",
        ),
        figure=draw_worked_tables,
        slip="The notes say that their table is of Q = K = V = X. Its scores would be symmetric, but LOVELY, A, IS "
        "multiplied around give 0.00642, and 0.00175 the other way: it misses z_j - z_i by 0.495, of which rounding "
        "explains 0.015. That two of its rows sum to 1.001 is rounding alone, as in 0.22 of all rows; its CAT rows "
        "differ because positions are in it.",
    ),
)
