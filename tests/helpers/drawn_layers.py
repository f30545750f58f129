"""Figures of single steps of the network beside what their rows compute: more of `CHECKS`, see drawn_claims."""

from __future__ import annotations

from typing import Any

import numpy as np
from claims import attention, embedding, feedforward, stacks
from drawn import Panel
from drawn_claims import Computed, by_title, check, image

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
        assert list(x) == list(range(24))
        np.testing.assert_allclose(y, np.exp(logits[n]) / np.exp(logits[n]).sum(), rtol=1e-5)
        np.testing.assert_allclose(y.sum(), sums, rtol=1e-6)
        assert y.argmax() == logits[n].argmax()


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
