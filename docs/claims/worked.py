"""The worked example of the notes: six words of five features, to which positions are added."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.attention import attention, attention_weights
from mlx_transformer.nn.positions import Positions, positions_of

from .drawing import Table
from .measure import largest
from .row import Found, Row, below, equal

SENTENCE = "YOUR CAT IS A LOVELY CAT".split()

WORDS = {
    "YOUR": (952.207, 5450.840, 1853.448, 1.658, 2671.529),
    "CAT": (171.411, 3276.350, 9192.819, 3633.421, 8390.473),
    "IS": (621.659, 1304.051, 0.565, 7679.805, 4506.025),
    "A": (776.562, 5567.288, 58.942, 2716.194, 5119.949),
    "LOVELY": (6422.693, 6315.080, 9358.778, 2141.081, 735.147),
}
"""The table of embeddings: CAT is one row of it, at both places."""

POSITIONS = {
    1: (1664.068, 8080.133, 2620.399, 9386.405, 3120.159),
    5: (1281.458, 7902.890, 912.970, 1659.217, 7018.620),
}
"""Of both CATs; those of the other words the notes don't give."""

DOTTED = 3821.102
"""A number of the notes on a row that is dots otherwise."""


def sums(dtype: mx.Dtype = mx.float64) -> NDArray[np.float64]:
    """Both CATs after the positions were added, as the package looks words up and adds rows of a table: (2, 5)."""
    config = TransformerConfig(vocab_size=len(WORDS), d_model=5, heads=1, positions="learned", max_positions=6)
    placed = Positions(config, "encoder")
    rows = np.zeros((6, 5))
    for place, row in POSITIONS.items():
        rows[place] = row
    with mx.stream(mx.cpu):  # where MLX has float64
        placed.weight = mx.array(rows, dtype=dtype)
        added = placed(looked_up(dtype), positions_of(6)).x
        return np.array(added, dtype=np.float64)[0, list(POSITIONS)]


def looked_up(dtype: mx.Dtype = mx.float64) -> mx.array:
    """The sentence's rows of the table of embeddings, (1, 6, 5)."""
    table, ids = mx.array(np.array(list(WORDS.values())), dtype=dtype), [[*WORDS].index(word) for word in SENTENCE]
    return table[mx.array(ids)][None]


def first_feature() -> Found:
    first, second = sums()
    words, scaled = (mx.sqrt(mx.mean(mx.square(rows))).item() for rows in fresh_rows())
    return {
        "first feature of the first CAT": first[0],
        "of the second": second[0],
        "features": first.size,
        "size (root mean square) of fresh rows of 512 features": words,
        "times √512": scaled,
        "of the positions": float(np.sqrt(np.mean(sinusoids(100, 512) ** 2))),
    }


def fresh_rows() -> tuple[mx.array, mx.array]:
    """Embeddings of a fresh model of the paper's width, as they are and as they are added to, (1, 1000, 512) each."""
    ids, found = mx.arange(1000)[None], []
    for scaled in (False, True):
        mx.random.seed(0)
        config = TransformerConfig(vocab_size=1000, d_ff=8, encoder_layers=1, decoder_layers=1, scale_embeddings=scaled)
        found.append(Transformer(config).embed_source(ids))
    return found[0], found[1]


def features() -> Found:
    first, second = sums()
    with mx.stream(mx.cpu):
        words = np.array(looked_up())[0]
    return {
        "first CAT": first.tolist(),
        "second CAT": second.tolist(),
        "features of both CATs that differ before positions are added": int(np.sum(words[1] != words[5])),
        "largest number of the notes' words, and of their positions": [
            max(map(max, table.values())) for table in (WORDS, POSITIONS)
        ],
        "largest number of sinusoids": float(np.abs(sinusoids(6, 512)).max()),
        "words, positions and sums that their 3821.102, on the row of dots, is in": sum(
            DOTTED in np.round(rows, 3) for rows in (*WORDS.values(), *POSITIONS.values(), first, second)
        ),
        "of these sums, how many float32 rounds to another third decimal": int(
            np.sum(np.abs(sums(mx.float32) - sums()) > 5e-4)
        ),
    }


PRODUCTS = {"Thinking": 112.0, "Machines": 96.0}
"""q_1 · k of both words, as The Illustrated Transformer (Alammar 2018) has them, with keys of 64 features."""


def thinking_machines() -> Found:
    q, k, v = _thinking()
    scaled, unscaled = attention_weights(q, k)[0, 0, 0], attention_weights(q, k, scale=1.0)[0, 0, 0]
    z = attention(q, k, v)[0, 0, 0]
    return {
        "q · k of both words": _products(q, k),
        "the same / 8": [product / 8 for product in _products(q, k)],
        "softmax": np.array(scaled).tolist(),
        "largest |z_1 - (0.880797 v_1 + 0.119203 v_2)|": largest(z - (0.880797 * v[0, 0, 0] + 0.119203 * v[0, 0, 1])),
        "what is left for Machines without the division": unscaled[1].item(),
    }


