"""Figures of single steps of the network beside what their rows compute: more of `CHECKS`, see drawn_claims."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from claims import attention, embedding, feedforward, learned, norms, residual, sentences, stacks, trained
from drawn import Panel
from drawn_claims import Computed, by_title, check, image

from mlx_transformer.core.positions import sinusoids
from mlx_transformer.nn.parameters import named_parameters


@check
def one_hot(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    rows, table, product = (shown[title] for title in ("one-hot rows", "x the table W", "= rows of W"))
    assert np.array_equal(image(table), embedding.looked_up()[2])
    assert table.rows == [f"{id}" for id in range(24)]
    for panel, wanted in ((rows, np.eye(24)), (product, image(table))):
        assert len(panel.rows) == 3
        assert all(np.array_equal(row, wanted[int(id)]) for id, row in zip(panel.rows, image(panel), strict=True))
    assert computed(1)["largest |one-hot @ W - lookup|"] == (0,)


@check
def look_ups(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    keys, values = (np.array(each, dtype=np.float64)[0, 0] for each in attention.dictionary())
    far = {"x 1": 0.0, "x 1e+06": 0.0}
    for key in attention.ASKED:
        panel = shown[f"the query is key {key + 1}"]
        assert panel.columns == [f"{n + 1}" for n in range(6)]
        assert panel.rows == ["x 1", "x 8", "x 32", "x 1e+06"]
        for name, row in zip(panel.rows, image(panel), strict=True):
            scores = keys @ keys[key] * float(name[2:]) / 8
            powers = np.exp(scores - scores.max())
            np.testing.assert_allclose(row, powers / powers.sum(), atol=1e-5)
            if name in far:
                far[name] = max(far[name], np.abs(row @ values - values[key]).max())
    found = computed(32)
    assert far["x 1e+06"] == found["error of the value that is asked for, scores times a million"][0]
    np.testing.assert_allclose(far["x 1"], found["times one"][0], rtol=1e-4)


@check
def inner_units(panels: list[Panel], computed: Computed, model: Any) -> None:
    before, after = panels
    assert before.title == "x W_1 + b_1, the first 96 of 2048 units"
    zero = computed(25)["share of the inner units that max sets to 0"][0]
    assert after.title == f"max(0, ·) of them; {zero:.2f} of all units are 0"
    assert np.array_equal(image(before), feedforward.inner_units()[0])
    assert np.array_equal(image(after), np.where(image(before) > 0, image(before), 0))
    assert before.rows == after.rows == [f"{n}" for n in range(7)]


@check
def probabilities(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    logits = np.array(stacks.classified()[1], dtype=np.float64)[0]
    assert list(panel.series) == [f"position {n}" for n in range(3)]
    for n, sums in enumerate(computed(27)["sums of the probabilities of 24 words"]):
        x, y = panel.series[f"position {n}"]
        np.testing.assert_allclose(x, np.arange(24) + (n - 1) * 0.8 / 3)  # side by side around their id
        np.testing.assert_allclose(y, np.exp(logits[n]) / np.exp(logits[n]).sum(), rtol=1e-5)
        np.testing.assert_allclose(y.sum(), sums, rtol=1e-6)
        assert y.argmax() == logits[n].argmax()


@check
def boxes(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, shipped = by_title(panels), sentences.translator()
    source, target, _ = sentences.read(shipped, sentences.RIVER)
    words, weights = shipped.words(source), shipped.model.weights()
    x = weights["embedding.weight"][source].astype(np.float64) * 8 + sinusoids(len(source), 64)
    np.testing.assert_allclose(image(shown["X, the words"]), x, atol=1e-5)
    maps = trained.attention_maps(shipped.model, source, target)["encoder"][0]
    head = int(maps[:, words.index("bank"), words.index("river")].argmax())
    own = slice(16 * head, 16 * head + 16)
    projections = (f"encoder.layers.0.self_attention.{name}_proj.weight" for name in ("query", "key", "value"))
    q, k, v = (x @ weights[name][own].astype(np.float64).T for name in projections)
    wanted = {"Q = X W_Q": q, "K = X W_K": k, "V = X W_V": v, "Q K^T": q @ k.T, "÷ √16": q @ k.T / 4}
    for title, values in {**wanted, "softmax": maps[head], "times V": maps[head] @ v}.items():
        np.testing.assert_allclose(image(shown[title]), values, atol=1e-4)
    for title, panel in shown.items():
        assert panel.rows == words
        square = title in ("Q K^T", "÷ √16", "softmax")
        assert panel.columns == (words if square else [])
        assert panel.cells() == [[f"{value:.2f}" if square else "" for value in row] for row in image(panel)]
    looked = image(shown["softmax"])[words.index("bank"), words.index("river")]
    assert looked == computed(15)["On the river bank, a head of layer 1: bank to river"][0]


@check
def side_by_side(panels: list[Panel], computed: Computed, model: Any) -> None:
    joined, mixed = panels
    assert (joined.title, mixed.title) == ("Concat(head_1, ..., head_8)", "Concat(head_1, ..., head_8) W^O")
    module, x, _ = attention.eight_heads()
    weights = {name: np.array(value, dtype=np.float64) for name, value in named_parameters(module)}
    rows = np.array(x, dtype=np.float64)[0]
    names = ("query", "key", "value")
    q, k, v = (rows @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0) for name in names)
    assert sorted(text for text, _, _ in joined.words) == [f"head {n}" for n in range(1, 9)]
    for text, place, _ in joined.words:
        own = slice(64 * int(place // 64), 64 * int(place // 64) + 64)
        assert text == f"head {own.stop // 64}"
        scores = np.exp(q[:, own] @ k[:, own].T / 8)
        head = scores / scores.sum(axis=1, keepdims=True) @ v[:, own]
        np.testing.assert_allclose(image(joined)[:, own], head, atol=1e-5)
    out = image(joined) @ weights["output_proj.weight"].T + weights.get("output_proj.bias", 0)
    np.testing.assert_allclose(image(mixed), out, atol=1e-5)
    assert image(joined).shape[1] == computed(20)["features of a sub-layer of 8 heads of 64"][0]


@cache
def taps_of_tiny() -> list[str]:
    """In their order."""
    taps: list[str] = []
    stacks.tiny()([[5, 2]], [[1]], tap=lambda name, _: taps.append(name))
    return taps


@check
def two_plus_two(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    taps = taps_of_tiny()
    named = {part.replace("-", "_"): part for parts in stacks.SUBLAYERS.values() for part in parts}
    expected: dict[tuple[str, str], None] = {}  # as they were computed, without the memory's
    texts: dict[str, str] = {}
    below = ""
    for tap in taps:
        stack, _, rest = tap.partition(".")
        layer, part = rest.split(".")[1:] if rest.count(".") == 2 else ("", "")
        if tap == "logits":
            texts["decoder: linear, softmax"] = "linear, softmax"
            expected[below, "decoder: linear, softmax"] = None
        elif rest == "embedding":
            below = f"{stack}: embedding + position"
            texts[below] = "embedding + position"
        elif part:
            box = f"{stack} {int(layer) + 1}: {named[part]}"
            norm = f"{stack} {int(layer) + 1}: add, norm after {named[part]}"
            expected |= dict.fromkeys([(below, box), (box, norm), (below, norm)])
            texts |= {box: named[part], norm: "add, norm"}
            if part == "cross_attention":
                expected["encoder 2: add, norm after feed-forward", box] = None
            below = norm
    assert panel.series.keys() == {f"{start} → {end}" for start, end in expected}
    columns = {"encoder": 0.0, "decoder": 1.0}
    places = {name: (columns[name[:7]], 0.0) for name in texts}
    for stack in columns:
        for height, name in enumerate(name for name in texts if name.startswith(stack)):
            places[name] = (columns[stack], float(height))
    assert sorted(panel.words) == sorted((texts[name], *places[name]) for name in texts)
    for start, end in expected:
        path = np.stack(panel.series[f"{start} → {end}"], axis=1)
        for name, point in ((start, path[0]), (end, path[-1])):
            assert np.all(np.abs(point - places[name]) <= (0.361, 0.321))  # in its box, or on its edge
    assert computed(26)["after 150 steps, cross-attention silent"] > computed(26)["after 150 steps"]


@check
def word_by_word(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown = by_title(panels)
    tokens, _, forced = (np.array(each) for each in stacks.stepped())
    assert computed(28)["words that both choose differently, of 18"] == (0,)
    for row, source in enumerate(stacks.SOURCES):
        panel = shown[f"source {' '.join(map(str, source))}"]
        powers = np.exp(forced[row].astype(np.float64))
        np.testing.assert_allclose(image(panel), powers / powers.sum(axis=1, keepdims=True), atol=1e-5)
        assert panel.columns == [f"{id}" for id in range(24)]
        assert panel.rows == [f"has read {id}" for id in tokens[row, :-1]]
        for step, cells in enumerate(panel.cells()):
            best = int(image(panel)[step].argmax())
            assert cells == ["" if id != best else f"{id}" for id in range(24)]
            assert tokens[row, step + 1] == best


@check
def training_and_use(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, found = by_title(panels), computed(49)
    together, padded = shown["loss, a batch of one length"], shown["loss, batches padded to one length"]
    for panel in panels:
        assert panel.columns == ["in training", "in use"]
        for side, label in ((-0.2, "layer norm"), (0.2, "batch norm")):
            np.testing.assert_allclose(panel.series[label][0], (side, 1 + side))
    (layer, layer_used), (batch, batch_used) = together.y("layer norm"), together.y("batch norm")
    assert (layer,) == found["loss in training, layer norm"]
    assert (batch,) == found["the same, batch norm"]
    assert (batch_used / layer_used,) == found["loss in use, batch norm / layer norm"]
    training, used = padded.y("batch norm")
    assert (used / training,) == found["the same, batches padded to one length"]
    assert tuple(padded.y("layer norm")) == learned.losses_by_norm(False, 0, one_length=False)


@check
def depth(panels: list[Panel], computed: Computed, model: Any) -> None:
    (panel,) = panels
    shares = [computed(54)[f"questions answered, layers: {layers}"][0] for layers in (1, 2)]
    assert (list(panel.series), panel.columns) == (["value of a key seen before"], ["1", "2"])
    x, y = panel.series["value of a key seen before"]
    np.testing.assert_allclose(x, (1, 2))
    assert list(y) == shares
    assert panel.words == [(f"{share:.2f}", layers, share) for layers, share in zip((1, 2), shares, strict=True)]


@check
def residuals(panels: list[Panel], computed: Computed, model: Any) -> None:
    shown, found = by_title(panels), computed(22)
    apart, gradient = (
        shown["share of the output that tells positions apart"],
        shown["norm of the gradient at the input"],
    )
    two, four = residual.DEPTHS.index(2), residual.DEPTHS.index(4)
    assert apart.series.keys() == gradient.series.keys() == residual.VARIANTS.keys()
    for name in residual.VARIANTS:
        assert apart.y(name)[four] == found[f"share of 4 layers' output that tells positions apart: {name}"][0]
        assert gradient.y(name)[-1] / gradient.y(name)[two] == found[f"gradient at the input, 24 layers / 2: {name}"][0]
    sums = shown["the first sub-layer, one position"]
    x, z, added, normed = image(sums)
    assert sums.rows == ["X", "Z = attention(X)", "X + Z", "its norm"]
    assert np.array_equal(x, residual.first_sub_layer()["X"])
    model, vectors = residual.fresh(0, 1)
    module = model.encoder.layers[0].self_attention
    attended = module.attend(vectors, *module.keys_values(vectors, None), None, None)
    np.testing.assert_allclose(z, np.array(attended)[0, 0], atol=1e-5)
    assert np.array_equal(added, x + z)
    np.testing.assert_allclose(normed, (added - added.mean()) / added.std(), atol=1e-4)


@check
def normalised_together(panels: list[Panel], computed: Computed, model: Any) -> None:
    found = computed(24)
    for k, (name, number) in enumerate(
        {
            "layer norm": "change of a sample's output by other batch mates, layer norm",
            "batch norm": "batch norm",
        }.items()
    ):
        shared, strips = panels[2 * k : 2 * k + 2]
        assert shared.title == f"{name}: one mean"
        first, others = (np.ones(16), np.zeros(16)) if name == "layer norm" else (np.eye(16)[0],) * 2
        assert np.array_equal(image(shared), [first, *[others] * 23])
        assert shared.rows == ["1", "2", "3", "4"]
        assert strips.title == f"its change: {found[number][0]:.2g}"
        norm = norms.LayerNorm(16, norms.EPSILON) if name == "layer norm" else norms.nn.BatchNorm(16)
        before, after = (np.array(each[0]) for each in norms.among_mates(norm))
        assert strips.rows == ["batch", "other"]
        assert np.array_equal(image(strips), [before, after])
