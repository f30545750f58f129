"""The simpler codes of positions, and how each fails."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike

from mlx_transformer.core.positions import sinusoids

from .drawing import SERIES, canvas, logarithmic
from .positions import Array, added, counter_bits, offset_distance, sine_cosine
from .row import Found, Row, equal


def append_position(x: ArrayLike, first: int = 1) -> Array:
    """Rejected: the raw position as one more feature, (n, d) -> (n, d+1). It grows without bound."""
    x = np.asarray(x, dtype=np.float64)
    return np.concatenate([x, np.arange(first, first + len(x), dtype=np.float64)[:, None]], axis=1)


def normalised_positions(n: int) -> Array:
    """Rejected: positions scaled to 0..1, (n,). What one step means depends on the sentence's length."""
    return np.arange(n) / max(n - 1, 1)


def single_sine(positions: ArrayLike) -> Array:
    """Rejected: one sine, (..., 1). Bounded, but far positions collide."""
    return np.sin(np.asarray(positions, dtype=np.float64))[..., None]


def adjacent(codes: ArrayLike) -> list[float]:
    """code(t) · code(t + 1) of each row but the last."""
    rows = np.asarray(codes, dtype=np.float64)
    return np.sum(rows[:-1] * rows[1:], axis=1).tolist()


def peaks_at_an_end(maps: int, n: int = 50) -> int:
    """How many of random bilinear maps of (p, 1) have the largest score of every query at the first or last key."""
    codes = append_position(np.ones((n, 1)))
    kernels = np.random.default_rng(0).normal(size=(maps, 2, 2))
    peaks = np.argmax(codes @ kernels @ codes.T, axis=-1)
    return int(np.sum(np.all((peaks == 0) | (peaks == n - 1), axis=-1)))


LION_KILLS_DEER = [[0.2, 0.8, 0.5], [0.6, 0.1, 0.3], [0.9, 0.4, 0.7]]


def appended() -> Found:
    return {
        "Lion with its position": append_position(LION_KILLS_DEER)[0].tolist(),
        "last feature of Lion, Kills, Deer": append_position(LION_KILLS_DEER)[:, -1].tolist(),
        "largest feature of 1000 positions": append_position(np.zeros((1000, 3))).max(),
        "of the sinusoids": float(np.abs(added(1000)).max()),
        "position t · position t + 1, t = 1, 10, 100": [adjacent([[t], [t + 1]])[0] for t in (1, 10, 100)],
        "the same of the sinusoids": [adjacent(sinusoids(t + 2, 512, dtype=np.float64)[t:])[0] for t in (1, 10, 100)],
        "of 1000 random maps of (pos, 1), how many look at the first or last of 50 keys alone": peaks_at_an_end(1000),
    }


def normalised() -> Found:
    five, nine = normalised_positions(5), normalised_positions(9)
    return {
        "one step, of five words": sorted(set(np.diff(five).tolist())),
        "one step, of nine words": sorted(set(np.diff(nine).tolist())),
        "which word is at 0.5, of five and of nine": [1 + int(np.argmax(places == 0.5)) for places in (five, nine)],
        "rows of the sinusoids that change with the length": int(np.any(added(9)[:5] != added(5), axis=1).sum()),
    }


def one_sine() -> Found:
    collision = single_sine(11) - single_sine(344)
    return {
        "sin 1, sin 2, sin 3": single_sine([1, 2, 3])[:, 0].tolist(),
        "Lion with its sine": [*LION_KILLS_DEER[0], float(single_sine(1)[0])],
        "|sin 11 - sin 344|": abs(float(collision[0])),
        "sin 4.2, sin 4.69, sin 4.76": single_sine([4.2, 4.69, 4.76])[:, 0].tolist(),
        "sin t · sin (t + 1), t = 1, 2": adjacent(single_sine([1, 2, 3])),
        "the same of a sine and a cosine": adjacent(sine_cosine([1, 2, 3], 1.0)),
    }


def one_pair() -> Found:
    return {"distance of p and p+710": pair_distance(710, 1.0)}


