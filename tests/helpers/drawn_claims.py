"""Each figure of the claims beside the numbers of its rows, or its formula: `CHECKS`, by the function that draws it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from claims import cost, embedding, pictures, recurrent, sentences, trained, worked_table
from claims.worked import SENTENCE
from drawn import Panel

Values = Mapping[str, tuple[float, ...]]
Computed = Callable[[int], Values]
"""The numbers of a row."""
CHECKS: dict[str, Callable[[list[Panel], Computed, Any], None]] = {}


def check(function: Callable[[list[Panel], Computed, Any], None]) -> Callable[[list[Panel], Computed, Any], None]:
    """Of the figure of the same name."""
    CHECKS[function.__name__] = function
    return function


def by_title(panels: list[Panel]) -> dict[str, Panel]:
    found = {panel.title: panel for panel in panels}
    assert len(found) == len(panels)
    return found


def image(panel: Panel) -> np.ndarray:
    assert panel.image is not None
    return panel.image


@check
def heat_maps(panels: list[Panel], computed: Computed, model: Any) -> None:
    position, feature = np.arange(80.0)[:, None], np.arange(256)
    paper, other = position * 10000.0 ** (-feature / 256), position * 10000.0 ** (-feature / 255)
    shown = by_title(panels)
    pairs = np.stack([np.sin(paper), np.cos(paper)], axis=2).reshape(80, 512)
    halves = np.concatenate([np.sin(other), np.cos(other)], axis=1)
    np.testing.assert_allclose(image(shown["pairs side by side (paper)"]), pairs, atol=1e-6)
    np.testing.assert_allclose(image(shown["halves (tensor2tensor)"]), halves, atol=1e-6)


@check
def rejected(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    growth, step, distance = (
        shown[t] for t in ("largest feature", "positions scaled to 0..1", "smallest distance by gap")
    )
    assert growth.y("position itself").max() == computed(5)["largest feature of 1000 positions"][0]
    assert growth.y("sinusoids").max() == computed(5)["of the sinusoids"][0]
    five, nine = computed(6)["one step, of five words"][0], computed(6)["one step, of nine words"][0]
    words = sorted((y, text) for text, _, y in step.words)
    assert [text for _, text in words] == [f"5 words: a step is {five:g}", f"9 words: a step is {nine:g}"]

    def lowest(label: str, gap: int) -> float:
        """Of the ten gaps that one point of the curve stands for."""
        return float(distance.y(label)[(gap - 1) // 10])

    assert lowest("one sine", 333) <= computed(7)["|sin 11 - sin 344|"][0]
    np.testing.assert_allclose(lowest("one pair", 710), computed(8)["distance of p and p+710"][0], rtol=1e-6)
    np.testing.assert_allclose(lowest("two pairs", 1420), computed(9)["distance of p and p+1420"][0], rtol=1e-6)
    assert distance.y("512 features").min() >= computed(9)["smallest of 512 features, gaps 1..4999"][0]


@check
def dot_products(panels: list[Panel], computed: Computed, model: Any) -> None:
    claimed = computed(10)["PE(t) · PE(t+k), k = 0..3"]
    (panel,) = panels
    assert [(text, x) for text, x, _ in panel.words] == [(f"{value:.2f}", k) for k, value in enumerate(claimed)]
    np.testing.assert_allclose([y for _, _, y in panel.words], claimed, rtol=1e-12)


@check
def rotation(panels: list[Panel], computed: Computed, model: Any) -> None:
    for panel in panels:
        found = re.fullmatch(r"pair (\d+): 4 steps = ([\d.]+) rad", panel.title)
        assert found is not None
        w = 10000.0 ** (-2 * int(found[1]) / 512)
        assert float(found[2]) == float(f"{4 * w:.3g}")
        assert [text for text, _, _ in panel.words] == ["1", "5", "12", "16"]
        for text, x, y in panel.words:
            np.testing.assert_allclose(
                [x, y], 1.18 * np.array([np.sin(int(text) * w), np.cos(int(text) * w)]), atol=1e-9
            )


@check
def counter(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    bits, waves = (
        shown["a counter, its last digit first: the fastest"],
        shown["sines of 16 features: the first is the fastest"],
    )
    assert ["".join(row[::-1]) for row in bits.cells()] == "000 001 010 011 100 101 110 111".split()
    assert [int(n) for n in np.abs(np.diff(image(bits), axis=0)).sum(axis=0)][::-1] == list(
        computed(12)["changes of each digit, 000 to 111"]
    )
    position, feature = np.arange(33.0)[:, None], np.arange(8)
    np.testing.assert_allclose(image(waves), np.sin(position * 10000.0 ** (-feature / 8)), atol=1e-12)


@check
def worked_tables(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, cats, found = by_title(panels), [1, 5], computed(16)
    notes, plain, placed = (
        shown[title]
        for title in ("as the notes have it", "Q = K = V = X, without positions", "Q = K = V = X, with positions")
    )
    assert np.array_equal(image(notes), worked_table.NOTES)
    np.testing.assert_allclose(
        image(plain)[np.ix_(cats, cats)].ravel(), found["each CAT to each CAT, without positions"], atol=1e-6
    )
    np.testing.assert_allclose(image(placed)[cats, cats], found["each CAT to itself, with positions"], atol=1e-6)
    for panel in panels:
        assert panel.rows == panel.columns == SENTENCE
        assert panel.cells() == [[f"{weight:.3f}" for weight in row] for row in image(panel)]
        sums = [text for text, x, _ in panel.words if x > 5.5]
        assert sums == ["sum", *(f"{row.sum():.3f}" for row in image(panel))]


@check
def saturation(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, found = by_title(panels), computed(18)
    variance, slope = shown["variance of the products"], shown["gradient of the softmax, Σ w (1 - w)"]
    ratio = found["Var(q · k) / d_k, d_k = 4, 16, 64, 256, 1024"]
    np.testing.assert_allclose(variance.y("q · k / √d_k"), ratio, rtol=1e-6)
    np.testing.assert_allclose(variance.y("q · k") / (4, 16, 64, 256, 1024), ratio, rtol=1e-6)
    for label, name in {
        "with it": "gradient of the scaled softmax, d_k = 1024 / 4",
        "without the scale": "of the unscaled",
    }.items():
        np.testing.assert_allclose(slope.y(label)[-1] / slope.y(label)[0], found[name][0], rtol=1e-6)


@check
def mask_pictures(panels: list[Panel], computed: Computed, model: Any) -> None:
    causal, told = np.tril(np.ones((5, 5), bool)), np.tile([True, True, True, False, False], (5, 1))
    itself = np.eye(5, dtype=bool)  # padding sees itself too: a row that sees nothing has no softmax
    allowed = {"causal": causal, "padding": told, "causal and padding": causal & (told | itself)}
    assert [panel.title for panel in panels[::3]] == [f"{name}: mask" for name in allowed]
    for row, may in enumerate(allowed.values()):
        mask, before, after = panels[3 * row : 3 * row + 3]
        assert (before.title, after.title) == ("before the softmax", "after")
        assert [[cell == "0" for cell in line] for line in mask.cells()] == may.tolist()
        scores = np.where(may, image(before), -np.inf)
        assert before.cells() == [["−∞" if np.isinf(v) else f"{v:.1f}" for v in line] for line in scores]
        exponents = np.exp(scores)
        np.testing.assert_allclose(image(after), exponents / exponents.sum(axis=1, keepdims=True), atol=1e-6)
        assert image(after)[~may].max() == computed(21)["largest masked weight"][0]
        assert after.cells() == [["0" if v == 0 else f"{v:.2f}" for v in line] for line in image(after)]


@check
def contextual(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, found = by_title(panels), computed(35)
    for title, name, rows in zip(
        ("embedding + position", "encoder's output"),
        ("largest change of the embedding of bank between two sentences", "of the encoder's output"),
        embedding.bank(),
        strict=True,
    ):
        panel = shown[f"{title}: change {found[name][0]:.2g}"]
        assert panel.rows == [" ".join(text.split()[-2:]) for text in embedding.SENTENCES]
        assert np.array_equal(image(panel), rows)


@check
def growth(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, found = by_title(panels), computed(29)
    memory, time = shown["bytes"], shown["milliseconds of CPU time, as measured here"]
    slopes = found["slope of the bytes of the weights over n, between logarithms; of the activations"]
    for label, slope in zip(("weights of a head, slope 2", "activations, slope 1"), slopes, strict=True):
        x, y = np.log(memory.series[label])
        np.testing.assert_allclose(np.diff(y) / np.diff(x), slope, rtol=1e-9)
    held = memory.y("weights of a head, slope 2")
    assert (held[0], held[-1]) == found["bytes of the weights of a head, n = 64 and 1024"]
    attended, stepped = cost.times_by_length()
    assert time.y("attention").tolist() == [1e3 * t for t in attended]
    assert time.y("recurrent, step by step").tolist() == [1e3 * t for t in stepped]


@check
def forgetting(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    for label, name in {
        "recurrent": "gradient over 64 positions / over 4, recurrent",
        "self-attention": "the same, attention",
    }.items():
        assert panel.y(label)[-1] / panel.y(label)[0] == computed(33)[name][0]


@check
def path_lengths(panels: list[Panel], computed: Computed, model: Any) -> None:
    found = computed(34)
    layers, neighbours = (int(found[n][0]) for n in ("dilated convolutions of two", "convolutions of two neighbours"))
    n = recurrent.WORDS
    back = np.arange(n)[:, None] - np.arange(n)
    expected = {
        "self-attention\n1 layer": (recurrent.self_attention(), back > -n),
        "recurrent\n16 steps": (recurrent.recurrent(), back >= 0),
        f"dilated convolutions\n{layers} layers": (
            recurrent.convolutions(layers, True),
            (back >= 0) & (back < 2**layers),
        ),
        f"convolutions\n{layers} of {neighbours} layers": (
            recurrent.convolutions(layers, False),
            (back >= 0) & (back <= layers),
        ),
    }
    shown = by_title(panels)
    assert shown.keys() == expected.keys()
    for title, (network_, heard) in expected.items():
        drawn = image(shown[title])
        assert np.array_equal(drawn > 0, heard), title
        size = recurrent.sensitivity(network_)[heard]
        np.testing.assert_allclose(drawn[heard], np.log10(np.maximum(size, 1e-12)) + 12, rtol=1e-9)


@check
def raw_gradients(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    for label, name in {
        "raw position as one feature": "gradient at position 1000 / at position 1, raw positions",
        "512 sinusoids": "the same, sinusoids",
    }.items():
        assert panel.y(label)[-1] / panel.y(label)[0] == computed(38)[name][0]


@check
def in_words(panels: list[Panel], computed: Computed, model: Any) -> None:
    seen = pictures.in_words()
    for panel, picture, words in zip(panels, seen.pictures, seen.trained, strict=False):
        assert np.array_equal(image(panel), picture.clip(0))
        assert panel.title == " ".join(pictures.WORDS[word] for word in words)


@check
def head_grid(panels: list[Panel], computed: Computed, model: Any) -> None:
    source, target = model.pairs[0]
    maps, shown = trained.attention_maps(model.model, source, target), by_title(panels)
    words = {"source": model.words(source), "target": model.words(target)}
    sides = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
    assert len(shown) == sum(found.shape[0] * found.shape[1] for found in maps.values())
    for stack, found in maps.items():
        for layer, head in np.ndindex(*found.shape[:2]):
            panel = shown[f"{stack} {layer + 1}, head {head + 1}"]
            assert np.array_equal(image(panel), found[layer, head])
            assert [panel.rows, panel.columns] == [words[side] for side in sides[stack]]


@check
def word_map(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    places, known = trained.flattened(model), trained.known_words(model)
    assert panel.series.keys() == trained.KINDS.keys()
    for kind, (x, y) in panel.series.items():
        own = [i for i, (of, _, _) in enumerate(known) if of == kind]
        assert np.array_equal(np.stack([x, y], axis=1), places[own])
    at = {word: tuple(place) for (_, word, _), place in zip(known, places, strict=True)}
    assert len(panel.words) == len(known)
    for text, x, y in panel.words:
        assert at[text] == (x, y)


@check
def position_maps(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    for name, transformer in {"trained": model.model, "before training": model.fresh}.items():
        for head, scores in enumerate(trained.position_scores(transformer)):
            assert np.array_equal(image(shown[f"{name}, head {head + 1}"]), scores)


@check
def head_distances(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    layers, heads = model.model.config.encoder_layers, model.model.config.heads
    assert panel.rows == panel.columns == [f"{i + 1}.{h + 1}" for i in range(layers) for h in range(heads)]
    own, other = [], []
    for i, row in enumerate(panel.rows):
        for j in range(i):
            (own if row[0] == panel.columns[j][0] else other).append(image(panel)[i, j])
    found = trained.layers(model)
    np.testing.assert_allclose(np.mean(own), found["mean distance of heads of a layer, encoder, trained"], rtol=1e-9)
    np.testing.assert_allclose(np.mean(other), found["mean distance of layers, encoder, trained"], rtol=1e-9)
    assert panel.cells() == [[f"{value:.2f}" for value in row] for row in image(panel)]


@check
def exploding(panels: list[Panel], computed: Computed, model: Any) -> None:
    left, right = panels
    assert (left.title, right.title) == (
        "a recurrent net, U as drawn and larger",
        "without tanh, with gates, and attention",
    )
    shown = {**left.series, **right.series}
    assert list(left.series) == ["U", "2 U", "3 U", "4 U"]
    for name, values in computed(48).items():
        y = shown[name.rpartition(", ")[2]][1]
        assert y[-1] / y[0] == values[0]


@check
def unseen_lengths(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    for kind in ("sinusoidal", "rotary", "learned"):
        x, y = panel.series[kind]
        assert tuple(x) == (8, 9, 10, 12, 16)
        assert tuple(y) == computed(45)[f"copied exactly, 8, 9, 10, 12 and 16 words, {kind}"]


@check
def alignment(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    source, target = model.pairs[0]
    assert (panel.rows, panel.columns) == (model.words(target)[1:], model.words(source))
    maps = trained.attention_maps(model.model, source, target)
    np.testing.assert_array_equal(image(panel), maps["cross"][-1].mean(axis=0)[:-1])


@cache
def encoder_maps(text: str) -> np.ndarray:
    """Weights of every head of the shipped model's encoder, (layers, heads, n, n)."""
    shipped = sentences.translator()
    return trained.attention_maps(shipped.model, *sentences.read(shipped, text)[:2])["encoder"]


