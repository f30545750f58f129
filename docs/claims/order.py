"""Attention is blind to the order of words; positions tell it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import Attention
from mlx_transformer.nn.positions import bucket_table, rotate

from .drawing import Table
from .measure import largest
from .network import all_scores, encoder, head_weights, ids_of
from .row import Found, Row, above, below

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

IN_FRONT = "as far as known"
SHIFTED = "my fried chicken was very good"
"""A sentence, and four words that are put in front of it."""

RELATIVE = ("rotary", "relative")
ABSOLUTE = ("sinusoidal", "sinusoidal_concat", "learned")


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


def moved() -> Found:
    """Return the change that four words in front make for those behind them, by kind of positions."""
    return {
        "change of a score's distance from the first key's, rotary and relative": [score_change(k) for k in RELATIVE],
        "the same, sinusoids of the paper and of tensor2tensor, learned": [score_change(k) for k in ABSOLUTE],
        "spread of one query's scores of six times the same word, rotary and relative": [
            place_seen(k) for k in RELATIVE
        ],
    }


def place_seen(positions: str) -> float:
    """How far the scores of the first of six equal words are from each other: 0 for a network that knows no order."""
    scores = all_scores([5] * 6, positions)[:, 0]
    return float((scores.max(axis=-1) - scores.min(axis=-1)).max())


def score_change(positions: str) -> float:
    """Largest change, over all heads, of how far the scores of one query are from each other: of what the softmax
    sees, as it keeps its result where all scores of a query move alike."""
    alone, behind = ids_of(SHIFTED.split(), [*IN_FRONT.split(), *SHIFTED.split()])
    differences = []
    for ids in (alone, behind):
        scores = all_scores(ids, positions)[:, -len(alone) :, -len(alone) :]
        differences.append(scores - scores[:, :, :1])
    return float(np.abs(differences[1] - differences[0]).max())


def list_moved() -> Table:
    rows = tuple((kind, f"{score_change(kind):.2g}") for kind in (*RELATIVE, *ABSOLUTE))
    return Table(("positions", "change of the score differences by four words in front"), rows)


def list_lion_kills_deer() -> Table:
    changes = word_changes("lion kills deer", "deer kills lion")
    rows = [(word, f"{each['none']:.1e}", f"{each['sinusoidal']:.3f}") for word, each in changes.items()]
    return Table(("word", "change of its output, without positions", "with positions"), tuple(rows))


def list_other_orders() -> Table:
    rows = []
    for name, pair in ORDERS.items():
        each = reordered(*pair)
        rows.append((name, f"{each['none']:.1e}", f"{each['sinusoidal']:.3f}"))
    return Table(("both orders", "change of a weight, without positions", "with positions"), tuple(rows))


ROWS = (
    Row(
        19,
        "Attention is blind to order: words in another order give the same outputs in that order.",
        "Attn(P x) = P Attn(x) for every permutation P",
        {
            "largest |Attn(P x) - P Attn(x)|": below(1e-6),
            "largest |Attn(P x) - Attn(x)|": above(0.1),
            "lion, kills, deer: change of a word's output, without positions": below(1e-5, 1e-5, 1e-5),
            "the same with positions": above(0.1, 0.1, 0.1),
        },
        order_blind,
        (Attention,),
        (
            "claims/test_attention.py::test_attention_alone_is_blind_to_order",
            "claims/test_attention.py::test_lion_kills_deer_needs_positions",
        ),
        table=list_lion_kills_deer,
        slip="The notes say invariant: then Attn(P x) would be Attn(x). The word is equivariant: outputs move along "
        "with inputs. And words aren't treated independently: every output depends on every input.",
    ),
    Row(
        44,
        "The other sentences: in another order the same weights come out, unless positions say otherwise.",
        "W(P x) = P W(x) P^T without positions",
        {
            "largest change of a weight between both orders, without positions": below(*[1e-6] * 4),
            "the same with positions": above(*[0.1] * 4),
        },
        other_orders,
        (Attention.weights,),
        ("claims/test_beside.py::test_words_that_come_twice_are_matched",),
        table=list_other_orders,
    ),
    Row(
        47,
        "Relative positions: what words are to each other stays when others are put in front of them.",
        "score(i + 4, j + 4) - score(i + 4, k + 4) = score(i, j) - score(i, k)",
        {
            "change of a score's distance from the first key's, rotary and relative": below(1e-4, 1e-4),
            "the same, sinusoids of the paper and of tensor2tensor, learned": above(0.1, 0.1, 0.1),
            "spread of one query's scores of six times the same word, rotary and relative": above(0.01, 0.01),
        },
        moved,
        (rotate, bucket_table),
        ("claims/test_beside.py::test_words_in_front_that_change_nothing_would_be_seen",),
        table=list_moved,
        slip="The notes say that relative positions matter more, and show sinusoids. Untrained heads react to the "
        "place itself; that an offset is a rotation only lets them learn not to. In their sentence good follows very, "
        "not looks.",
    ),
)