def two_pairs() -> Found:
    return {
        "distance of p and p+1420": pair_distance(1420, 1.0, 0.5),
        "smallest of 512 features, gaps 1..4999": min(offset_distance(512, gap) for gap in range(1, 5000)),
        **{f"smallest of 1000 positions, {name}": nearest(codes) for name, codes in few_frequencies(1000).items()},
    }


def few_frequencies(count: int) -> dict[str, Array]:
    """Codes of `count` positions by at most two frequencies."""
    p = np.arange(count)
    return {"one sine": single_sine(p), "a pair": sine_cosine(p, 1.0), "two pairs": sine_cosine(p, 1.0, 0.5)}


def nearest(codes: Array) -> float:
    """Smallest distance of any two rows, (n, d)."""
    squares = sum((feature[:, None] - feature[None, :]) ** 2 for feature in codes.T)
    return float(np.sqrt(np.min(squares + np.diag(np.full(len(codes), np.inf)))))


def pair_distance(gap: int, *frequencies: float) -> float:
    """|code(p + gap) - code(p)| of sine-cosine pairs; the largest over 3000 positions p."""
    p = np.arange(3000)
    codes = sine_cosine(p + gap, *frequencies) - sine_cosine(p, *frequencies)
    return float(np.linalg.norm(codes, axis=1).max())


def raw_gradients() -> Found:
    raw, coded = gradient_by_position()
    return {
        "gradient at position 1000 / at position 1, raw positions": raw[999] / raw[0],
        "the same, sinusoids": coded[999] / coded[0],
        "digits that 1000 positions need in binary": len(counter_bits(10)[999]),
        "smallest distance of 1000 positions in one sine-cosine pair": nearest(sine_cosine(np.arange(1000), 1.0)),
        "of 1000 positions, how many float16 tells apart: one sine, a pair": [
            len(np.unique(codes.astype(np.float16), axis=0)) for codes in list(few_frequencies(1000).values())[:2]
        ],
        "bits of a pair in float16": 8 * np.zeros(2, dtype=np.float16).nbytes,
    }


def gradient_by_position() -> tuple[np.ndarray, np.ndarray]:
    """Norm of d(loss)/dW of y = W code(p), loss |y|^2 / 2 from y of length 1: |code(p)|, of p = 1..1000.

    Raw positions as one more feature of a word, and sinusoids of 512 features.
    """

    def norms(codes: mx.array) -> np.ndarray:
        projection = mx.ones((1, codes.shape[1])) / codes.shape[1]

        def loss(weight: mx.array, code: mx.array) -> mx.array:
            return mx.sum(weight @ code)

        gradients = mx.vmap(mx.grad(loss), in_axes=(None, 0))(projection, codes)
        return np.array(mx.linalg.norm(gradients.reshape(len(codes), -1), axis=1), dtype=np.float64)

    words = np.tile(LION_KILLS_DEER[0], (1000, 1))
    return norms(mx.array(append_position(words).astype(np.float32))), norms(mx.array(sinusoids(1001, 512)[1:]))


def draw_rejected() -> Any:
    """The simpler codes: growth, one step, and the distance of positions that lie `gap` apart."""
    figure, (growth, step, distance) = canvas(3, width=8.6, height=3.2)
    n = np.arange(1, 1001)
    growth.plot(n, append_position(np.zeros((1000, 1)))[:, -1], color=SERIES[1], label="position itself")
    growth.plot(n[::25], np.abs(added(1000)).max(axis=1)[::25], color=SERIES[0], label="sinusoids")
    growth.set(title="largest feature", xlabel="position")
    logarithmic(growth)
    for y, words in enumerate((5, 9)):
        places = normalised_positions(words)
        step.plot(places, np.full(words, y), "o-", color=SERIES[y], markersize=4, linewidth=1)
        step.text(0.5, y + 0.14, f"{words} words: a step is {places[1]:g}", ha="center", fontsize=8)
    step.set(title="positions scaled to 0..1", yticks=[], ylim=(-0.4, 1.6))
    for axes in (growth, distance):
        axes.grid(True, linewidth=0.6)
    gaps = np.arange(1, 1501)
    p = np.arange(1500)[:, None]
    codes = {
        "one sine": np.min(np.abs(single_sine(p + gaps) - single_sine(p))[..., 0], axis=0),
        "one pair": np.linalg.norm(sine_cosine(gaps, 1.0) - sine_cosine(0, 1.0), axis=-1),
        "two pairs": np.linalg.norm(sine_cosine(gaps, 1.0, 0.5) - sine_cosine(0, 1.0, 0.5), axis=-1),
        "512 features": np.array([offset_distance(512, int(gap)) for gap in gaps]),
    }
    for (label, values), colour in zip(codes.items(), (SERIES[1], SERIES[2], SERIES[3], SERIES[0]), strict=True):
        lowest = values.reshape(-1, 10).min(axis=1)  # of ten gaps: the dips are what matters
        distance.plot(gaps[::10] + 5, lowest, color=colour, linewidth=1.1, label=label)
    distance.set(title="smallest distance by gap", xlabel="gap")
    logarithmic(distance)
    growth.legend(fontsize=7.5, loc="center right")
    distance.set_ylim(1e-9, 100)
    distance.legend(fontsize=7.5, loc="lower center", ncols=2, handlelength=1.2)
    return figure


