"""Texts and pairs in classes: the same in MLX and in ONNX Runtime, by what the model's own logits say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from export import OnnxTransformer, export_onnx
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface
from mlx_transformer.system.errors import UserError

GOLDEN = Path(__file__).parents[1] / "families" / "golden_encoders"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a good film was bad and so it is not".split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    shutil.copytree(GOLDEN / "bert-classes", folder / "theirs")
    values = json.loads((folder / "theirs" / "config.json").read_text(encoding="utf-8"))
    values |= dict(cls_token_id=2, sep_token_id=3)
    (folder / "theirs" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    words = [*WORDS, *(f"word{i}" for i in range(40 - len(WORDS)))]
    (folder / "theirs" / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    assert import_huggingface(folder / "theirs", folder / "model") == []
    return folder / "model"


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
        assert [s.probability for s in several] == pytest.approx(sorted(1 / (1 + np.exp(-logits)), reverse=True), 1e-5)


def test_what_cant_be_classified_is_refused(model: Path) -> None:
    opened = Transformer.load(model)
    with pytest.raises(UserError, match="text 2: 32 tokens, the model takes at most 26"):
        opened.classify(["good", "good " * 30])
    with pytest.raises(UserError, match=r"text 1: must be text, or a pair \(text, text\), not int"):
        opened.classify([3])  # type: ignore[list-item]
    assert len(opened.classify(("good " * 30, "bad"))) == 3  # a pair loses what is too much