@cache
def lost(head: sentences.Head) -> float:
    return sentences.lost(sentences.translator(), [head])


@check
def looking(panels: list[Panel], computed: Computed, model: Any) -> None:
    shipped, values, shown = sentences.translator(), computed(56), by_title(panels)
    river = values["On the river bank, most of any head: the to bank, the to river, bank to river"]
    for (asking, seen), most in zip(sentences.PAIRS, river, strict=True):
        (title,) = [title for title in shown if title.startswith(f"{asking} → {seen}: layer")]
        layer, head = (int(number) - 1 for number in re.findall(r"layer (\d), head (\d)", title)[0])
        panel = shown[title]
        assert np.array_equal(image(panel), encoder_maps(sentences.RIVER)[layer, head])
        assert panel.rows == panel.columns == shipped.words(sentences.read(shipped, sentences.RIVER)[0])
        place = panel.rows.index(asking), panel.columns.index(seen)
        assert image(panel)[place] == most
        assert [text for row in panel.cells() for text in row if text] == [panel.cells()[place[0]][place[1]]]
        assert panel.cells()[place[0]][place[1]] == f"{most:.2f}"
    for word, text in sentences.WHY.items():
        panel = shown[f"too {word}: where “it” looks"]
        assert panel.columns == shipped.words(sentences.read(shipped, text)[0])
        assert panel.rows == [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3, 4)]
        for seen in panel.columns:
            if panel.columns.count(seen) == 1:
                place = panel.columns.index("it"), panel.columns.index(seen)
                assert np.array_equal(image(panel)[:, place[1]], encoder_maps(text)[:, :, *place].ravel())
    tired, wide = (shown[f"too {word}: where “it” looks"] for word in sentences.WHY)
    for panel, seen, most in (
        (wide, "street", "too wide, most of any head: it to street"),
        (tired, "street", "too tired, the same"),
        (tired, "animal", "too tired, most of any head: it to animal"),
    ):
        assert image(panel)[:, panel.columns.index(seen)].max() == values[most][0]
    falls = shown["log p of the translation falls by"].series
    assert falls["cross-attention"][1].max() == values["the worst head of cross-attention off"][0]
    whole = {name: (name, "self_attention") for name in ("encoder", "decoder")}
    for name, part in {**whole, "cross-attention": ("decoder", "cross_attention")}.items():
        x, y = falls[name]
        assert list(x) == list(range(1, 9))
        np.testing.assert_allclose(y, [lost(head) for head in sentences.parts(shipped, *part)])
