"""Positions: what a model adds to its words, and what the sinusoids can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import ArrayLike, NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.parameters import named_parameters
from mlx_transformer.nn.positions import Positions, positions_of, sinusoid_table
from mlx_transformer.system.errors import UserError

from .cost import multiplications
from .drawing import INK, LINE, SERIES, canvas, draw_key, heat_map, write_cells
from .measure import how_many
from .row import Found, Row, above, below, equal

Array = NDArray[np.float64]


def frequencies(d_model: int, base: float = 10000.0) -> Array:
    """w_j = 10000^(-2j/d) of the paper's encoding, (d/2,), falling."""
    return base ** (-2 * np.arange(d_model // 2) / d_model)


def longest_wave(d_model: int, base: float = 10000.0) -> float:
    """Positions until the slowest feature comes back."""
    return float(2 * np.pi / frequencies(d_model, base)[-1])


def sine_cosine(positions: ArrayLike, *frequencies: float) -> Array:
    """Sine and cosine of each frequency side by side, (..., 2k). Few frequencies collide; the paper takes d/2."""
    angle = np.asarray(positions, dtype=np.float64)[..., None] * np.asarray(frequencies, dtype=np.float64)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)


def offset_distance(d_model: int, offset: int) -> float:
    """|PE(t+k) - PE(t)|: by sum(2 - 2 cos(k w_j)) under the root, so the same for every t."""
    return float(np.sqrt(np.sum(2 - 2 * np.cos(offset * frequencies(d_model)))))


def offset_rotation(d_model: int, offset: int) -> Array:
    """The linear map PE(t) -> PE(t + offset), the same for every t: block-diagonal (d, d), one rotation a frequency."""
    matrix = np.zeros((d_model, d_model))
    for j, angle in enumerate(offset * frequencies(d_model)):
        sine, cosine = np.sin(angle), np.cos(angle)
        matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cosine, sine], [-sine, cosine]]
    return matrix


def counter_bits(width: int) -> list[str]:
    """000, 001, ... 111: in a counter, too, the last digit alternates fastest."""
    return [format(value, f"0{width}b") for value in range(2**width)]


def zero_crossings(length: int, d_model: int) -> NDArray[np.int64]:
    """How often the sine of each frequency changes its sign within `length` positions, (d/2,)."""
    sines = sinusoids(length, d_model, dtype=np.float64)[1:, 0::2]
    return np.sum(np.signbit(sines[1:]) != np.signbit(sines[:-1]), axis=0)


def added(length: int, d_model: int = 512, kind: str = "sinusoidal") -> np.ndarray:
    """The rows that a model adds, (length, d_model) float32: what `Positions` makes of zeros."""
    config = TransformerConfig.from_dict(dict(vocab_size=8, d_model=d_model, heads=1, positions=kind))
    return np.array(Positions(config, "encoder")(mx.zeros((1, length, d_model)), positions_of(length)).x)[0]


def interleaved() -> Found:
    pe = added(2)
    four = sinusoids(2, 512, dtype=np.float64)[1, [0, 1, 2, 3, -1]]
    base = TransformerConfig.preset("base", 8)
    return {
        "PE(0), first four": pe[0, :4].tolist(),
        "PE(1), first four": pe[1, :4].tolist(),
        "PE(1), last two": pe[1, -2:].tolist(),
        "PE(1) of four decimals, first four and last": four.round(4).tolist(),
        "cut off instead, as in the notes": (np.floor(four * 1e4) / 1e4).tolist(),
        "longest wave of the paper's 10000, in positions": longest_wave(512),
        "of a base of 1000, once in the notes": longest_wave(512, base=1000.0),
        "features of the base model (52 once in the notes)": base.heads * base.d_k,
        "exponents 2i/512 of i = 0, 1, 2 (1/101, 4/517 and 40/517 in the notes)": [2 * i / 512 for i in range(3)],
        "first wave, in positions; if i began at 1, as in the notes": (2 * np.pi / frequencies(512)[:2]).tolist(),
    }


