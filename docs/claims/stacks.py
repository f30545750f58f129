"""Stacks of layers, the classifier on top of them, and decoding."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.greedy import Greedy
from mlx_transformer.nn.layers import Decoder, Encoder
from mlx_transformer.runtime.transformer import Transformer

from .drawing import SERIES, SOFT, bars, canvas, draw_key, heat_map, label_cells
from .measure import how_many, largest
from .network import copying, tiny
from .row import Found, Row, above, below, equal
from .trained import attention_maps


def stacks() -> Found:
    first, last = copying_losses()
    return {
        "change of a result by padding": padding_change(),
        "loss of a 2+2 stack that copies five words of nine, first step": first,
        "after 150 steps": last,
        "after 150 steps, cross-attention silent": copying_losses(silent=True)[-1],
    }


def padding_change() -> float:
    model = tiny()
    source, target = [5, 6, 7, 8, 2], [1, 9, 10, 11]
    alone = model([source], [target])
    mask = [[True] * 5 + [False] * 3, [True] * 8]
    padded = model([[*source, 0, 0, 0], [7] * 8], [[*target, 0, 0], [1] * 6], mask)
    return largest(padded[:1, :4] - alone)


def copying_losses(silent: bool = False) -> tuple[float, float]:
    """The first and the last loss of 150 steps. silent: cross-attention hands over zeros, and can't learn otherwise."""
    losses, _ = learned_to_copy(silent)
    return losses[0], losses[-1]


@lru_cache
def learned_to_copy(silent: bool = False) -> tuple[list[float], Transformer]:
    """Train a 2+2 stack; returns the loss of each step, and the model."""
    model = tiny(dropout=0.0)
    for layer in model.decoder.layers if silent else ():
        output = layer.cross_attention.output_proj
        output.weight = mx.zeros_like(output.weight)
        output.freeze()
    return copying(model, 150), model


WORDS = [5, 8, 3, 10, 6]


def training_shown() -> dict[str, Any]:
    """What the page of `explain` shows of this training: the loss of each step, and the head of cross-attention that
    looks most at the word to copy, on `WORDS`, before and after."""
    losses, model = learned_to_copy()
    after, before = (attention_maps(each, WORDS, [1, *WORDS])["cross"] for each in (model, tiny(dropout=0.0)))
    straight = after[:, :, : len(WORDS)].diagonal(axis1=2, axis2=3).mean(axis=2)  # (layers, heads)
    layer, head = (int(n) for n in np.unravel_index(straight.argmax(), straight.shape))
    maps = {name: np.round(maps[layer, head], 4).tolist() for name, maps in (("before", before), ("after", after))}
    return {"losses": [round(loss, 4) for loss in losses], "words": WORDS, "layer": layer, "head": head} | maps


SUBLAYERS = {
    "encoder": ("self-attention", "feed-forward"),
    "decoder": ("self-attention", "cross-attention", "feed-forward"),
}


def wiring(config: TransformerConfig) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]]]:
    """Boxes of a post-norm model by where they stand, the encoder's at x = 0 and the decoder's at x = 1, upwards; and
    the arrows from one box to another. Residual connections go from a sub-layer's input to its norm."""
    boxes, arrows = {}, []
    layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for column, (stack, parts) in enumerate(SUBLAYERS.items()):
        below = f"{stack}: embedding + position"
        boxes[below] = (float(column), 0.0)
        for layer, part in product(range(1, layers[stack] + 1), parts):
            box, norm = (f"{stack} {layer}: {name}" for name in (part, f"add, norm after {part}"))
            for name in (box, norm):
                boxes[name] = (float(column), boxes[below][1] + (1.0 if name == box else 2.0))
            arrows += [(below, box), (box, norm), (below, norm)]
            below = norm
        if stack == "encoder":
            memory = below
    crossing = [box for box in boxes if box.endswith(": cross-attention")]
    boxes["decoder: linear, softmax"] = (1.0, boxes[below][1] + 1.0)
    return boxes, [*arrows, *((memory, box) for box in crossing), (below, "decoder: linear, softmax")]


def draw_two_plus_two() -> Any:
    """Every box and every arrow of the model that learns to copy."""
    figure, (axes,) = canvas(width=6.4, height=5.4)
    boxes, arrows = wiring(tiny().config)
    half, tall, aside = 0.36, 0.32, 0.12
    for name, (x, y) in boxes.items():
        axes.text(x, y, name.partition(": ")[2].partition(" after ")[0], ha="center", va="center", fontsize=7.5)
        edge = [(x - half, y - tall), (x + half, y - tall), (x + half, y + tall), (x - half, y + tall)]
        axes.plot(*zip(*edge, edge[0], strict=True), color=SOFT, linewidth=0.8)
    for start, end in arrows:
        (x, y), (across, up) = boxes[start], boxes[end]
        if x != across:
            path, mark, colour = [(x + half, y + aside), (0.53, y + aside), (0.53, up), (across - half, up)], ">", 2
        elif up - y > 1:
            sides = (x + half, x + half + 0.08, x + half + 0.08, x + half)
            path = list(zip(sides, (y + aside, y + aside, up - aside, up - aside), strict=True))
            mark, colour = "<", 1
        else:
            path, mark, colour = [(x, y + tall), (x, up - tall)], "^", 0
        axes.plot(*zip(*path, strict=True), color=SERIES[colour], linewidth=1, label=f"{start} → {end}")
        axes.plot(*path[-1], mark, color=SERIES[colour], markersize=4)
    axes.set(yticks=[], xlim=(-0.4, 1.5), title="past a sub-layer: orange; the memory: violet")
    axes.set_xticks([0, 1], list(SUBLAYERS))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def classified() -> tuple[Transformer, mx.array]:
    """A model, and its logits (1, 3, 24) of three positions."""
    model = tiny()
    return model, model([[5, 6, 7, 2]], [[1, 9, 10]])


