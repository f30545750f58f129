"""Heads of an encoder alone: what is a vector or a logit of each row or position, in every runtime and target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import combined
from random_models import write_model
from small_models import random_weights

from export.validate import compare
from export.validate.checks.gradients import check_gradients
from export.validate.reference import Reference
from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import VOCABULARY, Head
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.recipe import Recipe

LABELS = ("bad", "fair", "good")
SIZES = dict(vocab_size=40, d_model=16, heads=4, d_ff=24, encoder_layers=2, decoder_layers=0, max_positions=24)
HEADS = {
    "hidden": Head(kind="hidden"),
    "pooled": Head(kind="pooled", activation="tanh"),
    "words": Head(activation="gelu", norm=True),
    "classes": Head(kind="classes", labels=LABELS, activation="relu"),
    "mean": Head(
        kind="classes", labels=LABELS, pooling="mean", activation="gelu_tanh", norm=True, bias=False, several=True
    ),
    "tokens": Head(kind="token-classes", labels=LABELS),
    "spans": Head(kind="spans", activation="silu"),
}


def config_of(head: Head, **changes: object) -> TransformerConfig:
    values = {**SIZES, "positions": "learned", "output_bias": head.classifies, "head": head, **changes}
    return TransformerConfig.from_dict({"architecture": "encoder", **values})


@pytest.mark.fast("mean-portable", "words-portable", "spans-portable", "classes-cpu")
@pytest.mark.parametrize(("name", "target"), combined(HEADS, ["portable", "cpu"]))
def test_every_head_is_equal_in_every_target(name: str, target: str, tmp_path: Path) -> None:
    config = config_of(HEADS[name], norm_placement="pre" if name == "mean" else "post")
    model, onnx = write_model(config, tmp_path, 5, target=target)
    report = compare(model, onnx, ["mlx", "onnxruntime"] if target == "portable" else ["onnxruntime"], 5, threads=1)
    assert report.equal, report.failures()


@pytest.mark.fast("classes-{'precision': 'int8'}", "pooled-{'precision': 'float16'}")
@pytest.mark.parametrize(
    ("name", "options"),
    combined(["pooled", "classes", "mean", "spans"], [dict(precision="float16"), dict(precision="int8")]),
    ids=str,
)
def test_every_head_is_equal_in_fewer_bits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, onnx = write_model(config_of(HEADS[name]), tmp_path, 5, accept_loss=True, **options)
    report = compare(model, onnx, ["onnxruntime"], 5, threads=1, searches=False)
    assert report.equal, report.failures()


@pytest.mark.parametrize("name", HEADS)
def test_a_config_with_a_head_is_kept(name: str) -> None:
    config = config_of(HEADS[name])
    assert TransformerConfig.from_json(config.to_json()) == config
    assert "head" not in config_of(VOCABULARY).to_dict()
    assert json.loads(config.to_json())["head"] == HEADS[name].to_dict()


def test_what_a_row_gives_is_of_its_first_token_or_the_mean_of_its_tokens() -> None:
    """Whichever side is padded."""
    ids = np.array([[0, 0, 5, 6, 7], [0, 8, 9, 10, 11]])
    mask = ids > 0
    for pooling in ("first", "mean"):
        config = config_of(Head(kind="classes", labels=LABELS, pooling=pooling), positions="none")
        reference = Reference(config, random_weights(config))
        hidden = reference.encode(ids, mask)
        rows = (
            hidden[[0, 1], [2, 1]] if pooling == "first" else np.stack([hidden[0, 2:].mean(0), hidden[1, 1:].mean(0)])
        )
        np.testing.assert_allclose(reference(ids, mask=mask), reference.classify(rows, None), rtol=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(kind="classes"), "kind='classes' needs labels"),
        (dict(labels=["a"]), "labels: kind='vocabulary' has none"),
        (dict(kind="pooled"), "kind='pooled' needs an activation"),
        (dict(kind="hidden", activation="tanh"), "kind='hidden' has no activation"),
        (dict(norm=True), "norm and bias are of the dense layer"),
        (dict(kind="spans", pooling="mean"), "pooling='mean': kind='spans' gives no vector of a row"),
        (dict(kind="spans", several=True), "several: kind='spans' has no classes of rows"),
        (dict(kind="token-classes", labels=["a"], scores=True), "scores: kind='token-classes' has no classes of rows"),
        (dict(kind="classes", labels=["a"], several=True, scores=True), "several and scores: give one of them"),
        (dict(kind="token-classes", labels=[1]), r"labels=\[1\] must be a list of texts"),
        (dict(kind="clases"), "kind='clases' is not one of vocabulary, hidden"),
        (dict(knd="classes"), "unknown key 'knd'"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TransformerConfig.from_dict({**SIZES, "architecture": "encoder", "head": values})


def test_a_head_is_of_an_encoder_alone() -> None:
    config = config_of(HEADS["hidden"])
    for changes, message in (
        (dict(architecture="encoder-decoder", decoder_layers=1), "head: of an encoder alone"),
        (dict(output_bias=True), "are of a classifier, which a head of kind 'hidden' lacks"),
        (dict(tie_embeddings="none"), "a head of kind 'hidden' multiplies by no embedding"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(config, **changes)


def test_what_needs_words_says_so(tmp_path: Path) -> None:
    model, _ = write_model(config_of(HEADS["classes"]), tmp_path, 5)
    with pytest.raises(UserError, match="fill needs logits of words; its head is of kind 'classes'"):
        Transformer.load(model).fill(["a <mask>"])
    with pytest.raises(UserError, match="gradients are those of logits of words"):
        check_gradients(config_of(HEADS["pooled"]), {}, 1)
    with pytest.raises(UserError, match="no objective learns a head of kind 'hidden'"):
        Recipe.from_dict(
            dict(
                model=dict(head=dict(kind="hidden")),
                training=dict(objective="masked-language-model"),
                data=dict(text="corpus.txt", vocab_size=300),
            )
        )
