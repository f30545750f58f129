"""Numbers of the rows about positions: what models add, and the simpler designs that fail."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.nn import Transformer, positions
from mlx_transformer.nn.positions import Positions, positions_of
from mlx_transformer.system.errors import UserError

from . import position_study as study
from .measure import how_many
from .row import Found

LION_KILLS_DEER = [[0.2, 0.8, 0.5], [0.6, 0.1, 0.3], [0.9, 0.4, 0.7]]


def added(length: int, d_model: int = 512, kind: str = "sinusoidal") -> np.ndarray:
    """The rows that a model adds, (length, d_model) float32: what `Positions` makes of zeros."""
    config = TransformerConfig.from_dict(dict(vocab_size=8, d_model=d_model, heads=1, positions=kind))
    return np.array(Positions(config, causal=False)(mx.zeros((1, length, d_model)), positions_of(length)).x)[0]


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
        "longest wave of the paper's 10000, in positions": study.longest_wave(512),
        "of a base of 1000, once in the notes": study.longest_wave(512, base=1000.0),
        "features of the base model (52 once in the notes)": base.heads * base.d_k,
    }


def concatenated() -> Found:
    other, paper = added(2, kind="sinusoidal_concat"), added(2)
    return {
        "second sine of PE(1)": other[1, 1],
        "the same in row 2": paper[1, 2],
        "largest difference of the sorted PE(1)": np.abs(np.sort(other[1]) - np.sort(paper[1])).max(),
        "PE(1) of four features": added(2, 4, "sinusoidal_concat")[1].tolist(),
    }


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
    try:
        model.encode([[3] * 25])
        refused = 0
    except UserError:
        refused = 1
    return {
        "rows read": ids.shape[1],
        "of these with a gradient": how_many(reached[:16]),
        "of the others": how_many(reached[16:]),
        "a position past the table is refused": refused,
    }


def appended() -> Found:
    return {
        "last feature of Lion, Kills, Deer": study.append_position(LION_KILLS_DEER)[:, -1].tolist(),
        "largest feature of 1000 positions": study.append_position(np.zeros((1000, 3))).max(),
        "of the sinusoids": float(np.abs(added(1000)).max()),
    }


def normalised() -> Found:
    five, nine = study.normalised_positions(5), study.normalised_positions(9)
    return {
        "one step, of five words": sorted(set(np.diff(five).tolist())),
        "one step, of nine words": sorted(set(np.diff(nine).tolist())),
        "rows of the sinusoids that change with the length": int(np.any(added(9)[:5] != added(5), axis=1).sum()),
    }


def one_sine() -> Found:
    collision = study.single_sine(11) - study.single_sine(344)
    return {
        "sin 1, sin 2, sin 3": study.single_sine([1, 2, 3])[:, 0].tolist(),
        "|sin 11 - sin 344|": abs(float(collision[0])),
    }


def one_pair() -> Found:
    return {"distance of p and p+710": pair_distance(710, 1.0)}


def two_pairs() -> Found:
    return {
        "distance of p and p+1420": pair_distance(1420, 1.0, 0.5),
        "smallest of 512 features, gaps 1..4999": min(study.offset_distance(512, gap) for gap in range(1, 5000)),
    }


def pair_distance(gap: int, *frequencies: float) -> float:
    """|code(p + gap) - code(p)| of sine-cosine pairs; the largest over 3000 positions p."""
    p = np.arange(3000)
    codes = study.sine_cosine(p + gap, *frequencies) - study.sine_cosine(p, *frequencies)
    return float(np.linalg.norm(codes, axis=1).max())


def constant_distance() -> Found:
    pe = sinusoids(400, 512, dtype=np.float64)
    spread = 0.0
    for k in (1, 2, 17, 300):
        squares = np.sum((pe[k:] - pe[:-k]) ** 2, axis=1)
        spread = max(spread, float(np.abs(squares / study.offset_distance(512, k) ** 2 - 1).max()))
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
        turned = pe[:200] @ study.offset_rotation(512, offset).T
        missed = max(missed, float(np.abs(turned - pe[offset : 200 + offset]).max()))
    return {"largest |R PE(t) - PE(t + offset)|, offsets 1, 5, 64": missed}


def counted() -> Found:
    bits = study.counter_bits(3)
    changes = sum(np.array(list(before)) != np.array(list(after)) for before, after in itertools.pairwise(bits))
    crossings = study.zero_crossings(1000, 32)
    return {
        "changes of each digit, 000 to 111": np.asarray(changes).tolist(),
        "zero crossings of the first feature, 1000 positions": int(crossings[0]),
        "features that cross zero more often than one before them": int(np.sum(np.diff(crossings) > 0)),
    }


def extended() -> Found:
    """Rows that change when a table is extended, of both variants."""
    changed = 0
    for kind in ("sinusoidal", "sinusoidal_concat"):
        short = positions.sinusoid_table(10, 64, kind)
        longer = positions.sinusoid_table(short.shape[0] + 1, 64, kind)
        changed += how_many(longer[: short.shape[0]] != short)
    kept = positions.sinusoid_table(10, 64, "sinusoidal") is positions.sinusoid_table(900, 64, "sinusoidal")
    return {"numbers that an extension changes": changed, "the table is the same object at the next use": int(kept)}


def raw_gradients() -> Found:
    raw, coded = gradient_by_position()
    return {
        "gradient at position 1000 / at position 1, raw positions": raw[999] / raw[0],
        "the same, sinusoids": coded[999] / coded[0],
        "digits that 1000 positions need in binary": len(study.counter_bits(10)[999]),
        "smallest distance of 1000 positions in one sine-cosine pair": nearest_in_pair(1000),
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
    return norms(mx.array(study.append_position(words).astype(np.float32))), norms(mx.array(sinusoids(1001, 512)[1:]))


def nearest_in_pair(count: int) -> float:
    """Smallest distance of any two of `count` positions that are coded by one sine and one cosine."""
    return float(min(np.hypot(np.sin(g) - 0, np.cos(g) - 1) for g in range(1, count)))