def draw_waves() -> Any:
    """Lion, Kills and Deer on one sine, on a pair, and on two pairs: the features of each are read above its place."""
    figure, panels = canvas(3, width=8.6, height=3.0)
    places, words = np.linspace(0, 7, 141), {"Lion": 1, "Kills": 2, "Deer": 3}
    kinds = {"one sine": (1.0,), "a pair": (1.0,), "two pairs": (1.0, 0.5)}
    for axes, (title, frequencies) in zip(panels, kinds.items(), strict=True):
        curves, marks = (sine_cosine(at, *frequencies) for at in (places, list(words.values())))
        for i, colour in zip(range(1 if title == "one sine" else curves.shape[1]), SERIES, strict=False):
            axes.plot(places, curves[:, i], color=colour, linewidth=1.1)
            axes.plot(list(words.values()), marks[:, i], "o", color=colour, markersize=4)
        for word, place in words.items():
            axes.text(place, 1.12, word, ha="center", fontsize=7.5)
        axes.grid(True, linewidth=0.6)
        axes.set(title=title, xlabel="position", ylim=(-1.1, 1.3), xticks=range(8))
    return figure


def draw_raw_gradients() -> Any:
    figure, (axes,) = canvas(height=2.8, width=6)
    raw, coded = gradient_by_position()
    at = np.unique(np.geomspace(1, 1000, 60).astype(int))
    axes.plot(at, raw[at - 1], color=SERIES[1], label="raw position as one feature")
    axes.plot(at, coded[at - 1], color=SERIES[0], label="512 sinusoids")
    axes.grid(True, linewidth=0.6)
    axes.set(title="norm of the gradient of a projection", xlabel="position")
    logarithmic(axes, x=True)
    axes.legend(loc="upper left")
    return figure


