"""Entities of texts: those of `transformers` (golden_heads.json), the same in both runtimes, at their places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from head_folders import LABELS
from head_models import head_model

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.generation.heads import Tagged, _entities, _joined, _tokens
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.pairs import Located

GOLDEN = json.loads((Path(__file__).parent / "golden_heads.json").read_text(encoding="utf-8"))
TEXTS = GOLDEN["texts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    export_onnx(head_model("bert-tokens", folder, id2label=LABELS), folder / "onnx")
    return folder


@pytest.fixture(scope="module", params=["model", "onnx"])
def model(request: pytest.FixtureRequest, folder: Path) -> Transformer | OnnxTransformer:
    return Transformer.load(folder / "model") if request.param == "model" else OnnxTransformer(folder / "onnx")


def test_entities_are_those_of_transformers(model: Transformer | OnnxTransformer) -> None:
    found = model.tag(TEXTS)
    for text, ours, theirs in zip(TEXTS, found, GOLDEN["tagged"], strict=True):
        assert [(e.label, e.start, e.end) for e in ours] == [(e["label"], e["start"], e["end"]) for e in theirs]
        assert [e.probability for e in ours] == pytest.approx([e["probability"] for e in theirs], abs=2e-6)
        assert all(text[e.start : e.end] == e.text for e in ours)
    assert model.tag(TEXTS[1]) == found[1]


LABEL_NAMES = ["O", "B-A", "I-A", "B-B", "I-B", "V"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("B-A I-A O I-A", [("A", "ab cd"), ("A", "gh")]),
        ("B-A B-A I-A I-B", [("A", "ab"), ("A", "cd ef"), ("B", "gh")]),
        ("I-A I-B I-B B-B", [("A", "ab"), ("B", "cd ef"), ("B", "gh")]),
        ("O O O O", []),
        ("V V O V", [("V", "ab cd"), ("V", "gh")]),
    ],
)
def test_how_labels_become_entities(labels: str, expected: list[tuple[str, str]]) -> None:
    text = "ab cd ef gh"
    places = [(0, 2), (2, 5), (5, 8), (8, 11)]  # a vocabulary that counts the space to the word
    shares = np.full((4, 6), 0.1)
    for i, label in enumerate(labels.split()):
        shares[i, LABEL_NAMES.index(label)] = 0.6 + 0.1 * i
    found = _entities(text, _tokens(places, shares, LABEL_NAMES))
    assert [(each.label, each.text) for each in found] == expected
    assert all(text[each.start : each.end] == each.text for each in found)


def test_the_probability_is_the_mean_of_the_tokens() -> None:
    shares = np.array([[0.0, 0.0, 0.75, 0.0], [0.0, 0.0, 0.25, 0.0]])
    tokens = _tokens([(0, 1), (1, 3)], shares, ["O", "B-A", "I-A", "V"])
    assert _entities("abc", tokens) == [Tagged("A", 0.5, 0, 3, "abc")]


def test_a_long_text_is_read_in_windows_that_overlap() -> None:
    places = [None, *((i, i + 1) for i in range(100)), None]
    windows = Located([1, *range(10, 110), 2], places).windows(42)
    assert [window.row.ids[0] for window in windows] == [1] * len(windows)
    assert [(window.row.ids[1], window.row.ids[-2], len(window.row.ids)) for window in windows] == [
        *((10, 49, 42), (30, 69, 42), (50, 89, 42), (70, 109, 42)),
    ]
    assert [(each.first, each.count, each.at) for each in windows] == [
        (0, 40, 1),
        (20, 40, 1),
        (40, 40, 1),
        (60, 40, 1),
    ]
    rows = [np.full((42, 1), float(i)) for i in range(4)]
    joined = _joined(100, windows, rows)[:, 0]
    assert joined.tolist() == [0.0] * 30 + [1.0] * 20 + [2.0] * 20 + [3.0] * 30
    [whole] = Located([1, 5, 2], [None, (0, 1), None]).windows(42)
    assert (whole.row.ids, whole.first, whole.count, whole.at) == ([1, 5, 2], 0, 1, 1)
    with pytest.raises(UserError, match="max_length=2: 2 tokens stand around a text: give more"):
        Located([1, 5, 2], [None, (0, 1), None]).windows(2)


def test_a_text_of_any_length_is_tagged(model: Transformer | OnnxTransformer) -> None:
    long = f"{TEXTS[0]} " * 30
    found = model.tag(long)
    assert {each.start // len(f"{TEXTS[0]} ") for each in found} >= {0, 29}
    assert all(long[each.start : each.end] == each.text for each in found)
    assert model.tag("") == []


def test_what_cant_be_tagged_is_refused(model: Transformer | OnnxTransformer) -> None:
    with pytest.raises(UserError, match="line 1: must be text, not int"):
        model.tag([3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="classify needs a head of kind 'classes'; its head is of kind 'token-classes'"):
        model.classify("good")
