"""The claims about learning, as a trained model shows them. Nothing here is asserted: it is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import SINUSOIDS, TransformerConfig
from mlx_transformer.core.positions import sinusoids
from mlx_transformer.nn.attention import Attention, attention_weights
from mlx_transformer.nn.parameters import dense_weights
from mlx_transformer.runtime.transformer import Transformer, load
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .drawing import INK, SERIES, canvas, draw_key, heat_map, label_cells, label_offsets
from .row import RECORDED, Found, Row

PHRASES = ("12 kilometers per hour", "February 28, 1992", "Apr 2 – Nov 18, 2021", "73 or 75", "in 9 days")

MONTHS = "January February March April May June July August September October November December".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

UNITS = "seconds minutes hours days weeks months years meters kilometers miles pounds dollars liters".split()

KINDS = {"months": MONTHS, "days of the week": DAYS, "units": UNITS, "digits": list("0123456789")}

POSITIONS = 32

Maps = dict[str, np.ndarray]
"""Attention weights (layers, heads, T, S): encoder, decoder, cross."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint of an encoder-decoder, and its tokenizer."""

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    sentences: tuple[str, ...] = PHRASES
    """The sentences in which attention is looked at; the figure shows the first."""

    @cached_property
    def fresh(self) -> Transformer:
        """The same network before training, to compare with."""
        mx.random.seed(0)
        model = Transformer(self.model.config)
        model.eval()
        return model

    @cached_property
    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Of each sentence the source ids, and the model's own greedy translation behind the start token."""
        sources = self.tokenizer.encode_batch(self.sentences)
        targets = self.model.generate(sources, max_new_tokens=24)
        return [(source, [self.tokenizer.bos_id, *target]) for source, target in zip(sources, targets, strict=True)]

    def words(self, ids: Sequence[int]) -> list[str]:
        """Each token as it is read."""
        special = {self.tokenizer.bos_id: "⟨s⟩", self.tokenizer.eos_id: "⟨/s⟩"}
        texts = [special.get(i) or self.tokenizer.decode([i]).strip() or "␣" for i in ids]
        return [text if text.isprintable() and "\ufffd" not in text else "·" for text in texts]


def open_trained(folder: Path, sentences: Sequence[str] = ()) -> Trained:
    """`sentences`: those to look at, `PHRASES` without any.

    `UserError` for what is no encoder-decoder with a tokenizer, and for a sentence that is empty or too long for it.
    """
    model, tokenizer = load(folder)
    if tokenizer is None or model.config.architecture != "encoder-decoder":
        raise UserError(
            f"{folder}: these rows look at an encoder-decoder with a tokenizer.json; give such a checkpoint"
        )
    if tokenizer.separate:
        raise UserError(f"{folder}: has a vocabulary for each language; these rows look at a joint one")
    for sentence in sentences:
        length = len(tokenizer.encode(sentence))
        if not sentence.strip() or length > model.config.max_positions:
            raise UserError(f"--sentence {sentence!r:.60}: {length} tokens, where 2 to {model.config.max_positions} go")
    return Trained(folder, model, tokenizer, tuple(sentences) or PHRASES)


def attention_maps(model: Transformer, source: list[int], target: list[int]) -> Maps:
    """Every head's weights for one pair, teacher-forced."""
    seen: list[mx.array] = []

    class Watched(Attention):
        def kernel(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, past: Any) -> mx.array:
            seen.append(attention_weights(q, k, mask, self.scale)[0])
            return super().kernel(q, k, v, mask, past)

    watched = Transformer(model.config, Watched)
    watched.eval()
    watched.load_weights([(name, mx.array(value)) for name, value in dense_weights(model).items()], strict=True)
    watched([source], [target])
    n, arrays = model.config.encoder_layers, [np.array(weights, dtype=np.float64) for weights in seen]
    return {"encoder": np.stack(arrays[:n]), "decoder": np.stack(arrays[n::2]), "cross": np.stack(arrays[n + 1 :: 2])}


def heads(trained: Trained) -> Found:
    """Mean entropy of each head's rows in bits, and how many heads of the encoder look at one place from everywhere."""
    found: dict[str, list[float]] = {}
    for pair in trained.pairs:
        for stack, maps in attention_maps(trained.model, *pair).items():
            entropy = -np.sum(maps * np.log2(np.maximum(maps, 1e-30)), axis=-1).mean(axis=-1)
            found.setdefault(stack, []).append(entropy.ravel())  # type: ignore
    names = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
    return {
        f"bits of spread of each head, {names[stack]}": np.mean(rows, axis=0).tolist() for stack, rows in found.items()
    }