def draw_probabilities() -> Any:
    """Draw what the softmax makes of each position's logits: shares of 1, in the logits' order."""
    _, logits = classified()
    figure, (axes,) = canvas(width=7.2, height=2.6)
    shares = np.array(mx.softmax(logits, axis=-1)[0])
    bars(axes, range(logits.shape[-1]), {f"position {n}": row for n, row in enumerate(shares)})
    axes.set(title="probability of each word of the vocabulary", xlabel="id", ylim=(0, None))
    return figure


def classifier() -> Found:
    model, logits = classified()
    probabilities = mx.softmax(logits, axis=-1)
    moved = how_many(mx.argmax(probabilities, -1) != mx.argmax(logits, -1))
    return {
        "sums of the probabilities of 24 words": probabilities.sum(-1)[0].tolist(),
        "positions where the most probable word is not that of the largest logit": moved,
        "id of the end token": model.config.eos_id,
    }


SOURCES = ((5, 6, 7, 8, 2), (9, 10, 11, 12, 2))


def stepped() -> tuple[mx.array, mx.array, mx.array]:
    """Greedy steps of two sentences with a cache: ids (2, 10) from the start token on, logits (2, 9, 24), and those of
    the teacher-forced pass over what was chosen."""
    model = tiny()
    memory = model.encode([list(source) for source in SOURCES])
    cache = model.start(memory)
    tokens, found = mx.array([[1], [1]]), []
    for _ in range(9):
        logits = model.step(tokens[:, -1:], cache)
        found.append(logits)
        tokens = mx.concatenate([tokens, mx.argmax(logits, axis=-1)], axis=1)
    return tokens, mx.concatenate(found, 1), model.decode(tokens[:, :-1], memory)


def draw_word_by_word() -> Any:
    """Each step's probabilities, and the word that is chosen and read next."""
    tokens, logits, _ = stepped()
    figure, panels = canvas(2, width=8.4, height=3.2)
    shares = np.array(mx.softmax(logits, axis=-1))
    for axes, source, chosen, rows in zip(panels, SOURCES, np.array(tokens), shares, strict=True):
        heat_map(axes, rows, most=1.0)
        label_cells(axes, [f"has read {id}" for id in chosen[:-1]], [f"{id}" for id in range(24)], size=6.5)
        for step, id in enumerate(chosen[1:]):
            axes.text(id, step, f"{id}", ha="center", va="center", fontsize=7)
        axes.set(title=f"source {' '.join(map(str, source))}", xlabel="id")
    draw_key(panels[1])
    return figure


def greedy() -> Found:
    """Steps with a cache beside the teacher-forced pass over what they chose."""
    tokens, logits, forced = stepped()
    return {
        "largest |logit of a cached step - teacher-forced|": largest(logits - forced),
        "words that both choose differently, of 18": how_many(mx.argmax(forced, -1) != tokens[:, 1:]),
    }


ROWS = (
    Row(
        26,
        "N layers of encoder and decoder, the decoder looking at the encoder's output. They train; padding is nothing.",
        "logits = Decoder(target, Encoder(source))",
        {
            "change of a result by padding": below(2e-5),
            "loss of a 2+2 stack that copies five words of nine, first step": above(2.2),
            "after 150 steps": below(0.3),
            "after 150 steps, cross-attention silent": above(1),
        },
        stacks,
        (Encoder, Decoder),
        (
            "claims/test_network.py::test_padding_never_changes_a_result",
            "claims/test_network.py::test_a_two_plus_two_stack_trains",
        ),
        figure=draw_two_plus_two,
    ),
    Row(
        27,
        "A linear map and a softmax give each word of the vocabulary a probability.",
        "p = softmax(h W^T)",
        {
            "sums of the probabilities of 24 words": equal(1, 1, 1, within=1e-6),
            "positions where the most probable word is not that of the largest logit": equal(0),
            "id of the end token": equal(2),
        },
        classifier,
        (Transformer.logits,),
        ("claims/test_network.py::test_the_classifier_gives_word_probabilities",),
        figure=draw_probabilities,
        slip="The notes call the last class the end of the sentence, and let the classifier read the feed-forward net. "
        "The end is 2 of 24 here, and a residual and a norm stand between the two.",
    ),
    Row(
        28,
        "Greedy decoding, a word a step from the start token to the end token, as the teacher-forced pass has it.",
        "y_t = argmax p(y ∣ y_(<t), x)",
        {
            "largest |logit of a cached step - teacher-forced|": below(2e-5),
            "words that both choose differently, of 18": equal(0),
        },
        greedy,
        (Transformer.step, Greedy),
        (
            "claims/test_network.py::test_greedy_decoding_step_by_step",
            "claims/test_network.py::test_greedy_generation_runs_from_the_start_to_the_end_token",
        ),
        figure=draw_word_by_word,
    ),
)
