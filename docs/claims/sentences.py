"""The places that heads of the small translator, which ships with the page of `explain`, look at, and whether it needs
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.data.built_in import NOTES
from mlx_transformer.runtime.transformer import Transformer

from .drawing import canvas, curves, draw_key, heat_map, label_cells, write_cell
from .row import Found, Row, above, below, equal
from .trained import Trained, attention_maps, open_trained

SHIPPED = Path(__file__).parents[2] / "export/explain/models/sentences"
RIVER = "On the river bank"
WHY = {word: f"The animal didn't cross the street because it was too {word}" for word in ("tired", "wide")}
"""A sentence in which "it" is the animal, and one in which it is the street."""

Head = tuple[str, str, int, int]
"""Stack, sub-layer, layer and head, from 0."""


@cache
def translator() -> Trained:
    """Its file has 16 bits a number; what is computed of them, the page of `explain` computes in more."""
    trained = open_trained(SHIPPED, tuple(NOTES))
    trained.model.set_dtype(mx.float32)
    return trained


def read(trained: Trained, text: str) -> tuple[list[int], list[int], list[int]]:
    """Ids of the text, of what the decoder reads of its right translation, and of what it writes."""
    written = trained.tokenizer.encode(NOTES[text])
    return trained.tokenizer.encode(text), [trained.tokenizer.bos_id, *written[:-1]], written


def looks(trained: Trained, text: str, asking: str, seen: str) -> np.ndarray:
    """Return the weight that each head of the encoder gives from one word to another, (layers, heads)."""
    source, target, _ = read(trained, text)
    words = trained.words(source)
    return attention_maps(trained.model, source, target)["encoder"][:, :, words.index(asking), words.index(seen)]


def log_p(model: Transformer, trained: Trained, text: str) -> float:
    """Of the right translation, read at once."""
    source, target, written = read(trained, text)
    logits = np.array(model([source], [target]), dtype=np.float64)[0]
    rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(rows[np.arange(len(written)), written].sum())


def without(model: Transformer, heads: Sequence[Head]) -> Transformer:
    """The same model with heads that hand over zeros: their columns of W^O are 0."""
    weights, width = dict(model.weights()), model.config.d_k
    for stack, part, layer, head in heads:
        name = f"{stack}.layers.{layer}.{part}.output_proj.weight"
        matrix = np.array(weights[name])
        matrix[:, head * width : (head + 1) * width] = 0
        weights[name] = matrix
    return Transformer.from_weights(model.config, weights)


class AtSomeRows(nn.Module):
    """W^O of an attention, one head of which hands over zeros at some rows of the sentence."""

    def __init__(self, output_proj: nn.Linear, head: int, width: int, rows: Sequence[int]):
        super().__init__()
        self.output_proj, self.columns, self.rows = output_proj, slice(head * width, (head + 1) * width), rows

    def __call__(self, x: mx.array) -> mx.array:
        kept = np.ones(x.shape[1:], np.float32)  # (L, H d_v)
        kept[list(self.rows), self.columns] = 0
        return self.output_proj(x * mx.array(kept))


def without_at(model: Transformer, heads: Sequence[Head], rows: Sequence[int]) -> Transformer:
    """The same model with heads of the encoder that hand over zeros at these rows alone."""
    less = Transformer.from_weights(model.config, model.weights())
    for _, part, layer, head in heads:
        attention = getattr(less.encoder.layers[layer], part)
        attention.output_proj = AtSomeRows(attention.output_proj, head, model.config.d_v, rows)
    return less


def words_changed(trained: Trained, model: Transformer, text: str) -> int:
    """How many words of the notes' translation another model writes otherwise."""
    [ids] = model.generate([trained.tokenizer.encode(text)])
    made, wanted = trained.tokenizer.decode(ids).split(), NOTES[text].split()
    return sum(a != b for a, b in zip(made, wanted, strict=True))


def rows(trained: Trained, text: str, where: str) -> list[int]:
    """Rows of the encoder. where: "all", "it", or all "others"."""
    words = trained.words(trained.tokenizer.encode(text))
    return [row for row, word in enumerate(words) if where == "all" or (word == "it") == (where == "it")]


def lost(trained: Trained, heads: Sequence[Head]) -> float:
    """How far log p of the right translation falls without these heads, in the worse of the two sentences."""
    less = without(trained.model, heads)
    return max(log_p(trained.model, trained, text) - log_p(less, trained, text) for text in WHY.values())


def parts(trained: Trained, stack: str, part: str) -> list[Head]:
    config = trained.model.config
    layers = config.encoder_layers if stack == "encoder" else config.decoder_layers
    return [(stack, part, layer, head) for layer in range(layers) for head in range(config.heads)]


def right(trained: Trained) -> int:
    """How many of the notes' sentences the model translates as the notes' list does."""
    made = [trained.tokenizer.decode(target[1:]).strip() for _, target in trained.pairs]
    return sum(found == NOTES[text] for found, text in zip(made, trained.sentences, strict=True))


PAIRS = (("the", "bank"), ("the", "river"), ("bank", "river"))
SUBLAYERS = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross-attention": ("decoder", "cross_attention"),
}