ROWS = (
    Row(
        5,
        "Rejected: the position itself as one more feature. It grows without a bound.",
        "[x_pos, pos]",
        {
            "Lion with its position": equal(0.2, 0.8, 0.5, 1),
            "last feature of Lion, Kills, Deer": equal(1, 2, 3),
            "largest feature of 1000 positions": equal(1000),
            "of the sinusoids": equal(1),
            "position t · position t + 1, t = 1, 10, 100": equal(2, 110, 10_100),
            "the same of the sinusoids": equal(249.10, 249.10, 249.10, within=5e-3),
            "of 1000 random maps of (pos, 1), how many look at the first or last of 50 keys alone": equal(1000),
        },
        appended,
        (append_position,),
        ("claims/test_positions.py::test_rejected_appending_the_raw_position",),
        figure=draw_rejected,
        slip="The notes call it discrete, with too little granularity. Positions are discrete themselves. The trouble "
        "is another: a product with it can't ask for any place between the first and the last.",
    ),
    Row(
        6,
        "Rejected: positions scaled to 0..1. What one step means depends on the length of the sentence.",
        "pos / (n - 1)",
        {
            "one step, of five words": equal(0.25),
            "one step, of nine words": equal(0.125),
            "which word is at 0.5, of five and of nine": equal(3, 5),
            "rows of the sinusoids that change with the length": equal(0),
        },
        normalised,
        (normalised_positions,),
        ("claims/test_positions.py::test_rejected_positions_normalised_to_one",),
        figure=draw_rejected,
    ),
    Row(
        7,
        "Rejected: one sine. It is bounded, but far positions get the same number.",
        "sin(pos)",
        {
            "sin 1, sin 2, sin 3": equal(0.84, 0.91, 0.14, within=5e-3),
            "Lion with its sine": equal(0.2, 0.8, 0.5, 0.84, within=5e-3),
            "|sin 11 - sin 344|": equal(1.3e-7, within=5e-9),
            "sin 4.2, sin 4.69, sin 4.76": equal(-0.8716, -0.9997, -0.9989, within=5e-5),
            "sin t · sin (t + 1), t = 1, 2": equal(0.765, 0.128, within=5e-4),
            "the same of a sine and a cosine": equal(0.5403, 0.5403, within=5e-5),
        },
        one_sine,
        (single_sine,),
        ("claims/test_positions.py::test_rejected_a_single_sine",),
        figure=draw_waves,
        slip="The notes say that a sine is continuous because each x has a y; a step function has that too. They "
        "praise it as an abstract continuous representation, with 4.2, 4.69 and 4.76 beside 1, 2, 3. No word stands "
        "there, and continuous doesn't mean fine: the sines of 4.69 and 4.76 are -0.9997 and -0.9989. Nor does one "
        "sine capture relative positions because it comes back: neighbours have the product 0.765 at 1, 0.128 at 2.",
    ),
    Row(
        8,
        "Rejected: one sine and its cosine. Two positions 710 apart are all but the same point.",
        "(sin(pos), cos(pos))",
        {"distance of p and p+710": equal(6.0e-5, within=5e-7)},
        one_pair,
        (sine_cosine,),
        ("claims/test_positions.py::test_rejected_one_sine_cosine_pair",),
        figure=draw_waves,
        slip="The notes praise a code for coming back. That is what makes positions 710 apart all but the same.",
    ),
    Row(
        9,
        "A second pair of half the frequency helps little; 512 features keep all gaps of 1..4999 apart.",
        "(sin(pos), cos(pos), sin(pos/2), cos(pos/2))",
        {
            "distance of p and p+1420": equal(1.3e-4, within=5e-6),
            "smallest of 512 features, gaps 1..4999": equal(3.71, within=5e-3),
            "smallest of 1000 positions, one sine": equal(1.3e-7, within=5e-9),
            "smallest of 1000 positions, a pair": equal(6.0e-5, within=5e-7),
            "smallest of 1000 positions, two pairs": equal(0.0099, within=5e-5),
        },
        two_pairs,
        (sine_cosine, offset_distance),
        ("claims/test_positions.py::test_rejected_a_second_pair_of_half_the_frequency",),
        figure=draw_waves,
    ),
    Row(
        38,
        "Raw positions make gradients grow with the position; sinusoids don't, and need fewer features than bits.",
        "d(w · code(p)) / dw = code(p)",
        {
            "gradient at position 1000 / at position 1, raw positions": equal(719.8, within=0.05),
            "the same, sinusoids": equal(1, within=1e-5),
            "digits that 1000 positions need in binary": equal(10),
            "smallest distance of 1000 positions in one sine-cosine pair": equal(6.0e-5, within=5e-7),
            "of 1000 positions, how many float16 tells apart: one sine, a pair": equal(471, 816),
            "bits of a pair in float16": equal(32),
        },
        raw_gradients,
        (append_position, sinusoids),
        ("claims/test_beside.py::test_gradients_grow_with_raw_positions_alone",),
        figure=draw_raw_gradients,
        slip="The notes say that raw positions make gradients explode, and that floats need less space than bits. The "
        "gradients grow as the position does, 719.8 times at 1000; what explodes grows geometrically. A pair in "
        "float16 has 32 bits, where 10 do, and tells 816 of 1000 positions apart.",
    ),
)