def _thinking() -> tuple[mx.array, mx.array, mx.array]:
    """The query of Thinking (1, 1, 1, 64), and keys and values of both words (1, 1, 2, 64)."""
    mx.random.seed(0)
    k = mx.stack([mx.full((64,), product / 64) for product in PRODUCTS.values()])
    return mx.ones((1, 1, 1, 64)), k[None, None], mx.random.normal((1, 1, 2, 64))


def _products(q: mx.array, k: mx.array) -> list[float]:
    return np.array((q @ k.swapaxes(-1, -2))[0, 0, 0]).tolist()


def list_thinking_machines() -> Table:
    """The boxes from the input to z_1, a line each; vectors by their first two features."""
    q, k, v = _thinking()
    weights = np.array(attention_weights(q, k)[0, 0, 0]).tolist()
    parts = [weight * row for weight, row in zip(weights, v[0, 0], strict=True)]
    lines: dict[str, Sequence[str]] = {
        "key": [_start(row) for row in k[0, 0]],
        "value": [_start(row) for row in v[0, 0]],
        "score q_1 · k": [f"{product:g}" for product in _products(q, k)],
        "÷ 8": [f"{product / 8:g}" for product in _products(q, k)],
        "softmax": [f"{weight:.6f}" for weight in weights],
        "softmax x value": [_start(part) for part in parts],
        "sum z_1": [_start(attention(q, k, v)[0, 0, 0]), ""],
    }
    return Table(("", *PRODUCTS), tuple((name, *cells) for name, cells in lines.items()))


def _start(vector: mx.array) -> str:
    return ", ".join(f"{value:.3f}" for value in np.array(vector[:2]).tolist()) + ", ..."


def list_worked_sums() -> Table:
    """Every word of the sentence, the position that is added to it, and their sum, as far as the notes give them."""
    found = dict(zip(POSITIONS, sums(), strict=True))
    rows = []
    for place, word in enumerate(SENTENCE):
        lines: dict[str, Sequence[float] | None] = {word: WORDS[word]}
        lines[f"+ position {place}"] = POSITIONS.get(place)
        lines[f"= {word} at {place}"] = found.get(place)
        for name, values in lines.items():
            cells = ["not given"] * 5 if values is None else [f"{value:.3f}" for value in values]
            rows.append((name, *cells))
    return Table(("word, position, sum", *(f"feature {i}" for i in range(1, 6))), tuple(rows))


ROWS = (
    Row(
        14,
        "Positions are added and not appended, to embeddings that were multiplied by √d so that they still count.",
        "x = √d · E_word + PE(pos)",
        {
            "first feature of the first CAT": equal(1835.479, within=5e-4),
            "of the second": equal(1452.869, within=5e-4),
            "features": equal(5),
            "size (root mean square) of fresh rows of 512 features": equal(0.044, within=5e-4),
            "times √512": equal(1, within=5e-3),
            "of the positions": equal(0.707, within=5e-4),
        },
        first_feature,
        (Positions, Transformer.embed_source),
        (
            "claims/test_positions.py::test_positions_are_added_to_scaled_embeddings",
            "claims/test_positions.py::test_embeddings_are_scaled_so_that_positions_do_not_dominate",
        ),
        table=list_worked_sums,
    ),
    Row(
        43,
        "The worked example YOUR CAT IS A LOVELY CAT: one word at two places becomes two vectors.",
        "x = E_CAT + P_1 and E_CAT + P_5",
        {
            "first CAT": equal(1835.479, 11356.483, 11813.218, 13019.826, 11510.632, within=5e-4),
            "second CAT": equal(1452.869, 11179.240, 10105.789, 5292.638, 15409.093, within=5e-4),
            "features of both CATs that differ before positions are added": equal(0),
            "largest number of the notes' words, and of their positions": equal(9358.778, 9386.405),
            "largest number of sinusoids": equal(1, within=1e-6),
            "words, positions and sums that their 3821.102, on the row of dots, is in": equal(0),
            "of these sums, how many float32 rounds to another third decimal": equal(2),
        },
        features,
        (Positions,),
        ("claims/test_beside.py::test_both_cats_by_hand",),
        table=list_worked_sums,
        slip="The notes say that positions don't dominate, beside positions up to 9386.405 and words up to 9358.778; "
        "sinusoids are at most 1. Their 3821.102 stands where the other rows have dots, and is in no sum.",
    ),
    Row(
        50,
        "Thinking Machines: two words, one query. The scores are divided by 8, and z_1 goes on to the next sub-layer.",
        "z_1 = softmax(q_1 · k / √64) · v",
        {
            "q · k of both words": equal(112, 96),
            "the same / 8": equal(14, 12),
            "softmax": equal(0.880797, 0.119203, within=1e-6),
            "largest |z_1 - (0.880797 v_1 + 0.119203 v_2)|": below(1e-5),
            "what is left for Machines without the division": below(2e-7),
        },
        thinking_machines,
        (attention, attention_weights),
        ("claims/test_beside.py::test_another_scale_than_8_would_be_seen",),
        table=list_thinking_machines,
    ),
)