def layers(trained: Trained) -> Found:
    """Half the sum of |difference| of two maps' rows: 0 if they look alike, 1 if nowhere at the same place."""
    results: dict[str, float] = {}
    for name, model in (("trained", trained.model), ("before training", trained.fresh)):
        found: dict[str, list[float]] = {"heads of a layer": [], "layers": []}
        for pair in trained.pairs:
            for kind, distance in _distances(attention_maps(model, *pair)["encoder"]):
                found[kind].append(distance)
        results |= {f"mean distance of {kind}, encoder, {name}": float(np.mean(v)) for kind, v in found.items() if v}
    return results


def _distances(maps: np.ndarray) -> Iterator[tuple[str, float]]:
    n_layers, n_heads = maps.shape[:2]
    places = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    for i, a in enumerate(places):
        for b in places[i + 1 :]:
            distance = float(np.abs(maps[a] - maps[b]).sum(axis=-1).mean() / 2)
            yield ("heads of a layer" if a[0] == b[0] else "layers"), distance


def known_words(trained: Trained) -> list[tuple[str, str, int]]:
    """(kind, word, id) of the words of `KINDS` that are one token, as they stand inside a text if both ways are."""
    found = []
    for kind, words in KINDS.items():
        for word in words:
            for text in (f" {word}", word):
                ids = trained.tokenizer.encode(text)[:-1]
                if len(ids) == 1:
                    found.append((kind, word, ids[0]))
                    break
    if len({kind for kind, _, _ in found}) < 2:
        raise UserError(f"{trained.folder}: its vocabulary has too few of the words that are compared (months, units)")
    return found