def concatenated() -> Found:
    other, paper = added(2, kind="sinusoidal_concat"), added(2)
    return {
        "second sine of PE(1)": other[1, 1],
        "the same in row 2": paper[1, 2],
        "largest difference of the sorted PE(1)": np.abs(np.sort(other[1]) - np.sort(paper[1])).max(),
        "PE(0), PE(1), PE(2) of four features": added(3, 4, "sinusoidal_concat").flatten().tolist(),
    }


def timing_signal(length: int, channels: int, dtype: type = np.float64, start_index: int = 0) -> np.ndarray:
    """get_timing_signal_1d() of tensor2tensor, step by step in one type: (length, channels)."""
    position = np.arange(start_index, start_index + length, dtype=dtype)
    timescales = channels // 2
    increment = dtype(np.log(10000.0) / max(timescales - 1, 1))
    inverse = np.exp(np.arange(timescales, dtype=dtype) * -increment)
    scaled = position[:, None] * inverse[None, :]
    return np.concatenate([np.sin(scaled), np.cos(scaled)], axis=1)


def tensor2tensor() -> Found:
    ours = {d: sinusoids(5000, d, "sinusoidal_concat", np.float64) for d in (4, 64, 512, 1024)}
    later = sinusoids(100, 512, "sinusoidal_concat", np.float64, 3) - timing_signal(100, 512, start_index=3)
    return {
        "largest difference from get_timing_signal_1d(), float64, 5000 positions, d = 4, 64, 512, 1024": [
            float(np.abs(table - timing_signal(5000, d)).max()) for d, table in ours.items()
        ],
        "the same with start_index = 3": float(np.abs(later).max()),
        "its own float32 from its float64, 1000 positions, d = 512": float(
            np.abs(timing_signal(1000, 512, np.float32) - ours[512][:1000]).max()
        ),
        "widths that it pads or clamps and a model refuses, of 2, 3 and 5": sum(
            _refused(lambda d=d: TransformerConfig(vocab_size=8, d_model=d, heads=1, positions="sinusoidal_concat"))
            for d in (2, 3, 5)
        ),
    }


def _refused(make: Callable[[], Any]) -> bool:
    try:
        make()
    except UserError:
        return True
    return False


def learned() -> Found:
    """A gradient reaches the rows that were read, and no other; past the table is an error."""
    config = TransformerConfig.preset("tiny", 20, positions="learned", max_positions=24, dropout=0.0)
    mx.random.seed(0)
    model = Transformer(config)
    ids = mx.array([[3, 4, 5, 6] * 4])

    def loss(parameters: dict) -> mx.array:
        model.update(parameters)
        return mx.sum(mx.square(model(ids, ids)))

    rows = dict(tree_flatten(mx.grad(loss)(model.parameters())))["decoder.positions.weight"]
    reached = mx.any(rows != 0, axis=1)
    return {
        "rows read": ids.shape[1],
        "of these with a gradient": how_many(reached[:16]),
        "of the others": how_many(reached[16:]),
        "parameters of sinusoids": len(named_parameters(Positions(replace(config, positions="sinusoidal"), "encoder"))),
        "a position past the table is refused": _refused(lambda: model.encode([[3] * 25])),
    }


def constant_distance() -> Found:
    pe = sinusoids(400, 512, dtype=np.float64)
    spread = 0.0
    for k in (1, 2, 17, 300):
        squares = np.sum((pe[k:] - pe[:-k]) ** 2, axis=1)
        spread = max(spread, float(np.abs(squares / offset_distance(512, k) ** 2 - 1).max()))
    return {
        "different rows of 400": len(np.unique(pe, axis=0)),
        "largest feature": float(np.abs(pe).max()),
        "relative spread of |PE(t+k) - PE(t)|^2 over t": spread,
        "PE(t) · PE(t+k), k = 0..3": products(4).tolist(),
    }


