"""The vector of a text as an output of the encoder's graph: equal to the reference by the rule, used by `embed`, and
left to whoever runs the package where no graph can make it."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from combined import combined
from numpy.typing import NDArray
from random_models import random_weights, write_model
from small_models import alone, write_text_model

from export import OnnxTransformer, export_onnx
from export.interface import SENTENCE_EMBEDDING, TEXT_OUTPUTS, Request
from export.validate import compare
from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.heads import EMBEDDING, Kind, Pooling
from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.families.sentence_folder import read_sentence_folder
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.system.errors import UserError

WIDTH = alone("paper", "encoder").d_model
RNG = np.random.default_rng(0)
LINEAR: tuple[Pooling, ...] = ("mean", "cls", "last", "weighted_mean", "mean_sqrt_len")
MADE = {
    "mean": TextEmbedding(normalize=True),
    "all ways": TextEmbedding(pooling=(*LINEAR, "max")),
    "all linear ways": TextEmbedding(pooling=LINEAR, normalize=True),
    "dense": TextEmbedding(
        pooling=("last", "mean"),
        dense=(Dense(width=44, activation="gelu"), Dense(width=29, bias=False)),
        normalize=True,
        weights={
            "dense.0.weight": RNG.standard_normal((44, 2 * WIDTH)).astype(np.float32) / 8,
            "dense.0.bias": RNG.standard_normal(44).astype(np.float32),
            "dense.1.weight": RNG.standard_normal((29, 44)).astype(np.float32) / 6,
        },
    ),
    "three heads": TextEmbedding(
        pooling=("cls",),
        normalize=True,
        sparse=True,
        multi=24,
        weights={
            "sparse.weight": RNG.standard_normal((1, WIDTH)).astype(np.float32) / 6,
            "sparse.bias": np.full(1, 0.1, np.float32),
            "multi.weight": RNG.standard_normal((24, WIDTH)).astype(np.float32) / 6,
            "multi.bias": RNG.standard_normal(24).astype(np.float32) / 4,
        },
    ),
}
PACKAGES: dict[str, dict[str, Any]] = {
    "portable": {},
    "cpu": {"target": "cpu"},
    "web": {"target": "web"},
    "sixteen bits": {"target": "cuda", "precision": "float16"},
    "int8": {"precision": "int8", "int8_scales": "token"},
}
ROWS = [RNG.integers(3, 50, n).tolist() for n in (7, 1, 30, 4, 3, 12, 8, 2, 9)]


def written(embedding: TextEmbedding, folder: Path, **options: Any) -> tuple[Path, Path]:
    return write_model(alone("paper", "encoder"), folder, 3, embedding=embedding, accept_loss=True, **options)


def outputs(package: Path) -> set[str]:
    graphs = [onnx.load(file, load_external_data=False).graph for file in (package / "onnx").glob("*.onnx")]
    return {output.name for graph in graphs for output in graph.output}


def vectors(model: OnnxTransformer, rows: list[list[int]], graph: bool = True) -> NDArray[np.float32]:
    """Those of the graph, or those that are made of its output."""
    own = model.graph_vectors if graph else None
    embedder = Embedder(model.config, None, model.text_embedding, model.token_vectors, graph=own)
    assert (embedder._graph is not None) == graph
    return embedder.vectors(rows, of_text=False)


@pytest.mark.fast("mean-portable", "three heads-cpu", "dense-web")
@pytest.mark.parametrize(("made", "package"), combined(MADE, PACKAGES))
def test_it_is_the_reference_s_by_the_rule_in_whatever_company(made: str, package: str, tmp_path: Path) -> None:
    checkpoint, folder = written(MADE[made], tmp_path, **PACKAGES[package])
    given = [TEXT_OUTPUTS[kind] for kind in MADE[made].kinds]
    assert {"last_hidden_state", *given} <= outputs(folder)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, threads=1)
    assert report.equal, report.failures()
    points = [point for point in report.points if point.tap in TEXT_OUTPUTS.values()]
    assert [(point.tap, point.inputs) for point in points] == [(name, len(report.inputs)) for name in given]
    model = OnnxTransformer(folder, threads=1)
    together = vectors(model, ROWS)
    np.testing.assert_array_equal(vectors(model, ROWS[::-1])[::-1], together)
    np.testing.assert_array_equal([vectors(model, [row])[0] for row in ROWS], together)
    np.testing.assert_allclose(together, vectors(model, ROWS, graph=False), rtol=0, atol=3e-6)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_tokens_have_is_0_where_there_is_none(package: str, tmp_path: Path) -> None:
    _, folder = written(MADE["three heads"], tmp_path, **PACKAGES[package])
    given = OnnxTransformer(folder, threads=1)
    ids, mask = np.full((3, 9), 7), np.ones((3, 9), np.int64)
    mask[1, 5:], mask[2, 1:] = 0, 0
    weights, tokens = (given.graphs.vectors({"source_ids": ids}, mask, kind) for kind in ("sparse", "multi"))
    assert (weights.shape, tokens.shape) == ((3, 9), (3, 9, 24))
    assert not weights[mask == 0].any()
    later = (mask == 1) & (np.arange(9) > 0)
    assert not tokens[~later].any()
    np.testing.assert_allclose(np.linalg.norm(tokens[later], axis=1), 1, rtol=0, atol=1e-6)
    memory = given.encode(ids, mask)
    for row, real, own, vectors_of in zip(memory, mask == 1, weights, tokens, strict=True):
        embedding = MADE["three heads"]
        np.testing.assert_allclose(own[real], embedding.token_weights(row[real]), rtol=0, atol=5e-6)
        np.testing.assert_allclose(vectors_of[real][1:], embedding.token_vectors(row[real]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", ["sparse", "multi"])
def test_another_head_than_the_checkpoint_s_is_found(kind: Kind, tmp_path: Path) -> None:
    _, folder = written(MADE["three heads"], tmp_path)

    def compared_with(embedding: TextEmbedding, name: str) -> Any:
        config = alone("paper", "encoder")
        told: dict[str, Any] = {"texts": embedding.texts(), "tensors": embedding.tensors()}
        checkpoint = save_checkpoint(tmp_path / name, config, random_weights(config, 3), **told)
        return compare(checkpoint, folder, ["onnxruntime"], seed=5, threads=1)

    own = MADE["three heads"]
    moved = {f"{kind}.bias": own.weights[f"{kind}.bias"] + np.float32(0.001)}
    report = compared_with(replace(own, weights={**own.weights, **moved}), "wrong")
    assert {point.tap for point in report.points if not point.passed} == {TEXT_OUTPUTS[kind]}
    files = compared_with(MADE["mean"], "bare").files
    assert files.misleading
    assert f"mlx_transformer.json: {SENTENCE_EMBEDDING}.{kind} is " in "; ".join(files.problems)


def test_a_vector_without_its_prompt_is_made_of_the_graph_s_output(tmp_path: Path) -> None:
    embedding = TextEmbedding(prompts={"query": "q: "}, prompt_counts=False)
    _, folder = written(embedding, tmp_path)
    assert SENTENCE_EMBEDDING not in outputs(folder)
    model = OnnxTransformer(folder)
    assert model.graph_vectors is None
    assert vectors(model, ROWS, graph=False).shape == (len(ROWS), embedding.width(WIDTH))


def test_a_graph_s_vector_is_used_only_if_it_is_the_one_asked_for(tmp_path: Path) -> None:
    _, folder = written(MADE["mean"], tmp_path)
    model = OnnxTransformer(folder)

    def uses_graph(embedding: TextEmbedding, **options: Any) -> bool:
        graph = model.graph_vectors
        embedder = Embedder(model.config, None, embedding, model.token_vectors, graph=graph, **options)
        return embedder._graph is not None

    mean = MADE["mean"]
    assert uses_graph(mean)
    assert uses_graph(replace(mean, prompts={"query": "q: "}, lower_case=True, max_length=9, pooling=["mean"]))
    assert not uses_graph(replace(mean, pooling=("cls",)))
    assert not uses_graph(replace(mean, prompt_counts=False))
    for option in ({"pooling": "max"}, {"normalize": False}, {"dimensions": 4}):
        assert not uses_graph(mean, **option)


def test_a_checkpoint_that_says_nothing_of_vectors_can_t_judge_them(tmp_path: Path) -> None:
    """Of the same weights it is another export's; of others it is no such model at all."""
    _, folder = written(MADE["three heads"], tmp_path)
    config = alone("paper", "encoder")
    same = save_checkpoint(tmp_path / "same", config, random_weights(config, 3))
    report = compare(same, folder, ["onnxruntime"], seed=5)
    assert report.exit_code == 1
    assert report.files is not None
    assert report.files.misleading
    assert f"mlx_transformer.json: {SENTENCE_EMBEDDING} is " in "; ".join(report.files.problems)
    for embedding, said in ((None, "has no embedding.json"), (MADE["mean"], "its embedding.json has nothing")):
        told: dict[str, Any] = {}
        if embedding is not None:
            told = {"texts": embedding.texts(), "tensors": embedding.tensors()}
        other = save_checkpoint(tmp_path / said, config, random_weights(config, 4), **told)
        with pytest.raises(UserError, match=f"{re.escape(said)}, by which the graphs' "):
            compare(other, folder, ["onnxruntime"], seed=5)


