"""`explain` of every family that can be imported, with every head: its checkpoint and its exported folder."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import thinned
from explained_models import TEXTS, data_of, write_explained
from head_models import head_model
from published_folders import checkpoint
from random_models import random_weights

from export import export_onnx
from export.explain.command import explain
from export.validate.reference import Reference
from export.validate.reference.layers import softmax
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "mlx_transformer" / "families"
FOLDERS = [path for kind in ("golden_encoders", "golden") for path in sorted((GOLDEN / kind).iterdir())]
TEXT = "one two six"


def points_of(page: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The recorded pass of a page, and its points."""
    found = re.search(r'id="walk-data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    assert found is not None
    [walk] = json.loads(found[1])["models"]
    arrays = {
        name: np.frombuffer(base64.b64decode(each["values"]), f"<f{each['bits'] // 8}").reshape(each["shape"])
        for name, each in walk["points"]["arrays"].items()
    }
    return walk, arrays | {name: arrays[other] for name, (other, _) in walk["points"]["equal"].items()}


def taps_of(config: TransformerConfig, weights: dict[str, np.ndarray], walk: dict[str, Any], kind: type):
    taps: dict[str, np.ndarray] = {}
    sides = [np.array([ids]) for ids in (walk["tokens"]["source"], walk["tokens"]["target"]) if ids]
    kinds = {"token_types": np.array([walk["types"]])} if walk["types"] else {}
    reference = Reference(config, weights, kind, inner_points=True)
    reference(*sides, tap=lambda name, value: taps.update({name: value}), **kinds)
    return taps


def assert_shown(page: Path, config: TransformerConfig, weights: dict[str, np.ndarray]) -> None:
    """Every number of the walk is the reference's by the rule; what relative positions add explains the weights."""
    walk, points = points_of(page)
    exact, single = (taps_of(config, weights, walk, kind) for kind in (np.float64, np.float32))
    names = [name for name in points if not name.endswith(".bias")]
    stacks = [stack for stack in ("encoder", "decoder") if getattr(config, f"{stack}_layers")]
    wanted = [f"{stack}.embedding.rows" for stack in stacks]
    wanted += [
        f"{stack}.layers.0.self_attention.scores" for stack in stacks if not (stack == "decoder" and config.recurrent)
    ]
    wanted += [f"{stack}.layers.{getattr(config, f'{stack}_layers') - 1}" for stack in stacks]
    assert {*wanted, "logits"} <= {*names}
    assert ("head" in names) == (config.head.activation is not None)
    truths = {name: Truth.of(exact[name], single[name], np.ones(len(exact[name]), bool)) for name in names}
    budget = budget_for("float32", "cpu")
    for name, truth in truths.items():
        deviation = Deviation.of(points[name].reshape(truth.t64.shape), truth)
        assert Measurement.of(deviation, truth.scale, ErrorScale.pooled([truth.scale]), budget).passed, (
            name,
            deviation,
        )
    biases = [name for name in points if name.endswith(".bias")]
    assert bool(biases) == config.positions.startswith("relative")
    for name in biases:
        of = name.removesuffix(".bias")
        scores, shown = points[f"{of}.scores"].astype(np.float64) + points[name], points[f"{of}.weights"]
        hidden = np.triu(np.full(scores.shape[1:], -np.inf), 1) if of.startswith("decoder") else 0
        np.testing.assert_allclose(softmax(scores + hidden), shown, atol=1e-5)
    if config.token_types:
        assert "token_type_embedding.weight" in walk["parameters"]


@pytest.mark.parametrize("golden", thinned(FOLDERS, 25), ids=lambda golden: golden.name)
def test_every_number_of_every_family_is_the_models(golden: Path, tmp_path: Path) -> None:
    """Each golden folder's config with a vocabulary that reads text."""
    import_huggingface(golden, tmp_path / "golden")
    tokenizer = Tokenizer.train(TEXTS, vocab_size=290, mask=True)
    values = open_checkpoint(tmp_path / "golden").config.to_dict()
    sizes = dict(vocab_size=tokenizer.vocab_size, source_vocab_size=tokenizer.vocab_size, pad_id=0, bos_id=1, eos_id=2)
    config = TransformerConfig.from_dict({**values, **sizes})
    weights = random_weights(config, 5)
    save_checkpoint(tmp_path / "model", config, weights, tokenizer.to_json(), force=True)
    export_onnx(tmp_path / "model", tmp_path / "onnx", force=True)
    for kind in ("model", "onnx"):
        page = tmp_path / f"{kind}.html"
        changes: dict[str, Any] = {"max_new_tokens": 4} if config.has_decoder else {}
        explain(tmp_path / kind, [TEXT], out=page, **changes)
        assert_shown(page, config, weights)
        data = data_of(page)
        words = config.head.kind == "vocabulary"
        assert bool(data["steps"]["of"]) == bool(data["lens"]["of"]) == words
        if words:  # the last layer, read as if it were the last one
            last = data["lens"]["of"][0][-1]
            for ids, shares, step in zip(last["ids"], last["p"], data["steps"]["of"][0], strict=True):
                assert ids == step["ids"][: len(ids)]
                np.testing.assert_allclose(shares, step["p"][: len(ids)], rtol=1e-3)


@pytest.mark.parametrize("kind", thinned(("marian apart", "m2m100", "t5", "nllb", "bart"), 5))
def test_published_vocabularies_and_languages(kind: str, tmp_path: Path) -> None:
    """What is explained is what `translate` reads and writes."""
    folder = checkpoint(kind, tmp_path)
    several = {"nllb": "deu_Latn", "m2m100": "de"}.get(kind)
    languages: dict[str, Any] = {} if several is None else dict(source_language=several, target_language=several)
    told: dict[str, Any] = languages | ({"task_prefix": "Maria: "} if kind == "t5" else {})
    page = tmp_path / "page.html"
    explain(folder, ["Anna"], out=page, max_new_tokens=4, **told)
    data, model = data_of(page), Transformer.load(folder)
    prefix = told.get("task_prefix", "")
    assert model.tokenizer is not None
    ids = model.tokenizer.source.encode(prefix + "Anna")
    [best] = model.generate([ids], max_new_tokens=4, **languages)
    first = [] if several is None else [model.generation["languages"][several]]
    assert points_of(page)[0]["tokens"]["source"] == [*first, *ids]
    assert data["written"][: len(best)] == best
    assert data["given"] == (several is not None)
    if several is not None:
        with pytest.raises(UserError, match="unknown language"):
            explain(folder, ["Anna"], out=tmp_path / "no.html", target_language="klingon")


EMBEDDINGS = {
    "mean": TextEmbedding(pooling=("mean",), normalize=True),
    "deep": TextEmbedding(
        pooling=("cls", "max"),
        dense=(Dense(width=24), Dense(width=8, activation="relu", bias=False)),
        prompts={"query": "seven eight "},
        default_prompt="query",
        prompt_counts=False,
        weights={
            name: np.random.default_rng(3).normal(0, 0.3, shape).astype(np.float32)
            for name, shape in {"dense.0.weight": (24, 64), "dense.0.bias": (24,), "dense.1.weight": (8, 24)}.items()
        },
    ),
}


def vector_of(embedding: TextEmbedding, memory: np.ndarray, skipped: int) -> dict[str, np.ndarray]:
    """Each step of a text's vector, in the precision of the last layer (L, D)."""
    rows = memory[skipped:]
    ways = {"mean": rows.mean(axis=0), "cls": rows[0], "max": rows.max(axis=0)}
    x = np.concatenate([ways[way] for way in embedding.pooling])
    found = {"text.pooled": x}
    for i, layer in enumerate(embedding.dense):
        x = embedding.weights[f"dense.{i}.weight"].astype(x.dtype) @ x
        x = x + embedding.weights[f"dense.{i}.bias"].astype(x.dtype) if layer.bias else x
        x = np.tanh(x) if layer.activation == "tanh" else np.maximum(x, 0)
        found[f"text.dense.{i}"] = x
    found["text.vector"] = x / np.linalg.norm(x) if embedding.normalize else x
    return {name: each[None] for name, each in found.items()}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_texts_vector_step_by_step(name: str, tmp_path: Path) -> None:
    """Of what folders of sentence-transformers hold; it is the one that `embed` gives."""
    embedding = EMBEDDINGS[name]
    folder = write_explained(tmp_path, "encoder", onnx=False) / "model"
    opened = open_checkpoint(folder)
    weights = dict(opened.tensors())
    save_checkpoint(
        folder,
        opened.config,
        weights,
        opened.tokenizer_json(),
        texts=embedding.texts(),
        tensors=embedding.tensors(),
        force=True,
    )
    explain(folder, [TEXT], out=tmp_path / "page.html")
    walk, points = points_of(tmp_path / "page.html")
    said = {"pooling": list(embedding.pooling), "normalize": embedding.normalize}
    assert walk["embedding"] == {**said, "dense": [layer.activation for layer in embedding.dense]}
    tokenizer = Tokenizer.load(folder)
    assert walk["tokens"]["source"] == tokenizer.encode(embedding.prompt() + TEXT)
    skipped = 0 if embedding.prompt_counts else len(tokenizer.encode(embedding.prompt().strip())) - 1
    last = f"encoder.layers.{opened.config.encoder_layers - 1}"
    steps = [
        vector_of(embedding, taps_of(opened.config, weights, walk, kind)[last][0], skipped)
        for kind in (np.float64, np.float32)
    ]
    budget = budget_for("float32", "cpu")
    for step, exact in steps[0].items():
        truth = Truth.of(exact, steps[1][step], np.ones(len(exact), bool))
        deviation = Deviation.of(points[step], truth)
        assert Measurement.of(deviation, truth.scale, ErrorScale.pooled([truth.scale]), budget).passed, (
            step,
            deviation,
        )
    np.testing.assert_allclose(points["text.vector"][0], Transformer.load(folder).embed(TEXT), atol=1e-5)


def test_two_texts_are_read_as_a_pair(tmp_path: Path) -> None:
    """The kinds of their tokens are the two texts; every number is the reference's of just these kinds."""
    folder = head_model("bert-classes", tmp_path)
    opened = open_checkpoint(folder)
    explain(folder, ["a good film .", "a bad film ."], out=tmp_path / "page.html")
    walk, _ = points_of(tmp_path / "page.html")
    [pair] = Tokenizer.load(folder).encode_pairs([("a good film .", "a bad film .")])
    assert (walk["tokens"]["source"], walk["types"]) == (pair.ids, pair.token_types)
    assert set(walk["types"]) == {0, 1}
    assert_shown(tmp_path / "page.html", opened.config, dict(opened.tensors()))
    with pytest.raises(UserError, match="an encoder alone reads two, as a pair"):
        explain(write_explained(tmp_path, "decoder", onnx=False) / "model", ["one", "two"], out=tmp_path / "no.html")
