"""Numbers of the rows about attention, heads and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.attention import Attention, attention, attention_weights
from mlx_transformer.nn.masks import Mask, as_array, causal_mask, causal_padding_mask, padding_mask
from mlx_transformer.nn.parameters import named_parameters

from . import notes_table
from .measure import largest, number
from .row import Found
from .worked import SENTENCE

WIDTHS = (4, 16, 64, 256, 1024)
ORDERS = {
    "The cat sat / Sat cat the": ("the cat sat", "sat cat the"),
    "The cat sat on the mat / The mat sat on the cat": ("the cat sat on the mat", "the mat sat on the cat"),
    "The Avengers defeated Thanos / Thanos defeated the Avengers": (
        "the avengers defeated thanos",
        "thanos defeated the avengers",
    ),
    "My fried chicken was very good / Good very was chicken fried my": (
        "my fried chicken was very good",
        "good very was chicken fried my",
    ),
}
"""Each sentence beside the same words in another order."""


def encoder(**changes: object) -> Transformer:
    """One layer of 8 heads with fresh weights, always the same ones."""
    mx.random.seed(3)
    options = dict(architecture="encoder", decoder_layers=0, encoder_layers=1, vocab_size=24, dropout=0.0)
    sizes = dict(d_model=512, heads=8, d_ff=64)
    model = Transformer(TransformerConfig.from_dict({**options, **sizes, **changes}))
    model.eval()
    return model


def ids_of(*sentences: Sequence[str]) -> list[list[int]]:
    """Rows of ids, the same word the same id in all of them."""
    vocabulary = sorted({word for words in sentences for word in words})
    return [[3 + vocabulary.index(word) for word in words] for words in sentences]


def sentence_weights(words: Sequence[str], positions: str) -> tuple[np.ndarray, np.ndarray]:
    """First head's weights (n, n) over a sentence with or without positions, and the layer's input (n, 512)."""
    model = encoder(positions=positions)
    return head_weights(model, ids_of(words))


def head_weights(model: Transformer, ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    seen: dict[str, mx.array] = {}
    model.encode(ids, tap=seen.__setitem__)
    x = seen["encoder.embedding"]
    heads = model.encoder.layers[0].self_attention
    return np.array(heads.weights(x, heads.keys_values(x)[0]))[0, 0], np.array(x)[0]


def scaled_dot_product() -> Found:
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, 1, 6, 512)) for _ in range(3))
    weights = np.array(attention_weights(q, k))[0, 0]
    Q, K, V = (np.array(a, dtype=np.float64)[0, 0] for a in (q, k, v))
    scores = np.exp(Q @ K.T / math.sqrt(512))
    expected = scores / scores.sum(axis=1, keepdims=True) @ V
    return {
        "shape of the weights of (6, 512)": weights.shape,
        "sums of its rows": weights.sum(axis=1).tolist(),
        "largest error of the fused kernel beside float64": np.abs(np.array(attention(q, k, v))[0, 0] - expected).max(),
    }


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
        "largest |log A_ij - log A_ji - (z_j - z_i)|, with positions": notes_table.asymmetry(placed),
        "of a head with projections": notes_table.asymmetry(projected),
        "of the notes' table": notes_table.asymmetry(notes_table.WEIGHTS),
        "of it explained by rounding to three decimals, at most": notes_table.explained_by_rounding(),
        "LOVELY, A, IS of the notes' table multiplied around, and the other way": [
            notes_table.around(notes_table.LOVELY, notes_table.A, notes_table.IS),
            notes_table.around(notes_table.LOVELY, notes_table.IS, notes_table.A),
        ],
        "sums of the rows of the notes' table": np.sum(notes_table.WEIGHTS, axis=1).tolist(),
        "share of random rows of six whose three decimals sum to 1.001": notes_table.rounded_up(),
    }


def without_parameters() -> Found:
    parameters = dict(named_parameters(Attention(TransformerConfig(vocab_size=8))))
    others = sum(value.size for name, value in parameters.items() if "_proj." not in name)
    mx.random.seed(1)
    x = mx.random.normal((1, 1, 6, 512))
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True) * math.sqrt(512)
    largest = mx.argmax(attention_weights(x, x)[0, 0], axis=-1).tolist()
    return {"parameters beside the projections": others, "where each of six rows looks most": largest}


def root_of_width() -> Found:
    widths, variances, kept, lost = saturation()
    q = mx.zeros((1, 1, 1, 64)).at[..., 0].add(112)
    k = mx.zeros((1, 1, 2, 64)).at[:, :, 0, 0].add(1)  # the products are 112 and 0
    first, second = np.array(attention_weights(q, k)[0, 0, 0], dtype=np.float64)
    return {
        "112 / sqrt(64), from the odds of two weights": math.log(first / second),
        "Var(q · k) / d_k, d_k = 4, 16, 64, 256, 1024": (variances / widths).tolist(),
        "gradient of the scaled softmax, d_k = 1024 / 4": kept[-1] / kept[0],
        "of the unscaled": lost[-1] / lost[0],
    }


def saturation() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """By d_k of random queries and keys: d_k, the products' variance, and the sum of w (1 - w), the diagonal of the
    softmax's Jacobian, with the scale and without it."""
    mx.random.seed(0)
    variances, kept, lost = [], [], []
    for d_k in WIDTHS:
        q, k = mx.random.normal((1, 1, 256, d_k)), mx.random.normal((1, 1, 64, d_k))
        variances.append(number(mx.var(q @ k.swapaxes(-1, -2))))
        for slopes, scale in ((kept, None), (lost, 1.0)):
            w = attention_weights(q, k, scale=scale)
            slopes.append(number(mx.mean(mx.sum(w * (1 - w), axis=-1))))
    return np.array(WIDTHS, dtype=np.float64), np.array(variances), np.array(kept), np.array(lost)


