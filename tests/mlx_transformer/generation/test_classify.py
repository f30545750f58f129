"""Texts and pairs in classes: the same in MLX and in ONNX Runtime, by what the model's own logits say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from head_models import head_model, reranker

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.generation.files import classify_lines
from mlx_transformer.generation.line_files import write_lines
from mlx_transformer.generation.text_options import ClassifyOptions
from mlx_transformer.system.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_model("bert-classes", tmp_path_factory.mktemp("classes"))


def test_probabilities_are_the_softmax_of_the_logits_in_both_runtimes(model: Path, tmp_path: Path) -> None:
    mlx, onnx = Transformer.load(model), OnnxTransformer(export_onnx(model, tmp_path / "onnx"), threads=1)
    tokenizer = mlx.tokenizer
    assert tokenizer is not None
    texts = ["a good film", ("it was bad", "so it is not good"), "not"]
    [pair] = tokenizer.encode_pairs([("it was bad", "so it is not good")])
    rows = [(tokenizer.encode("a good film"), None), (pair.ids, pair.token_types), (tokenizer.encode("not"), None)]
    assert set(pair.token_types) == {0, 1}
    for runtime in (mlx, onnx):
        found = runtime.classify(texts)
        assert [[scored.label for scored in one] for one in found] == [
            [s.label for s in o] for o in mlx.classify(texts)
        ]
        for one, (ids, types) in zip(found, rows, strict=True):
            logits = np.array(mlx([ids], token_types=None if types is None else [types]), np.float64)[0]
            shares: dict[str, float] = dict(
                zip(("bad", "fair", "good"), np.exp(logits) / np.exp(logits).sum(), strict=True)
            )
            assert [scored.label for scored in one] == sorted(shares, key=lambda label: -shares[label])
            assert all(abs(scored.probability - shares[scored.label]) < 1e-6 for scored in one)
        assert runtime.classify("a good film") == found[0]
        several = runtime.classify(("it was bad", "so it is not good"), several=True)
        logits = np.array(mlx([pair.ids], token_types=[pair.token_types]), np.float64)[0]
        assert len(several) == 3
        assert [s.probability for s in several] == pytest.approx(sorted(1 / (1 + np.exp(-logits)), reverse=True), 1e-5)


def test_what_cant_be_classified_is_refused(model: Path) -> None:
    opened = Transformer.load(model)
    with pytest.raises(UserError, match="text 2: 32 tokens, the model takes at most 26"):
        opened.classify(["good", "good " * 30])
    with pytest.raises(UserError, match=r"text 1: must be text, or a pair \(text, text\), not int"):
        opened.classify([3])  # type: ignore[list-item]
    assert len(opened.classify(("good " * 30, "bad"))) == 3  # a pair loses what is too much


def test_each_class_is_by_itself_where_the_model_says_so(tmp_path: Path) -> None:
    opened = Transformer.load(head_model("bert-classes", tmp_path, problem_type="multi_label_classification"))
    assert opened.classify("not") == opened.classify("not", several=True)
    assert sum(scored.probability for scored in opened.classify("not", several=False)) == pytest.approx(1)
    assert sum(scored.probability for scored in opened.classify("not")) != pytest.approx(1)


def test_scores_are_the_model_s_numbers_as_in_the_pipeline_of_transformers(tmp_path: Path) -> None:
    """Its rule (`TextClassificationPipeline`): where problem_type is regression, no function is applied."""
    checkpoint = head_model("bert-classes", tmp_path, problem_type="regression")
    mlx, onnx = Transformer.load(checkpoint), OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx"), threads=1)
    assert mlx.tokenizer is not None
    logits = np.array(mlx([mlx.tokenizer.encode("not")]), np.float64)[0]
    assert not np.allclose(logits, 1 / (1 + np.exp(-logits)))
    for model in (mlx, onnx):
        found = model.classify("not")
        assert [each.probability for each in found] == pytest.approx(sorted(logits, reverse=True), abs=1e-5)
        assert [each.label for each in found] == [("bad", "fair", "good")[i] for i in np.argsort(-logits)]
        asked = [each.probability for each in model.classify("not", several=True)]
        assert asked == pytest.approx(sorted(1 / (1 + np.exp(-logits)), reverse=True), abs=1e-5)
    for options, key in ((ClassifyOptions(), "score"), (ClassifyOptions(several=True), "probability")):
        write_lines(classify_lines(mlx, options), output=tmp_path / f"{key}.jsonl", text=["not"])
        [line] = (tmp_path / f"{key}.jsonl").read_text(encoding="utf-8").splitlines()
        [best] = json.loads(line)["classes"]
        assert list(best) == ["label", key]
        assert best[key] == mlx.classify("not", several=options.several)[0].probability


def test_relevance_stays_between_0_and_1(tmp_path: Path) -> None:
    plain = open_checkpoint(reranker(tmp_path))
    config = replace(plain.config, head=replace(plain.config.head, scores=True))
    scoring = save_checkpoint(tmp_path / "scores", config, dict(plain.tensors()), plain.tokenizer_json())
    asked = "a good film", ["good", "it was bad", "not"]
    found = Transformer.load(scoring).rerank(*asked)
    assert found == Transformer.load(plain.folder).rerank(*asked)
    assert all(0 < each.relevance_score < 1 for each in found)
    [score] = Transformer.load(scoring).classify(("a good film", "good"))
    [relevance] = [each.relevance_score for each in found if each.index == 0]
    assert relevance == pytest.approx(1 / (1 + np.exp(-score.probability)), abs=1e-6)


def test_texts_of_one_length_are_computed_together(model: Path, tmp_path: Path, monkeypatch) -> None:
    onnx = OnnxTransformer(export_onnx(model, tmp_path / "onnx"), threads=1)
    texts = ["good", "bad film", "not", ("so", "it"), "film is", "bad"]
    alone, shapes = [onnx.classify(text) for text in texts], []
    logits = onnx.token_logits
    monkeypatch.setattr(onnx, "token_logits", lambda ids, **o: (shapes.append(np.shape(ids)), logits(ids, **o))[1])
    found = onnx.classify(texts)
    assert shapes == [(1, 5), (2, 4), (3, 3)]
    for one, other in zip(found, alone, strict=True):
        assert [scored.label for scored in one] == [scored.label for scored in other]
        assert [s.probability for s in one] == pytest.approx([s.probability for s in other], abs=1e-6)
