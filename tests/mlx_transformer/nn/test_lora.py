"""Linear maps with an adapter: PyTorch's numbers, nothing changed at first, integers that stay, gradients where they
belong."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden_numbers import ADAPTER_ALPHA, numbers
from mlx import nn
from mlx.utils import tree_flatten
from quantized_models import wide

from mlx_transformer import Transformer
from mlx_transformer.convert.quantize import quantize
from mlx_transformer.core.adapter import AdapterConfig, linear_maps
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.device import deciding_as
from mlx_transformer.nn.lora import add_adapter
from mlx_transformer.nn.quantize import matrix

pytestmark = pytest.mark.gpu_path
GOLDEN = np.load(Path(__file__).parents[1] / "training" / "golden_torch.npz")
KINDS = ["lora", "dora"]
PARTS = {"lora": ["lora_a", "lora_b"], "dora": ["lora_a", "lora_b", "magnitude"]}


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.map = layer


def config(kind, targets=("map",), **options):
    return AdapterConfig(kind=kind, targets=targets, base="", **{"rank": 3, "alpha": ADAPTER_ALPHA, **options})


def adapted(layer, kind):
    """The layer with an adapter."""
    model = One(layer)
    add_adapter(model, config(kind))
    return model.map


def golden_layer(kind):
    layer = nn.Linear(8, 6)
    layer.weight, layer.bias = mx.array(numbers(11, 6, 8)), mx.array(numbers(12, 6))
    layer = adapted(layer, kind)
    layer.lora_a, layer.lora_b = mx.array(numbers(15, 3, 8)), mx.array(numbers(16, 6, 3))
    if kind == "dora":
        layer.magnitude = mx.array(numbers(17, 6))
    return layer


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_pytorchs(kind, compiled):
    layer, x, weights = golden_layer(kind), mx.array(numbers(14, 2, 5, 8)), mx.array(numbers(13, 2, 5, 6))

    def loss(parameters, x):
        layer.update(parameters)
        y = layer(x)
        return (y * weights).sum(), y

    run = mx.value_and_grad(loss, argnums=(0, 1))
    parameters = layer.trainable_parameters()
    (_, y), (gradients, by_x) = (mx.compile(run) if compiled else run)(parameters, x)
    found = dict(tree_flatten(gradients))
    assert sorted(found) == PARTS[kind]
    for name, value in {**found, "x": by_x, "y": y}.items():
        np.testing.assert_allclose(np.array(value), GOLDEN[f"{kind}.{name}"], rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stored", ["bfloat16", "integers"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_weight_gives_the_gradients_of_the_same_numbers_in_float32(kind, stored, compiled):
    x, dy = mx.array(numbers(14, 2, 5, 64)), mx.array(numbers(13, 2, 5, 6))
    plain = nn.Linear(64, 6)
    if stored == "bfloat16":
        plain.weight = plain.weight.astype(mx.bfloat16)
    narrow = plain if stored == "bfloat16" else plain.to_quantized(64, 4)
    single = nn.Linear(64, 6)
    single.weight, single.bias = matrix(narrow).astype(mx.float32), plain.bias
    found = []
    for layer in (narrow, single):
        mx.random.seed(3)
        layer = adapted(layer, kind)
        layer.lora_b = mx.array(numbers(16, 6, 3))

        def run(x, layer=layer):
            return mx.vjp(lambda x, *parts: _with(layer, parts)(x), [x, layer.lora_a, layer.lora_b], [dy])

        found.append([np.array(array) for group in (mx.compile(run) if compiled else run)(x) for array in group])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def _with(layer, parts):
    layer.lora_a, layer.lora_b = parts
    return layer


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("stored", ["bfloat16", "integers"])
def test_a_few_frozen_weights_are_wide_at_a_time(stored):
    """Not all 40, neither when a step begins nor from the forward to the backward pass; MLX allocates a few ahead."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(40)]
    layers = [layer.to_quantized(64, 4) if stored == "integers" else layer for layer in layers]
    model = nn.Sequential(*layers)
    if stored == "bfloat16":
        model.set_dtype(mx.bfloat16)
    add_adapter(model, config("lora", tuple(f"layers.{i}" for i in range(40))))
    x = mx.ones((8, 256))
    mx.eval(model.parameters(), x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(nn.value_and_grad(model, lambda x: model(x).sum())(x))
    assert mx.get_peak_memory() - before < 16 * 256 * 256 * 4


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind, bits):
    """LoRA not one bit; DoRA adds the bias in another operation, and integers may be unpacked first."""
    mx.random.seed(3)
    model = Transformer(wide(attention_bias=True)).eval()
    if bits:
        quantize(model, Scheme(32, bits))
    ids = mx.array([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    before, stored = np.array(model(ids, ids)), {n: np.array(v) for n, v in tree_flatten(model.parameters())}
    add_adapter(model, config(kind, tuple(linear_maps(model.config))))
    np.testing.assert_allclose(
        np.array(model(ids, ids)), before, rtol=0, atol=0 if (kind, bits) == ("lora", None) else 1e-5
    )
    after = dict(tree_flatten(model.parameters()))
    assert all(value.tobytes() == np.array(after[name]).tobytes() for name, value in stored.items())
    trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trained == after.keys() - stored.keys() == set(config(kind, tuple(linear_maps(model.config))).shapes(wide()))


@pytest.mark.parametrize("kind", KINDS)
def test_integers_have_the_gradients_of_the_numbers_that_they_stand_for(kind):
    found = []
    for dense in (False, True):
        mx.random.seed(5)
        layer = nn.QuantizedLinear.from_linear(nn.Linear(64, 24), 32, 4)
        if dense:
            integers, layer = layer, nn.Linear(64, 24)
            layer.weight, layer.bias = matrix(integers), integers.bias
        layer = adapted(layer, kind)
        layer.lora_a, layer.lora_b = mx.array(numbers(1, 3, 64)), mx.array(numbers(2, 24, 3))

        def loss(parameters, x, layer=layer):
            layer.update(parameters)
            return (layer(x) * mx.array(numbers(4, 7, 24))).sum()

        gradients = mx.grad(loss, argnums=(0, 1))(layer.trainable_parameters(), mx.array(numbers(3, 7, 64)))
        found.append({name: np.array(value) for name, value in tree_flatten(gradients)})
    for name, value in found[1].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_a_row_of_zeros_stays_one():
    layer = nn.Linear(8, 6)
    layer.weight = mx.array(numbers(11, 6, 8)).at[2].multiply(0)
    layer = adapted(layer, "dora")
    y, x = np.array(layer(mx.ones((1, 8))) - layer.bias), mx.ones((1, 8))
    assert np.isfinite(y).all()
    assert y[0, 2] == 0
    gradient = mx.grad(lambda p: (layer.update(p), layer(x).sum())[1])(layer.trainable_parameters())
    assert np.isfinite(np.array(gradient["lora_b"])).all()


def test_dropout_of_the_adapters_inputs_alone():
    layer = golden_layer("lora")
    layer.lora_dropout.keep = 0.5
    x, base = mx.array(numbers(14, 50, 8)), mx.array(numbers(14, 50, 8)) @ layer.weight.T + layer.bias
    mx.random.seed(7)
    drawn = np.mean([np.array(layer(x) - base) for _ in range(200)], axis=0)
    assert not np.array_equal(np.array(layer(x)), np.array(layer(x)))
    layer.eval()
    whole = np.array(layer(x) - base)
    np.testing.assert_array_equal(whole, np.array(layer(x) - base))
    assert np.sqrt(np.mean((drawn - whole) ** 2)) < 0.2 * np.sqrt(np.mean(whole**2))  # 1 / sqrt(200) of it, and more


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [3, 4])
def test_integers_are_unpacked_where_that_is_faster(monkeypatch, rows, device):
    """On CPUs for four rows or more, on GPUs never."""
    layer = adapted(nn.QuantizedLinear(64, 24, False, 32, 4), "lora")
    calls, multiply = [], mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **named: calls.append(1) or multiply(*a, **named))
    with deciding_as(device):
        y = layer(mx.array(numbers(1, 1, rows, 64)))
    np.testing.assert_allclose(np.array(y), numbers(1, 1, rows, 64) @ np.array(matrix(layer)).T, rtol=0, atol=1e-5)
    assert len(calls) == (0 if (rows, device) == (4, "cpu") else 1)
