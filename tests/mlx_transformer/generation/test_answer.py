"""Answers to questions: those of `transformers` (golden_heads.json), the same in both runtimes, also over windows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from head_models import head_model

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.generation.heads import Answer
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.pairs import OVERLAP, Pair, PairForm, Window

GOLDEN = json.loads((Path(__file__).parent / "golden_heads.json").read_text(encoding="utf-8"))
WORDS = "a good film was bad and so it is not word1 word2 word3".split()
LONG = " ".join(WORDS[i * i % len(WORDS)] for i in range(70))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spans")
    export_onnx(head_model("bert-spans", folder), folder / "onnx")
    return folder


@pytest.fixture(scope="module", params=["model", "onnx"])
def model(request: pytest.FixtureRequest, folder: Path) -> Transformer | OnnxTransformer:
    return Transformer.load(folder / "model") if request.param == "model" else OnnxTransformer(folder / "onnx")


def assert_same(one: Answer | None, other: Answer | None) -> None:
    """A GPU's sums go by the shape of the batch."""
    assert one is not None
    assert other is not None
    assert one.probability == pytest.approx(other.probability, abs=2e-6)
    assert replace(one, probability=other.probability) == other


def test_answers_are_those_of_transformers(model: Transformer | OnnxTransformer) -> None:
    questions, contexts = map(list, zip(*GOLDEN["asked"], strict=True))
    found = model.answer(questions, contexts)
    for context, ours, theirs in zip(contexts, found, GOLDEN["answered"], strict=True):
        assert ours is not None
        assert (ours.start, ours.end) == (theirs["start"], theirs["end"])
        assert ours.probability == pytest.approx(theirs["probability"], abs=2e-6)
        assert ours.text == context[ours.start : ours.end]
    assert_same(model.answer(questions[1], contexts[1]), found[1])


@pytest.mark.parametrize("most", [1, 3, 15])
def test_a_long_context_is_read_in_windows(model: Transformer | OnnxTransformer, most: int) -> None:
    """Against every begin and end of every window, one by one."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    question = tokenizer.encode("so is it good")[1:-1]
    context = tokenizer.encode_places([LONG])[0].alone()
    windows = tokenizer.pair_form(26).windows(question, context.ids)
    assert len(windows) > 5
    logits = []
    for window in windows:
        row = model.token_logits([window.row.ids], token_types=[window.row.token_types])
        logits.append(np.asarray(row, np.float64)[0])
    kept = [[0, *range(w.at, w.at + w.count)] for w in windows]
    sums = np.sum([np.exp(x[rows]).sum(axis=0) for x, rows in zip(logits, kept, strict=True)], axis=0)
    best = max(
        (np.exp(x[w.at + i, 0] + x[w.at + j, 1]) / sums.prod(), w.first + i, w.first + j)
        for x, w in zip(logits, windows, strict=True)
        for i in range(w.count)
        for j in range(i, min(w.count, i + most))
    )
    found = model.answer("so is it good", LONG, max_answer_tokens=most)
    assert found is not None
    assert found.probability == pytest.approx(best[0], rel=1e-6)
    first, last = context.places[best[1]], context.places[best[2]]
    assert first is not None
    assert last is not None
    assert (found.start, found.end, found.text) == (first[0], last[1], LONG[first[0] : last[1]])


SPECIFICATION = {
    "post_processor": {
        "type": "TemplateProcessing",
        "special_tokens": {"<s>": {"ids": [0]}, "</s>": {"ids": [1]}},
        "pair": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            *[{"SpecialToken": {"id": "</s>", "type_id": 0}}] * 2,
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "</s>", "type_id": 1}},
        ],
    }
}


def test_windows_overlap_and_hold_everything() -> None:
    assert PairForm(SPECIFICATION, 12).windows([5, 6], [*range(10, 20)]) == [
        Window(Pair([0, 5, 6, 1, 1, *part, 1], [0] * 5 + [1] * (len(part) + 1)), 5, first, len(part))
        for first, part in ((0, [*range(10, 16)]), (3, [*range(13, 19)]), (6, [*range(16, 20)]))
    ]
    assert PairForm(SPECIFICATION, 12).before == 1
    for most in (6, 7, 12, 300, 600):
        form = PairForm(SPECIFICATION, most)
        for length in (1, 2, 7, 128, 129, 701):
            first, second = [5] * form.half, [*range(10, 10 + length)]
            windows = form.windows(first, second)
            assert {i for w in windows for i in range(w.first, w.first + w.count)} == set(range(length))
            assert all(len(w.row.ids) <= most for w in windows)
            assert all(w.row.ids[w.at : w.at + w.count] == second[w.first : w.first + w.count] for w in windows)
            shared = [a.first + a.count - b.first for a, b in pairwise(windows)]
            assert all(each == min(OVERLAP, windows[0].count // 2) for each in shared)


def test_one_question_of_many_texts_and_many_of_one(model: Transformer | OnnxTransformer) -> None:
    texts = ["a good film", "", "it was bad"]
    found = model.answer("is it good", texts)
    assert [each is None for each in found] == [False, True, False]
    assert model.answer("is it good", "") is None
    assert_same(model.answer(["is it good", "not"], "it was bad")[0], found[2])


def test_what_cant_be_answered_is_refused(model: Transformer | OnnxTransformer) -> None:
    with pytest.raises(UserError, match="question 2: 30 tokens, at most 11 leave room for its context"):
        model.answer(["good", "good " * 30], "film")
    with pytest.raises(UserError, match="2 questions and 3 contexts: give as many of both, or one of either"):
        model.answer(["a", "b"], ["a", "b", "c"])
    with pytest.raises(UserError, match="line 1: must be text, not int"):
        model.answer([3], "a")  # type: ignore[list-item]
    with pytest.raises(UserError, match="max_answer_tokens"):
        model.answer("a", "b", max_answer_tokens=0)
    with pytest.raises(UserError, match="tag needs a head of kind 'token-classes'; its head is of kind 'spans'"):
        model.tag("good")