def products(offsets: int, d_model: int = 512) -> np.ndarray:
    """PE(t) · PE(t + k), the same for every t, of k = 0, 1, ... (offsets,)."""
    pe = sinusoids(offsets, d_model, dtype=np.float64)
    return pe @ pe[0]


def rotated() -> Found:
    pe = sinusoids(300, 512, dtype=np.float64)
    missed = 0.0
    for offset in (1, 5, 64):
        turned = pe[:200] @ offset_rotation(512, offset).T
        missed = max(missed, float(np.abs(turned - pe[offset : 200 + offset]).max()))
    return {"largest |R PE(t) - PE(t + offset)|, offsets 1, 5, 64": missed}


def counted() -> Found:
    bits = counter_bits(3)
    changes = sum(np.array(list(before)) != np.array(list(after)) for before, after in itertools.pairwise(bits))
    crossings = zero_crossings(1000, 32)
    return {
        "changes of each digit, 000 to 111": np.asarray(changes).tolist(),
        "zero crossings of the first feature, 1000 positions": int(crossings[0]),
        "features that cross zero more often than one before them": int(np.sum(np.diff(crossings) > 0)),
    }


def extended() -> Found:
    """Rows that change when a table is extended, of both variants."""
    changed = 0
    base = TransformerConfig(vocab_size=8, d_model=64)
    for kind in ("sinusoidal", "sinusoidal_concat"):
        config = replace(base, positions=kind)
        short = sinusoid_table(10, config)
        longer = sinusoid_table(short.shape[0] + 1, config)
        changed += how_many(longer[: short.shape[0]] != short)
    kept = sinusoid_table(10, base) is sinusoid_table(900, base)
    return {
        "numbers that an extension changes": changed,
        "the table is the same object at the next use": int(kept),
        "additions of 100 positions, % of the products of a self-attention": 100 * 100 * 512 / multiplications(8, 100),
    }


def draw_heat_maps() -> Any:
    """Both variants: 80 positions of the paper's 512 features."""
    figure, panels = canvas(2, height=3.0)
    for axes, (kind, title) in zip(
        panels,
        {"sinusoidal": "pairs side by side (paper)", "sinusoidal_concat": "halves (tensor2tensor)"}.items(),
        strict=True,
    ):
        heat_map(axes, added(80, 512, kind), signed=True, most=1.0)
        axes.set(title=title, xlabel="feature", ylabel="position")
    draw_key(panels[-1])
    return figure


def draw_dot_products() -> Any:
    figure, (axes,) = canvas(height=2.8, width=6)
    values = products(121)
    axes.plot(range(121), values, color=SERIES[0], linewidth=1.4)
    axes.plot(range(4), values[:4], "o", color=SERIES[1], markersize=4)
    for k in range(4):
        axes.annotate(
            f"{values[k]:.2f}", (k, values[k]), (k + 4, values[k] + (5, -1, 0, 0)[k]), fontsize=8, va="center"
        )
    axes.grid(True, linewidth=0.6)
    axes.set(title="PE(t) · PE(t+k), the same for every t, d = 512", xlabel="k")
    return figure