def vectors(trained: Trained) -> np.ndarray:
    """Embedding rows of `known_words`, of length 1: (words, D) float64."""
    model = trained.model
    rows = np.array(model.embed_source(mx.array([[i for _, _, i in known_words(trained)]]))[0], dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def similar(trained: Trained) -> Found:
    words, unit = known_words(trained), vectors(trained)
    kinds, cosines = np.array([kind for kind, _, _ in words]), unit @ unit.T
    same = kinds[:, None] == kinds[None, :]
    others = ~np.eye(len(words), dtype=bool)
    nearest = kinds[np.argmax(np.where(others, cosines, -np.inf), axis=1)]
    results: dict[str, float | list[float]] = {
        "words compared": len(words),
        "mean cosine, own kind": cosines[same & others].mean(),
        "mean cosine, other kinds": cosines[~same].mean(),
    }
    for kind in dict.fromkeys(kinds):
        results[f"nearest word is of its kind, {kind}, %"] = 100 * float(np.mean(nearest[kinds == kind] == kind))
    return results


def flattened(trained: Trained) -> np.ndarray:
    """The two directions in which the words differ most: (words, 2)."""
    centred = vectors(trained) - vectors(trained).mean(axis=0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    return u[:, :2] * s[:2]


def projected(trained: Trained) -> Found:
    results: dict[str, float | list[float]] = {}
    for name, model in (("trained", trained.model), ("before training", trained.fresh)):
        peaks = [peak(scores) for scores in position_scores(model)]
        results[f"offset where most rows peak, each head, {name}"] = [offset for offset, _ in peaks]
        results[f"rows that peak there or next to it, %, {name}"] = [100 * share for _, share in peaks]
    return results


def position_scores(model: Transformer, length: int = POSITIONS) -> np.ndarray:
    """PE W_Q W_K^T PE^T, scaled as the model does it, of the encoder's first layer, (H, length, length) float64."""
    c: TransformerConfig = model.config
    if c.positions not in SINUSOIDS:
        raise UserError(f"row 37 looks at sinusoids; this model has positions {c.positions!r}")
    pe = mx.array(sinusoids(length, c.d_model, c.positions))[None]
    attention = model.encoder.layers[0].self_attention
    keys, _ = attention.keys_values(pe)
    q, k = (np.array(x[0], dtype=np.float64) for x in (attention.queries(pe), keys))
    return q @ np.repeat(k, c.heads // c.key_value_heads, axis=0).swapaxes(-1, -2) * attention.scale


def peak(scores: np.ndarray) -> tuple[int, float]:
    """The offset from row to largest column that most rows have, and the share of rows within one of it."""
    offsets = np.argmax(scores, axis=1) - np.arange(len(scores))
    common = Counter(offsets.tolist()).most_common(1)[0][0]
    return common, float(np.mean(np.abs(offsets - common) <= 1))


def aligned(trained: Trained) -> Found:
    """Where the last layer of the decoder looks, mean of its heads, while a digit is written that stands once on each
    side: %, of those digits."""
    results: dict[str, float | list[float]] = {}
    for name, model in (("trained", trained.model), ("before training", trained.fresh)):
        for when, shift in (("written", 1), ("read", 0)):
            hits = [hit for pair in trained.pairs for hit in _digits_found(trained, model, pair, shift)]
            results["digits compared"] = len(hits)
            results[f"looks most at the digit that is {when}, %, {name}"] = 100 * float(np.mean(hits)) if hits else 0.0
    return results


def _digits_found(trained: Trained, model: Transformer, pair: tuple[list[int], list[int]], shift: int) -> list[bool]:
    """Of each digit that stands once on each side, whether the row `shift` before its place looks most at it."""
    source, target = pair
    weights = attention_maps(model, source, target)["cross"][-1].mean(axis=0)
    digits = {i for i in source if trained.words([i])[0].isdigit() and source.count(i) == 1 == target.count(i)}
    return [int(weights[target.index(i) - shift].argmax()) == source.index(i) for i in sorted(digits)]


def draw_alignment(trained: Trained) -> Any:
    """The first sentence: the decoder's last layer, mean of its heads; a row is the word that is written."""
    source, target = trained.pairs[0]
    figure, (axes,) = canvas(width=4.4, height=3.8)
    heat_map(axes, attention_maps(trained.model, source, target)["cross"][-1].mean(axis=0)[:-1], most=1.0)
    label_cells(axes, trained.words(target)[1:], trained.words(source), size=8)
    axes.set(title="where it looks while a word is written", xlabel="source", ylabel="written")
    return figure


NAMED = 6
"""Most heads of a stack that stand in one row, with their words beside them."""


def draw_head_grid(trained: Trained) -> Any:
    """Every head of every layer for the first sentence: encoder, decoder, and decoder to encoder."""
    source, target = trained.pairs[0]
    maps = attention_maps(trained.model, source, target)
    words = {"source": trained.words(source), "target": trained.words(target)}
    sides = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
    places = [(stack, *place) for stack, found in maps.items() for place in np.ndindex(*found.shape[:2])]
    small = all(found.shape[0] * found.shape[1] <= NAMED for found in maps.values())
    across = max(found.shape[0] * found.shape[1] if small else found.shape[1] for found in maps.values())
    down = -(-len(places) // across)
    size = 2.1 if small else 1.0
    figure, panels = canvas(across, down, width=size * across, height=size * 1.05 * down)
    for axes, (stack, layer, head) in zip(panels, places, strict=False):
        heat_map(axes, maps[stack][layer, head], most=1.0)
        axes.set_title(
            f"{stack} {layer + 1}, head {head + 1}" if small else f"{stack} {layer + 1}.{head + 1}", fontsize=8
        )
        if small:
            label_cells(axes, *(words[side] for side in sides[stack]), size=7)
        else:
            axes.set(xticks=[], yticks=[])
    draw_key(panels[len(places) - 1])
    for axes in panels[len(places) :]:
        axes.axis("off")
    return figure


def draw_word_map(trained: Trained) -> Any:
    figure, (axes,) = canvas(width=6.6, height=4.6)
    places, words = flattened(trained), known_words(trained)
    for kind, colour in zip(KINDS, SERIES, strict=True):
        own = [i for i, (of, _, _) in enumerate(words) if of == kind]
        axes.plot(*places[own].T, "o", color=colour, markersize=4, label=kind)
    axes.set(xticks=[], yticks=[], title="the two directions in which these words' vectors differ most")
    for (_, word, _), place, offset in zip(
        words, places, label_offsets(axes, places, [word for _, word, _ in words]), strict=True
    ):
        axes.annotate(word, place, offset, textcoords="offset points", fontsize=7, color=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(fontsize=8, loc="upper right")
    return figure


def draw_position_maps(trained: Trained) -> Any:
    """Each head's scores of positions alone, trained and before training."""
    scores = {"trained": position_scores(trained.model), "before training": position_scores(trained.fresh)}
    heads = min(len(scores["trained"]), 8)
    figure, panels = canvas(heads, 2, width=max(6.0, 2.3 * heads), height=5.4)
    for row, (name, found) in enumerate(scores.items()):
        for head in range(heads):
            axes = panels[row * heads + head]
            heat_map(axes, found[head], signed=True, aspect="equal")
            axes.plot([-0.5, POSITIONS - 0.5], [-0.5, POSITIONS - 0.5], color=INK, linewidth=0.6, linestyle=":")
            axes.set_title(f"{name}, head {head + 1}", fontsize=8)
            axes.set(xticks=[0, POSITIONS - 1], yticks=[0, POSITIONS - 1], xlabel="key's place", ylabel="query's place")
            draw_key(axes)
    return figure


def draw_head_distances(trained: Trained) -> Any:
    """Distance of every two heads of the encoder, mean of the phrases."""
    phrases = [attention_maps(trained.model, *pair)["encoder"] for pair in trained.pairs]
    layers, heads = phrases[0].shape[:2]
    flat = [maps.reshape(layers * heads, *maps.shape[2:]) for maps in phrases]
    found = np.mean([np.abs(m[:, None] - m[None]).sum(axis=-1).mean(axis=-1) / 2 for m in flat], axis=0)
    figure, (axes,) = canvas(width=4.4, height=3.8)
    heat_map(axes, found, most=1.0, aspect="equal")
    names = [f"{layer + 1}.{head + 1}" for layer in range(layers) for head in range(heads)]
    label_cells(axes, names, names, size=8)
    if len(names) <= 12:
        for i, row in enumerate(found):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_title("layer.head against layer.head: 0 alike, 1 nowhere the same")
    return figure


STACKS = ("encoder", "decoder", "cross-attention")
STATES = ("trained", "before training")
ROWS = (
    Row(
        30,
        "Heads learn to look at different words.",
        "w_h = softmax(Q_h K_h^T / √d_k), every head of every layer",
        {f"bits of spread of each head, {stack}": RECORDED for stack in STACKS},
        heads,
        (attention_maps,),
        ("claims/test_trained.py::test_maps_are_those_of_the_layers",),
        figure=draw_head_grid,
        trained=True,
    ),
    Row(
        36,
        "Similar words get similar vectors.",
        "cos(a, b) = a · b / (|a| |b|)",
        dict.fromkeys(("words compared", "mean cosine, own kind", "mean cosine, other kinds"), RECORDED)
        | {f"nearest word is of its kind, {kind}, %": RECORDED for kind in KINDS},
        similar,
        (similar,),
        ("claims/test_trained.py::test_words_of_one_kind_are_found_near",),
        figure=draw_word_map,
        trained=True,
    ),
    Row(
        37,
        "Projected into queries and keys, positions still know their neighbours.",
        "PE W_Q W_K^T PE^T / √d_k",
        {f"offset where most rows peak, each head, {state}": RECORDED for state in STATES}
        | {f"rows that peak there or next to it, %, {state}": RECORDED for state in STATES},
        projected,
        (position_scores,),
        ("claims/test_trained.py::test_projected_positions_peak_where_a_projection_puts_them",),
        figure=draw_position_maps,
        trained=True,
    ),
    Row(
        42,
        "Layers learn different attention.",
        "½ Σ_j |w_a(i, j) - w_b(i, j)|, mean over the rows i",
        {
            f"mean distance of {what}, encoder, {state}": RECORDED
            for what in ("heads of a layer", "layers")
            for state in STATES
        },
        layers,
        (layers,),
        ("claims/test_trained.py::test_equal_maps_have_no_distance",),
        figure=draw_head_distances,
        trained=True,
    ),
    Row(
        53,
        "Attention to the encoder's output aligns the two languages.",
        "argmax_j w(t, j) while target word t + 1 is written",
        dict.fromkeys(
            (
                "digits compared",
                *(f"looks most at the digit that is {w}, %, {state}" for state in STATES for w in ("written", "read")),
            ),
            RECORDED,
        ),
        aligned,
        (aligned,),
        ("claims/test_trained.py::test_digits_are_found_where_attention_puts_them",),
        figure=draw_alignment,
        trained=True,
    ),
)