def order_blind() -> Found:
    mx.random.seed(0)
    module, x = Attention(TransformerConfig(vocab_size=8, d_model=64, heads=4)), mx.random.normal((1, 6, 64))
    order = mx.array([3, 0, 5, 1, 4, 2])
    permuted = module.attend(x[:, order], *module.keys_values(x[:, order]))
    attended = module.attend(x, *module.keys_values(x))
    changes = word_changes("lion kills deer", "deer kills lion")
    return {
        "largest |Attn(P x) - P Attn(x)|": largest(permuted - attended[:, order]),
        "largest |Attn(P x) - Attn(x)|": largest(permuted - attended),
        "lion, kills, deer: change of a word's output, without positions": [each["none"] for each in changes.values()],
        "the same with positions": [each["sinusoidal"] for each in changes.values()],
    }


def word_changes(first: str, second: str) -> dict[str, dict[str, float]]:
    """Largest change of each word's output between two orders of the same words, by kind of positions.

    A word that comes twice is compared in the order of its places.
    """
    one, other = first.split(), second.split()
    there = _places(one, other)
    found: dict[str, dict[str, float]] = {}
    for kind in ("none", "sinusoidal"):
        outputs = np.array(encoder(positions=kind).encode(ids_of(one, other)))
        for i, word in enumerate(one):
            change = float(np.abs(outputs[0, i] - outputs[1, there[i]]).max())
            each = found.setdefault(word, {})
            each[kind] = max(change, each.get(kind, 0.0))
    return found


def _places(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """Where each word of `one` stands in `other`."""
    free = {word: [i for i, found in enumerate(other) if found == word] for word in one}
    return [free[word].pop(0) for word in one]


def other_orders() -> Found:
    """Change of the weights when the words are reordered and the table is put in the old order again."""
    changes = [reordered(*pair) for pair in ORDERS.values()]
    return {
        "largest change of a weight between both orders, without positions": [each["none"] for each in changes],
        "the same with positions": [each["sinusoidal"] for each in changes],
    }


def reordered(first: str, second: str) -> dict[str, float]:
    one, other = first.split(), second.split()
    there, found = _places(one, other), {}
    ids = ids_of(one, other)
    for kind in ("none", "sinusoidal"):
        model = encoder(positions=kind)
        before, after = (head_weights(model, [row])[0] for row in ids)
        found[kind] = float(np.abs(before - after[np.ix_(there, there)]).max())
    return found


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
    hidden, sums = 0.0, []
    for mask in ("causal", *masks().values()):
        weights = np.array(attention_weights(q, q, mask))[0, 0]
        allowed = np.broadcast_to(np.array(as_array(mask, 5, 5)), (1, 1, 5, 5))[0, 0]
        hidden = max(hidden, float(weights[~allowed].max()))
        sums.append(float(np.abs(weights.sum(-1) - 1).max()))
    return {
        "largest masked weight": hidden,
        "largest |sum of a row - 1|": max(sums),
        "change of earlier outputs by a later token": future_change(),
    }


def future_change() -> float:
    mx.random.seed(0)
    model = Transformer(TransformerConfig.preset("tiny", 30, d_model=32, d_ff=32, dropout=0.0))
    a, b = (model([[5, 6, 7, 2]], [ids]) for ids in ([1, 10, 11, 12, 13], [1, 10, 11, 20, 21]))
    return largest(a[:, :3] - b[:, :3])


def look_up() -> Found:
    mx.random.seed(0)
    k = mx.random.normal((1, 1, 6, 64))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((1, 1, 6, 64))
    asked = mx.array([4, 0, 2])
    far = [largest(attention(k[:, :, asked] * s, k, v) - v[:, :, asked]) for s in (1e6, 1.0)]
    return {"error of the value that is asked for, scores times a million": far[0], "times one": far[1]}
