"""What makes one vector of a text of the vectors of its tokens."""

import json
from dataclasses import replace
from math import erf, sqrt

import numpy as np
import pytest

from mlx_transformer.core.heads import DENSE, EMBEDDING, Pooling
from mlx_transformer.core.text_embedding import Dense, TextEmbedding, read_embedding
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import write_tensors

D = 6
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.standard_normal((3, 5, D)).astype(np.float32)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
WAYS: dict[Pooling, object] = {
    "cls": lambda rows, places: rows[0],
    "max": lambda rows, places: [max(column) for column in rows.T],
    "mean": lambda rows, places: sum(rows) / len(rows),
    "mean_sqrt_len": lambda rows, places: sum(rows) / sqrt(len(rows)),
    "weighted_mean": lambda rows, places: (
        sum((p + 1) * row for p, row in zip(places, rows, strict=True)) / sum(p + 1 for p in places)
    ),
    "last": lambda rows, places: rows[-1],
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_by_its_definition_with_padding_on_either_side(way):
    found = TextEmbedding(pooling=[way]).vectors(ROWS, MASK)
    for row, mask, vector in zip(ROWS.astype(np.float64), MASK, found, strict=True):
        places = [i for i, there in enumerate(mask) if there]
        np.testing.assert_array_equal(vector, np.float32(WAYS[way](row[places], places)))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_padding_is_never_read(way):
    other = np.where(MASK[..., None] == 1, ROWS, np.float32(1e30))
    embedding = TextEmbedding(pooling=[way], normalize=True)
    np.testing.assert_array_equal(embedding.vectors(other, MASK), embedding.vectors(ROWS, MASK))
    alone = embedding.vectors(ROWS[1:2, :3], np.ones((1, 3)))
    np.testing.assert_array_equal(alone, embedding.vectors(ROWS, MASK)[1:2])


def test_several_ways_stand_side_by_side_in_their_order():
    both = TextEmbedding(pooling=["max", "cls"])
    assert both.width(D) == 2 * D
    parts = [TextEmbedding(pooling=[way]).vectors(ROWS, MASK) for way in ("max", "cls")]
    np.testing.assert_array_equal(both.vectors(ROWS, MASK), np.concatenate(parts, axis=1))


def test_fewer_numbers_of_a_unit_vector_are_one_again():
    whole = TextEmbedding(normalize=True).vectors(ROWS, MASK)
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-7)
    cut = TextEmbedding(normalize=True).vectors(ROWS, MASK, dimensions=2)
    first = whole[:, :2] / np.linalg.norm(whole[:, :2], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, first, atol=1e-6)
    np.testing.assert_array_equal(
        TextEmbedding().vectors(ROWS, MASK, dimensions=2), TextEmbedding().vectors(ROWS, MASK)[:, :2]
    )


def test_a_prompt_that_does_not_count_is_left_out_of_the_mean():
    found = TextEmbedding(prompt_counts=False).vectors(ROWS, MASK, skipped=2)
    np.testing.assert_allclose(found[0], ROWS[0, 2:].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(found[1], ROWS[1, 2])
    np.testing.assert_array_equal(TextEmbedding().vectors(ROWS, MASK, skipped=2), TextEmbedding().vectors(ROWS, MASK))


def dense(activation: str, bias: bool = True) -> TextEmbedding:
    weights = {"dense.0.weight": RANDOM.standard_normal((4, D)).astype(np.float32)}
    weights |= {"dense.0.bias": RANDOM.standard_normal(4).astype(np.float32)} if bias else {}
    return TextEmbedding(dense=[Dense(width=4, activation=activation, bias=bias)], weights=weights)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("identity", lambda x: x),
        ("tanh", np.tanh),
        ("relu", lambda x: np.where(x > 0, x, 0)),
        ("gelu", np.vectorize(lambda x: x * (1 + erf(x / sqrt(2))) / 2)),
    ],
)
def test_a_dense_layer(activation, formula, bias):
    embedding = dense(activation, bias)
    x = ROWS[0].astype(np.float64).mean(axis=0) @ embedding.weights["dense.0.weight"].T.astype(np.float64)
    x = x + embedding.weights["dense.0.bias"] if bias else x
    np.testing.assert_allclose(embedding.vectors(ROWS[:1], MASK[:1])[0], formula(x), rtol=1e-6, atol=1e-7)


def test_what_is_written_is_read(tmp_path):
    assert read_embedding(tmp_path, D) is None
    told = replace(dense("gelu"), normalize=True, prompts={"query": "query: "}, default_prompt="query", max_length=9)
    (tmp_path / EMBEDDING).write_text(told.json())
    write_tensors(tmp_path / DENSE, told.weights)
    found = read_embedding(tmp_path, D)
    assert found is not None
    assert replace(found, pooling=("mean",), dense=tuple(found.dense)) == replace(told, dense=tuple(told.dense))
    np.testing.assert_array_equal(found.vectors(ROWS, MASK), told.vectors(ROWS, MASK))
    assert list(json.loads(TextEmbedding().json())) == ["format", "pooling", "normalize"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"embedding.json: format 2 is not known to this version \(it reads format 1\)"),
        ({"pooling": []}, "pooling must be a list of at least one way"),
        ({"pooling": ["median"]}, "'median' is not one of cls, max, mean"),
        ({"pooling": ["mean", "mean"]}, "pooling: names a way twice"),
        ({"normalise": True}, "unknown key 'normalise' .did you mean 'normalize'"),
        ({"normalize": "yes"}, "normalize='yes' must be true or false"),
        ({"default_prompt": "query"}, "default_prompt='query' is none of the prompts"),
        ({"prompts": {"query": 1}}, "prompts must be an object of texts"),
        ({"dense": [{"activation": "tanh"}]}, "dense must be a list of objects, each with its width"),
        ({"dense": [{"width": 4}]}, "embedding.safetensors"),
        ({"weights": {}}, "weights are in a file of their own"),
    ],
)
def test_what_is_damaged_is_said_in_one_line(tmp_path, changes, message):
    values = {**json.loads(TextEmbedding().json()), **changes}
    (tmp_path / EMBEDDING).write_text(json.dumps(values))
    with pytest.raises(UserError, match=message) as error:
        read_embedding(tmp_path, D)
    assert "\n" not in str(error.value)


def test_matrices_of_another_shape_are_refused(tmp_path):
    embedding = dense("tanh")
    (tmp_path / EMBEDDING).write_text(embedding.json())
    write_tensors(tmp_path / DENSE, {**embedding.weights, "dense.1.bias": np.zeros(3, np.float32)})
    with pytest.raises(UserError, match=r"unknown dense.1.bias \(3,\)"):
        read_embedding(tmp_path, D)
    with pytest.raises(UserError, match=r"dense.0.weight is \(4, 6\), expected \(4, 7\)"):
        embedding.check_fits(D + 1, "here")


def test_prompts_by_name():
    embedding = TextEmbedding(prompts={"query": "q: ", "passage": "p: "}, default_prompt="passage")
    assert (embedding.prompt(), embedding.prompt("query"), TextEmbedding().prompt()) == ("p: ", "q: ", "")
    with pytest.raises(UserError, match="prompt_name='title' is none of the model's prompts: it has query, passage"):
        embedding.prompt("title")
