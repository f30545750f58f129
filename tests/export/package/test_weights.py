"""Initializers on their way to the data file: derived ones are made once, side by side, stored once for all graphs."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import encoder_decoder, random_weights

from export.graph.builder import GraphBuilder
from export.package import weights
from export.package.weights import ALIGNMENT, fill
from export.precision.products import LateWeight, late_initializer
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint

PAPER = encoder_decoder("paper")
QUERY, KEY = (f"encoder.layers.0.self_attention.{name}_proj.weight" for name in ("query", "key"))
WIDTH = PAPER.d_model


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(save_checkpoint(tmp_path / "model", PAPER, random_weights(PAPER)))


def model_with(name, parameters, make, shape):
    """A product with a float32 matrix that a recipe makes."""
    g = GraphBuilder("one")
    x = g.input("x", "rows", WIDTH)
    recipe = LateWeight(parameters, lambda *arrays: (make(*arrays),), name)
    g.graph.initializers[name] = late_initializer(name, recipe, 0, shape, ir.DataType.FLOAT)
    g.output("y", g.op.MatMul(x, g.graph.initializers[name]), "rows", None)
    return g.model()


def saved(model, path):
    path.write_bytes(ir.to_proto(model).SerializeToString())
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("threshold", [0, 1 << 30])
def test_a_derived_initializer_is_made_once_and_stored_once(checkpoint, tmp_path, threshold):
    calls = []

    def fused(query, key):
        calls.append((query, key))
        return np.concatenate([query, key]).T.copy()

    models = [model_with("fused", (QUERY, KEY), fused, (WIDTH, 2 * WIDTH)) for _ in range(2)]
    data = tmp_path / "data"
    assert fill(models, checkpoint, data, threshold) == (threshold == 0)
    assert len(calls) == 1
    expected = np.concatenate([checkpoint.tensor(QUERY), checkpoint.tensor(KEY)]).T
    for i, model in enumerate(models):
        assert np.array_equal(saved(model, tmp_path / f"{i}.onnx")["fused"], expected)
    assert not data.exists() or data.stat().st_size == expected.nbytes


def test_weights_beyond_two_gigabytes_are_beside_the_graph(checkpoint, tmp_path, monkeypatch):
    """A protobuf has no room for them, and 32 bits don't hold their place. What lies between takes no room here."""
    monkeypatch.setattr(weights, "ALIGNMENT", 1 << 32)
    g = GraphBuilder("two")
    x = g.input("x", "rows", WIDTH)
    for name in (QUERY, KEY):
        recipe = LateWeight((name,), lambda array: (array.T,), name)
        g.graph.initializers[name] = late_initializer(name, recipe, 0, (WIDTH, WIDTH), ir.DataType.FLOAT)
        x = g.op.MatMul(x, g.graph.initializers[name])
    g.output("y", x, "rows", None)
    model, data = g.model(), tmp_path / "data"
    assert fill([model], checkpoint, data, 0)
    assert data.stat().st_size == (1 << 32) + 4 * WIDTH * WIDTH
    saved(model, tmp_path / "two.onnx")
    ones = np.ones((1, WIDTH), np.float32)
    [y] = ort.InferenceSession(tmp_path / "two.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": ones})
    np.testing.assert_allclose(y, ones @ checkpoint.tensor(QUERY).T @ checkpoint.tensor(KEY).T, rtol=1e-4, atol=1e-5)


def test_results_of_one_recipe_of_any_type(checkpoint, tmp_path):
    """Four-bit and bfloat16 arrays come as bytes; recipes that come mixed are still made once each."""
    calls = []

    def make(array):
        calls.append(len(calls))
        return array.astype(np.int8), array.reshape(-1)[: WIDTH // 2].view(np.uint8)[: WIDTH // 2]

    model = model_with(QUERY + "_float", (QUERY,), lambda x: x, (WIDTH, WIDTH))
    recipes = [LateWeight((name,), make, name) for name in (QUERY, KEY)]
    for index, (dtype, shape) in enumerate([(ir.DataType.INT8, (WIDTH, WIDTH)), (ir.DataType.INT4, (WIDTH,))]):
        for recipe in recipes:
            value = late_initializer(f"{recipe.key}_{index}", recipe, index, shape, dtype)
            model.graph.initializers[str(value.name)] = value
    fill([model], checkpoint, tmp_path / "data", 0)
    assert len(calls) == 2
    tensors = saved(model, tmp_path / "one.onnx")
    for name in (QUERY, KEY):
        array = checkpoint.tensor(name)
        assert np.array_equal(tensors[f"{name}_0"], array.astype(np.int8))
        packed = array.reshape(-1)[: WIDTH // 2].view(np.uint8)[: WIDTH // 2]
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1).astype(np.int8)
        assert np.array_equal(tensors[f"{name}_1"].astype(np.int8), (nibbles ^ 8) - 8)
    places = [getattr(value.const_value, "offset", None) for value in model.graph.initializers.values()]
    assert [place for place in places if place]
    assert not [place for place in places if place is not None and place % ALIGNMENT]


def test_a_recipe_of_the_wrong_size_is_refused(checkpoint, tmp_path):
    model = model_with("half", (QUERY,), lambda x: x[: WIDTH // 2], (WIDTH, WIDTH))
    with pytest.raises(ValueError, match="half: 2048 bytes were made"):
        fill([model], checkpoint, tmp_path / "data", 0)


def test_what_is_made_number_by_number_is_never_whole_in_memory(checkpoint, tmp_path, monkeypatch):
    parts = []

    def make(array):
        parts.append(len(array))
        return [array.astype(np.float16)]

    monkeypatch.setattr("export.package.weights.PART", 100)
    model = model_with(QUERY + "_float", (QUERY,), lambda x: x, (WIDTH, WIDTH))
    late = LateWeight((QUERY,), make, "halves", elementwise=True)
    value = late_initializer("halves", late, 0, (WIDTH, WIDTH), ir.DataType.FLOAT16)
    model.graph.initializers["halves"] = value
    for threshold in (0, 1 << 20):  # in the data file, and in the graph
        parts.clear()
        fill([model], checkpoint, tmp_path / "data", threshold)
        assert max(parts) == 100
        assert sum(parts) == WIDTH * WIDTH
        assert np.array_equal(
            saved(model, tmp_path / "one.onnx")["halves"], checkpoint.tensor(QUERY).astype(np.float16)
        )
        value.const_value = None