def test_what_a_folder_says_is_read_as_it_was_written() -> None:
    config = alone("paper", "encoder")
    for embedding in MADE.values():
        request = Request(config=config, embedding=embedding.arithmetic)
        assert Request.read(request.written(), config) == request


def test_embed_takes_the_vectors_of_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_text_model(tmp_path, architecture="encoder", decoder_layers=0)
    (folder / "model" / EMBEDDING).write_text(MADE["mean"].json())
    model = OnnxTransformer(export_onnx(folder / "model", tmp_path / "package"))
    texts = ["one two three", "four"]
    pooled = vectors(model, model.embedder().rows(texts), graph=False)
    monkeypatch.setattr(OnnxTransformer, "token_vectors", None)
    np.testing.assert_allclose(model.embed(texts), pooled, rtol=0, atol=1e-6)


def test_a_model_keeps_its_embedder_and_ends_without_the_collector(tmp_path: Path) -> None:
    """A model whose embedder held it would keep its sessions, which the garbage collector doesn't see the size of."""
    folder = write_text_model(tmp_path, architecture="encoder", decoder_layers=0)
    (folder / "model" / EMBEDDING).write_text(MADE["mean"].json())
    model = OnnxTransformer(export_onnx(folder / "model", tmp_path / "package"))
    assert model.embedder() is model.embedder()
    assert model.embedder(normalize=False) is not model.embedder()
    assert model.embed("one two").shape == model.embed("one two", normalize=False).shape
    sessions = [weakref.ref(session) for session in model.sessions.values()]
    gc.disable()
    try:
        del model
        assert [session() for session in sessions] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("told", [{"pooling": ["wide"], "dense": [], "normalize": True}, {"pooling": 3}, "mean", []])