def draw_rotation() -> Any:
    """The same offset from two positions, for three pairs of features."""
    figure, panels = canvas(3, height=2.8)
    pe, offset = sinusoids(40, 512, dtype=np.float64), 4
    for axes, j in zip(panels, (0, 32, 64), strict=True):
        circle = np.linspace(0, 2 * np.pi, 100)
        axes.plot(np.cos(circle), np.sin(circle), color=LINE, linewidth=1)
        angle = offset * frequencies(512)[j]
        for t, colour, radius in ((1, SERIES[0], 1.0), (12, SERIES[1], 0.9)):
            start, end = pe[t, 2 * j : 2 * j + 2], pe[t + offset, 2 * j : 2 * j + 2]
            arc = [sine_cosine(s, frequencies(512)[j]) for s in np.linspace(t, t + offset, 60)]
            axes.plot(*(radius * np.array(arc).T), color=colour, linewidth=2)
            for place, point in ((t, start), (t + offset, end)):
                axes.plot([0, radius * point[0]], [0, radius * point[1]], color=colour, linewidth=0.8)
                axes.text(*(1.18 * point), str(place), ha="center", va="center", fontsize=8, color=INK)
        axes.set(
            title=f"pair {j}: {offset} steps = {angle:.3g} rad", aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.4, 1.4)
        )
        axes.set(xlabel="sine", ylabel="cosine", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure


def draw_counter() -> Any:
    figure, (bits, waves) = canvas(2, height=3.2)
    digits = np.array([list(map(int, row)) for row in counter_bits(3)])[:, ::-1]
    heat_map(bits, digits, most=1.6)
    write_cells(bits, digits.astype(str).tolist(), 9)
    bits.set(title="a counter, its last digit first: the fastest", xticks=[], ylabel="value")
    heat_map(waves, sinusoids(33, 16, dtype=np.float64)[:, 0::2], signed=True, most=1.0)
    waves.set(title="sines of 16 features: the first is the fastest", xlabel="frequency", ylabel="position")
    draw_key(waves)
    return figure


ROWS = (
    Row(
        2,
        "Sinusoidal positions: for each frequency a sine and a cosine, side by side.",
        "PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d))",
        {
            "PE(0), first four": equal(0, 1, 0, 1),
            "PE(1), first four": equal(0.841471, 0.540302, 0.821856, 0.569695, within=1e-6),
            "PE(1), last two": equal(0.000104, 1, within=1e-6),
            "PE(1) of four decimals, first four and last": equal(0.8415, 0.5403, 0.8219, 0.5697, 1, within=1e-9),
            "cut off instead, as in the notes": equal(0.8414, 0.5403, 0.8218, 0.5696, 0.9999, within=1e-9),
            "longest wave of the paper's 10000, in positions": equal(60_611, within=0.5),
            "of a base of 1000, once in the notes": equal(6_116, within=0.5),
            "features of the base model (52 once in the notes)": equal(512),
            "exponents 2i/512 of i = 0, 1, 2 (1/101, 4/517 and 40/517 in the notes)": equal(0, 0.00390625, 0.0078125),
            "first wave, in positions; if i began at 1, as in the notes": equal(6.283, 6.513, within=5e-4),
        },
        interleaved,
        (sinusoids, Positions),
        ("claims/test_positions.py::test_interleaved_sinusoids",),
        figure=draw_heat_maps,
        slip="The notes cut digits off where they should round: 0.8414 for 0.8415, 0.9999 for 1. They write 1000 for "
        "10000 once, with which the longest wave is 6,116 positions instead of 60,611, and 52 dimensions for 512. "
        "Their exponents 1/101, 4/517 and 40/517 aren't 2i/512, their i begins at 1, and the comma in their sin(ω, t) "
        "stands for a product.",
    ),
    Row(
        3,
        "The variant of tensor2tensor: all sines, then all cosines, of other frequencies. No permutation of row 2.",
        "PE(pos, j) = sin(pos w_j), PE(pos, j + d/2) = cos(pos w_j), w_j = 10000^(-j/(d/2-1))",
        {
            "second sine of PE(1)": equal(0.82178, within=5e-6),
            "the same in row 2": equal(0.82186, within=5e-6),
            "largest difference of the sorted PE(1)": above(1e-4),
            "PE(0), PE(1), PE(2) of four features": equal(
                *(0, 0, 1, 1), *(0.8415, 0.0001, 0.5403, 1), *(0.9093, 0.0002, -0.4161, 1), within=5e-5
            ),
        },
        concatenated,
        (sinusoids, Positions),
        ("claims/test_positions.py::test_concatenated_sinusoids_have_other_frequencies",),
        figure=draw_heat_maps,
    ),
    Row(
        4,
        "Learned positions: a table of rows that training moves, and that has an end.",
        "x_pos + P_pos",
        {
            "rows read": equal(16),
            "of these with a gradient": equal(16),
            "of the others": equal(0),
            "parameters of sinusoids": equal(0),
            "a position past the table is refused": equal(1),
        },
        learned,
        (Positions,),
        ("claims/test_positions.py::test_learned_positions_receive_gradient_and_end",),
        slip="The notes call the pattern of fixed positions learned. Sinusoids have no parameters.",
    ),
    Row(
        10,
        "The code is unique, bounded, always the same, and has one distance for one offset, wherever it starts.",
        "|PE(t+k) - PE(t)|^2 = Σ_j (2 - 2 cos(k w_j)) for every t, w_j = 10000^(-2j/d)",
        {
            "different rows of 400": equal(400),
            "largest feature": equal(1),
            "relative spread of |PE(t+k) - PE(t)|^2 over t": below(1e-9),
            "PE(t) · PE(t+k), k = 0..3": equal(256, 249.10, 231.73, 211.74, within=0.01),
        },
        constant_distance,
        (sinusoids, offset_distance),
        ("claims/test_positions.py::test_sinusoids_are_unique_bounded_and_of_constant_distance_per_offset",),
        figure=draw_dot_products,
        slip="The notes say: deterministic, which means bounded. The raw position is deterministic too, and has no "
        "bound.",
    ),
    Row(
        11,
        "A step of k positions is a rotation of each pair, by the same angle everywhere.",
        "[cos(k w), sin(k w); -sin(k w), cos(k w)] · (PE(t, 2j), PE(t, 2j+1)) = (PE(t+k, 2j), PE(t+k, 2j+1))",
        {"largest |R PE(t) - PE(t + offset)|, offsets 1, 5, 64": below(1e-12)},
        rotated,
        (offset_rotation,),
        ("claims/test_positions.py::test_an_offset_is_a_rotation",),
        figure=draw_rotation,
        slip="Notes end with the question how a sine captures relative positions. It doesn't, alone: a sine and its "
        "cosine do. Going on by k places is one matrix for all places, and matrices make the queries and keys.",
    ),
    Row(
        12,
        "As in a binary counter, some features change at every step and others hardly ever.",
        "000, 001, 010, ... 111; w_0 > w_1 > ... > w_(d/2-1)",
        {
            "changes of each digit, 000 to 111": equal(1, 3, 7),
            "zero crossings of the first feature, 1000 positions": equal(317),
            "features that cross zero more often than one before them": equal(0),
        },
        counted,
        (counter_bits, zero_crossings),
        ("claims/test_positions.py::test_frequency_falls_as_in_a_counter",),
        figure=draw_counter,
    ),
    Row(
        13,
        "The table is computed once, used again, and extended without a bit of it changing.",
        "PE(0), ..., PE(n) is the beginning of PE(0), ..., PE(2n)",
        {
            "numbers that an extension changes": equal(0),
            "the table is the same object at the next use": equal(1),
            "additions of 100 positions, % of the products of a self-attention": equal(0.044, within=5e-4),
        },
        extended,
        (sinusoid_table,),
        ("claims/test_positions.py::test_computed_once_and_extended_bit_for_bit",),
    ),
    Row(
        51,
        "Row 3 is get_timing_signal_1d() of tensor2tensor, number for number.",
        "i = log(10000) / (d/2 - 1), PE(pos, j) = sin(pos exp(-i j)), PE(pos, j + d/2) = cos(pos exp(-i j))",
        {
            "largest difference from get_timing_signal_1d(), float64, 5000 positions, d = 4, 64, 512, 1024": below(
                *[2e-12] * 4
            ),
            "the same with start_index = 3": below(1e-12),
            "its own float32 from its float64, 1000 positions, d = 512": above(1e-5),
            "widths that it pads or clamps and a model refuses, of 2, 3 and 5": equal(3),
        },
        tensor2tensor,
        (sinusoids,),
        ("claims/test_positions.py::test_other_frequencies_are_not_tensor2tensors",),
        figure=draw_heat_maps,
        missing="Its variables, in TensorFlow's first format, are not read.",
        slip="The notes call the program Tranformer2Transformer.",
    ),
)
