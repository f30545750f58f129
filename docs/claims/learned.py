"""The results of small trainings: lengths that were not trained on, batch norm in use, and what a second layer adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.runtime.transformer import Transformer

from .drawing import bars, canvas, curves
from .measure import number
from .network import END, FIRST, START, WORDS, Batch, copied, copying_loss, tiny, trained
from .row import RECORDED, Found, Row, above, below

TRAINED, LONGER = (3, 8), (8, 9, 10, 12, 16)
"""Lengths that copying is trained on, and those that it is tried on."""
POSITIONS = ("sinusoidal", "rotary", "learned")

KEYS, PAIRS = 8, 6
"""Keys, values from as many others, and pairs of them before a question."""


def last_loss(model: Transformer, loss: Callable[..., mx.array], batch: Callable[[int], Batch], steps: int) -> float:
    """Train, and return the mean loss of the last 20 steps."""
    model.train()
    losses = trained(model, loss, batch, steps)
    model.eval()
    return float(np.mean(losses[-20:]))


@lru_cache
def exact_by_length(positions: str, steps: int = 1500) -> tuple[float, ...]:
    """Share of 100 sentences that a model which copied 3 to 8 words copies exactly, at each of `LONGER`."""
    model = tiny(dropout=0.0, positions=positions, max_positions=32)
    mx.random.seed(1)
    last_loss(model, copying_loss, copied(*TRAINED), steps)
    shares = []
    for length in LONGER:
        rows = np.array(mx.random.randint(FIRST, FIRST + WORDS, (100, length))).tolist()
        shares.append(float(np.mean([a == b for a, b in zip(model.generate(rows), rows, strict=True)])))
    return tuple(shares)


def unseen_lengths() -> Found:
    shares = {kind: exact_by_length(kind) for kind in POSITIONS}
    eight, twelve, sixteen = ([shares[kind][LONGER.index(n)] for kind in POSITIONS] for n in (8, 12, 16))
    found: dict[str, Any] = {
        f"copied exactly, 8, 9, 10, 12 and 16 words, {kind}": each for kind, each in shares.items()
    }
    found |= {"8 words, sinusoidal": eight[0], "8 words, rotary and learned": eight[1:]}
    return found | {"12 words, all three": twelve, "16 words, all three": sixteen}


def of_all_lengths(i: int) -> Batch:
    """Batches of copying in which each sentence has its own length, 2 to 8 words, and is padded to the longest."""
    lengths, places = mx.random.randint(2, 9, (32, 1)), mx.arange(10)
    words = mx.where(places[:8] < lengths, mx.random.randint(FIRST, FIRST + WORDS, (32, 8)), 0)
    target = mx.pad(words, [(0, 0), (1, 1)])
    return words, mx.where(places == 0, START, mx.where(places == lengths + 1, END, target))


def unpadded_loss(model: Transformer, source: mx.array, target: mx.array) -> mx.array:
    """Mean over what is no padding."""
    losses = nn.losses.cross_entropy(model(source, target[:, :-1], source != 0), target[:, 1:])
    return mx.sum(losses * (target[:, 1:] != 0)) / mx.sum(target[:, 1:] != 0)


@lru_cache
def losses_by_norm(batch_norm: bool, seed: int, one_length: bool = True, steps: int = 400) -> tuple[float, float]:
    """Loss of copying 2 to 8 words, in training and in use. one_length: all sentences of a batch have the same."""
    model = tiny(seed, dropout=0.0)
    if batch_norm:
        for layer in (*model.encoder.layers, *model.decoder.layers):
            for name in [name for name in layer if name.endswith("_norm")]:
                setattr(layer, name, nn.BatchNorm(model.config.d_model))
    mx.random.seed(seed)
    batch, loss = (copied(2, 8), copying_loss) if one_length else (of_all_lengths, unpadded_loss)
    in_training = last_loss(model, loss, batch, steps)
    return in_training, float(np.mean([number(loss(model, *batch(i))) for i in range(14)]))


def batch_norm_in_use() -> Found:
    layer, batch = (losses_by_norm(of_batch, 0) for of_batch in (False, True))
    padded = losses_by_norm(True, 0, one_length=False)
    return {
        "loss in training, layer norm": layer[0],
        "the same, batch norm": batch[0],
        "loss in use, batch norm / layer norm": batch[1] / layer[1],
        "loss in training, batch norm / layer norm": batch[0] / layer[0],
        "batch norm, loss in use / in training": batch[1] / batch[0],
        "the same, batches padded to one length": padded[1] / padded[0],
    }


def draw_training_and_use() -> Any:
    """Losses of both norms, in training and in use, by how batches are made."""
    figure, panels = canvas(2)
    for axes, one_length in zip(panels, (True, False), strict=True):
        found = {name: losses_by_norm(name == "batch norm", 0, one_length) for name in ("layer norm", "batch norm")}
        bars(axes, (0, 1), found, "upper left")
        axes.set_xticks((0, 1), ("in training", "in use"))
        axes.set(title="loss, a batch of one length" if one_length else "loss, batches padded to one length")
    panels[1].set_ylim(panels[0].get_ylim())
    return figure


def asked(i: int) -> Batch:
    """Pairs of a key and a value, then one of the keys: ids (64, 2 PAIRS + 1), and the value of that key (64,)."""
    keys = mx.argsort(mx.random.uniform(shape=(64, KEYS)), axis=1)[:, :PAIRS] + FIRST
    values = mx.random.randint(FIRST + KEYS, FIRST + 2 * KEYS, (64, PAIRS))
    chosen = mx.random.randint(0, PAIRS, (64, 1))
    pairs = mx.stack([keys, values], axis=2).reshape(64, -1)
    question = mx.take_along_axis(keys, chosen, axis=1)
    return mx.concatenate([pairs, question], axis=1), mx.take_along_axis(values, chosen, axis=1)[:, 0]


def answer_loss(model: Transformer, ids: mx.array, value: mx.array) -> mx.array:
    return mx.mean(nn.losses.cross_entropy(model(ids)[:, -1], value))


@lru_cache
def answered(layers: int, steps: int = 1000) -> float:
    """Share of questions that a decoder of so many layers answers."""
    shape: dict[str, Any] = dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output")
    model = tiny(0, **shape, decoder_layers=layers, dropout=0.0)
    mx.random.seed(2)
    last_loss(model, answer_loss, asked, steps)
    ids, value = asked(0)
    return number(mx.mean(mx.argmax(model(ids)[:, -1], axis=-1) == value))


def depth() -> Found:
    return {f"questions answered, layers: {layers}": answered(layers) for layers in (1, 2)}


def draw_depth() -> Any:
    figure, (axes,) = canvas(width=4)
    shares = [answered(layers) for layers in (1, 2)]
    bars(axes, (1, 2), {"value of a key seen before": shares}, "upper left")
    for layers, share in enumerate(shares, 1):
        axes.text(layers, share, f"{share:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set(title="questions answered", xlabel="layers", ylim=(0, 1.3))
    axes.set_xticks((1, 2), ("1", "2"))
    return figure


def draw_unseen_lengths() -> Any:
    figure, (axes,) = canvas(width=6)
    curves(axes, LONGER, {kind: exact_by_length(kind) for kind in POSITIONS}, "upper right")
    axes.set(title="copied exactly, trained on 3 to 8 words", xlabel="words")
    return figure


ROWS = (
    Row(
        45,
        "Sinusoids have rows for every length. That a model which learned short sentences uses them does not follow.",
        "exact copies of n words, after training on 3 to 8",
        {
            "copied exactly, 8, 9, 10, 12 and 16 words, sinusoidal": RECORDED,
            "copied exactly, 8, 9, 10, 12 and 16 words, rotary": RECORDED,
            "copied exactly, 8, 9, 10, 12 and 16 words, learned": RECORDED,
            "8 words, sinusoidal": above(0.75),
            "8 words, rotary and learned": above(0.2, 0.2),
            "12 words, all three": below(0.1, 0.1, 0.1),
            "16 words, all three": below(0.1, 0.1, 0.1),
        },
        unseen_lengths,
        (exact_by_length,),
        ("claims/test_learned.py::test_a_copy_of_every_length_would_be_seen",),
        figure=draw_unseen_lengths,
        slow=True,
        slip="The notes say that sinusoids scale to unseen lengths without any effort. The table does; a model that "
        "copies 8 words does not copy 12 with sinusoids, nor with rotary or learned positions.",
    ),
    Row(
        49,
        "Batch norm is less effective for text: its running statistics fit no batch. Padding to one length hides it.",
        "loss of copying 2 to 8 words, batches of one length each",
        {
            "loss in training, layer norm": RECORDED,
            "the same, batch norm": RECORDED,
            "loss in training, batch norm / layer norm": below(1),
            "loss in use, batch norm / layer norm": above(3),
            "batch norm, loss in use / in training": above(5),
            "the same, batches padded to one length": below(4),
        },
        batch_norm_in_use,
        (losses_by_norm,),
        ("claims/test_learned.py::test_batch_norm_fails_in_use_for_every_seed",),
        figure=draw_training_and_use,
        slow=True,
        slip="The notes say that batch norm is usually less effective, as lengths vary. It is where a batch is of one "
        "length, and not where batches are padded.",
    ),
    Row(
        54,
        "Layers add up to what none of them can do alone: find a key again, and give the value behind it.",
        "k_1 v_1 ... k_6 v_6 k_i -> v_i",
        {"questions answered, layers: 1": below(0.6), "questions answered, layers: 2": above(0.95)},
        depth,
        (answered,),
        ("claims/test_learned.py::test_the_answer_is_the_value_behind_the_key",),
        figure=draw_depth,
        slow=True,
    ),
)
