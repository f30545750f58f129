"""Embeddings: a row of a table, the same in every sentence; what the encoder makes of it is not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.nn import Transformer

from .drawing import canvas, draw_key, heat_map
from .measure import largest
from .network import tiny
from .row import Found, Row, above, equal

SENTENCES = ("she sat on the river bank", "he owes the city bank")


def one_hot() -> Found:
    model = tiny(scale_embeddings=False)
    ids = mx.array([[5, 0, 23, 5]])
    product = (ids[..., None] == mx.arange(24)).astype(mx.float32) @ model.embedding.weight
    first, second = np.eye(24)[[5, 23]]
    return {
        "largest |one-hot @ W - lookup|": largest(model.embed_source(ids) - product),
        "cosine and distance of any two one-hot words": [first @ second, np.linalg.norm(first - second)],
    }


def looked_up() -> tuple[list[int], np.ndarray, np.ndarray]:
    """Three ids, their one-hot rows (3, 24), and the table (24, 32)."""
    ids = [5, 0, 23]
    return ids, np.eye(24)[ids], np.array(tiny(scale_embeddings=False).embedding.weight)


def draw_one_hot() -> Any:
    """One-hot rows times the table are the rows that they pick."""
    ids, rows, table = looked_up()
    figure, panels = canvas(3, width=9.4, height=3.4)
    drawn = {"one-hot rows": rows, "x the table W": table, "= rows of W": rows @ table}
    for axes, (title, values) in zip(panels, drawn.items(), strict=True):
        heat_map(axes, values, signed=True)
        named = ids if len(values) == len(ids) else range(len(values))
        axes.set_yticks(range(len(values)), [f"{row}" for row in named], fontsize=6.5)
        axes.set(title=title, xticks=[], xlabel="ids" if values is rows else "features")
    draw_key(panels[2])
    return figure


def contextual() -> Found:
    embedded, encoded = (float(np.abs(rows[0] - rows[1]).max()) for rows in bank())
    return {
        "largest change of the embedding of bank between two sentences": embedded,
        "of the encoder's output": encoded,
    }


def bank() -> tuple[np.ndarray, np.ndarray]:
    """The last word of both sentences, at the same place, before the encoder and after it: (2, 32) each."""
    vocabulary = sorted({word for text in SENTENCES for word in text.split()})
    rows = [[3 + vocabulary.index(word) for word in text.split()[-5:]] for text in SENTENCES]
    seen: dict[str, mx.array] = {}
    memory = tiny(architecture="encoder", decoder_layers=0).encode(rows, tap=seen.__setitem__)
    return np.array(seen["encoder.embedding"][:, -1]), np.array(memory[:, -1])


def draw_contextual() -> Any:
    """The word bank in two sentences, before the encoder and after it."""
    figure, panels = canvas(2, height=2.0)
    for axes, rows, title in zip(panels, bank(), ("embedding + position", "encoder's output"), strict=True):
        heat_map(axes, rows, signed=True)
        axes.set(title=f"{title}: change {np.abs(rows[0] - rows[1]).max():.2g}", xticks=[], xlabel="features")
        axes.set_yticks([0, 1], ["river bank", "city bank"], fontsize=8)
        draw_key(axes)
    return figure


ROWS = (
    Row(
        1,
        "An embedding is a row of a table, which is what a one-hot vector times the table is.",
        "E_word = onehot(word) W",
        {
            "largest |one-hot @ W - lookup|": equal(0),
            "cosine and distance of any two one-hot words": equal(0, 1.414214, within=1e-6),
        },
        one_hot,
        (Transformer.embed_source,),
        ("claims/test_network.py::test_an_embedding_is_a_one_hot_product",),
        figure=draw_one_hot,
    ),
    Row(
        35,
        "A word's vector depends on its sentence: bank has one embedding, and as many outputs as sentences.",
        "E_bank is one row; Encoder(x)_bank is not",
        {
            "largest change of the embedding of bank between two sentences": equal(0),
            "of the encoder's output": above(0.1),
        },
        contextual,
        (Transformer.encode,),
        ("claims/test_beside.py::test_the_same_sentence_gives_the_same_vector",),
        figure=draw_contextual,
        slip="The notes say that an embedding captures contextual information. It is one row in every sentence; the "
        "encoder's output is what differs.",
    ),
)