def looking() -> Found:
    trained = translator()
    tired, wide = (looks(trained, text, "it", "street") for text in WHY.values())
    first, second = (("encoder", "self_attention", layer, int(tired[layer].argmax())) for layer in (0, 1))
    crossing = parts(trained, "decoder", "cross_attention")

    def changed(where: str) -> list[int]:
        less = {text: without_at(trained.model, [first, second], rows(trained, text, where)) for text in WHY.values()}
        return [words_changed(trained, model, text) for text, model in less.items()]

    return {
        "On the river bank, most of any head: the to bank, the to river, bank to river": [
            looks(trained, RIVER, *pair).max() for pair in PAIRS
        ],
        "too wide, most of any head: it to street": wide.max(),
        "too tired, the same": tired.max(),
        "too tired, most of any head: it to animal": looks(trained, WHY["tired"], "it", "animal").max(),
        "too tired, a head of layer 2: it to street": tired[1].max(),
        "that head off: log p of the translation falls by": lost(trained, [second]),
        "that of layer 1 off, and both off": [lost(trained, [first]), lost(trained, [first, second])],
        "tired and wide translated right without either, and without both": [
            right(replace(trained, model=without(trained.model, off), sentences=tuple(WHY.values())))
            for off in ([first], [second], [first, second])
        ],
        "without both, words that change, tired and wide: off at every row": changed("all"),
        "off at the row of it alone": changed("it"),
        "off at every other row": changed("others"),
        "the worst head of cross-attention off": max(lost(trained, [head]) for head in crossing),
        "sentences of the notes translated right": right(trained),
    }


def draw_looking() -> Any:
    """The heads that look as the notes say; where all heads look from "it"; and what each head's absence costs."""
    trained = translator()
    figure, panels = canvas(3, 2, width=9.4, height=6.2)
    source, target, _ = read(trained, RIVER)
    maps = attention_maps(trained.model, source, target)["encoder"]
    for axes, (asking, seen) in zip(panels, PAIRS, strict=False):
        layer, head = np.argwhere((found := looks(trained, RIVER, asking, seen)) == found.max())[0]
        heat_map(axes, maps[layer, head], most=1.0)
        words = trained.words(source)
        label_cells(axes, words, words)
        write_cell(axes, words.index(asking), words.index(seen), f"{found.max():.2f}")
        axes.set_title(f"{asking} → {seen}: layer {layer + 1}, head {head + 1}", fontsize=8.5)
    draw_key(panels[2])
    for axes, (word, text) in zip(panels[3:], WHY.items(), strict=False):
        source, target, _ = read(trained, text)
        words = trained.words(source)
        rows = attention_maps(trained.model, source, target)["encoder"][:, :, words.index("it")]
        heat_map(axes, rows.reshape(-1, len(words)), most=1.0)
        heads = [f"layer {layer + 1}, head {head + 1}" for layer, head in np.ndindex(*rows.shape[:2])]
        label_cells(axes, heads, words, size=7)
        axes.set_title(f"too {word}: where “it” looks", fontsize=8.5)
    falls = {name: [lost(trained, [head]) for head in parts(trained, *part)] for name, part in SUBLAYERS.items()}
    curves(panels[5], range(1, 1 + len(falls["encoder"])), falls, "upper left", 7.5)
    panels[5].set(xlabel="layer and head that is off")
    names = [f"{layer + 1}.{head + 1}" for _, _, layer, head in parts(trained, *SUBLAYERS["encoder"])]
    panels[5].set_xticks(range(1, 1 + len(names)), names)
    panels[5].set_title("log p of the translation falls by", fontsize=8.5)
    return figure


ROWS = (
    Row(
        56,
        "Looking isn't always using: heads give it to the street, also where it is the animal; only sie needs that.",
        "w_h(it, j), every head of the encoder; the translation with head_h = 0 before W^O, at all rows or at some",
        {
            "On the river bank, most of any head: the to bank, the to river, bank to river": above(0.9, 0.9, 0.9),
            "too wide, most of any head: it to street": above(0.9),
            "too tired, the same": above(0.9),
            "too tired, most of any head: it to animal": below(0.2),
            "too tired, a head of layer 2: it to street": above(0.8),
            "that head off: log p of the translation falls by": below(0.2),
            "that of layer 1 off, and both off": above(0.5, 4),
            "tired and wide translated right without either, and without both": equal(2, 2, 0),
            "without both, words that change, tired and wide: off at every row": equal(1, 2),
            "off at the row of it alone": equal(0, 1),
            "off at every other row": equal(0, 1),
            "the worst head of cross-attention off": above(2),
            "sentences of the notes translated right": equal(15),
        },
        looking,
        (without, without_at, attention_maps),
        (
            "claims/test_sentences.py::test_a_head_that_is_off_hands_over_nothing",
            "claims/test_sentences.py::test_two_heads_off_at_every_row_spoil_the_article_at_it_the_pronoun",
            "claims/test_sentences.py::test_fresh_weights_show_none_of_it",
        ),
        figure=draw_looking,
        slip="The notes say that it looks at animal, and that this is how the model knows. In the model that ships no "
        "head of the encoder does; two look at the street in both sentences, and both are translated right without one "
        "of these heads. With both off at every row the article of Straße goes wrong in both, den for die. "
        "With both off at the row of it alone, es for the animal is right as before, and sie for the "
        "street becomes es: what it looks at is needed for sie, and not for es.",
    ),
)