def test_a_folder_that_says_nonsense_of_vectors_is_damaged(told: Any, tmp_path: Path) -> None:
    _, folder = written(MADE["mean"], tmp_path)
    settings_file = folder / "mlx_transformer.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), SENTENCE_EMBEDDING: told}))
    with pytest.raises(UserError, match=r"mlx_transformer\.json: damaged \(.*; export the model again"):
        OnnxTransformer(folder, verify=False)


@pytest.mark.fast("mean-portable-5", "mean-cpu-16", "all ways-web-16")
@pytest.mark.parametrize(
    ("made", "package", "width"),
    [
        *(("mean", "portable", 5), ("mean", "cpu", 16)),
        *(("dense", "portable", 16), ("dense", "cpu", 5), ("all ways", "web", 16)),
    ],
)
def test_fewer_dimensions_are_the_first_ones_at_length_1_again(
    made: str, package: str, width: int, tmp_path: Path
) -> None:
    checkpoint, folder = written(MADE[made], tmp_path, dimensions=width, **PACKAGES[package])
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, threads=1)
    assert report.equal, report.failures()
    assert SENTENCE_EMBEDDING in {point.tap for point in report.points}
    found = vectors(OnnxTransformer(folder, threads=1), ROWS)
    assert found.shape == (len(ROWS), width)
    model = Transformer.load(checkpoint)
    whole = Embedder(model.config, None, MADE[made], model.token_vectors, dimensions=width)
    np.testing.assert_allclose(found, whole.vectors(ROWS, of_text=False), rtol=0, atol=3e-6)
    theirs = read_sentence_folder(folder).embedding
    assert theirs.width(WIDTH) == width
    np.testing.assert_array_equal(theirs.weights[f"dense.{len(theirs.dense) - 1}.weight"][:, :width], np.eye(width))


@pytest.mark.parametrize(
    ("dimensions", "told"), [(0, "dimensions=0: the model's vectors have"), (999, "dimensions=999: the model's")]
)
def test_dimensions_that_it_has_not(dimensions: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        written(MADE["mean"], tmp_path, dimensions=dimensions)
    assert not (tmp_path / "onnx").exists()


def test_a_model_without_vectors_has_none_to_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dimensions=16: .*has no embedding.json"):
        write_model(alone("paper", "encoder"), tmp_path, 3, dimensions=16)
