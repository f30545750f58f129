"""Residual connections and norms: what a stack is with both, with one of them, and with neither."""

import mlx.core as mx
import numpy as np
import pytest
from claims import residual
from claims.network import tiny
from claims.table import claimed

from mlx_transformer.nn.layers import no_tap

SHARE = "share of 4 layers' output that tells positions apart: {}"
GRADIENT = "gradient at the input, 24 layers / 2: {}"


def test_each_sub_layer_is_norm_of_x_plus_sublayer_of_x() -> None:
    assert residual.formula_error("post") == 0
    assert residual.formula_error("pre") == 0
    for half in ("post", "pre"):
        assert residual.formula_error(half, added=0.5) > 0.1
    assert residual.formula_error("post", added=0) > 1


def test_a_layer_with_both_is_the_packages() -> None:
    """And the other three are what their names say."""
    model = tiny(architecture="encoder", decoder_layers=0)
    layer, x = model.encoder.layers[0], mx.random.normal((1, 5, 32))
    assert mx.array_equal(residual.through(layer, x, *residual.VARIANTS["both"]), layer(x)).item()
    y = layer.attend_self(x, None, None, no_tap)
    assert mx.array_equal(residual.through(layer, x, *residual.VARIANTS["neither"]), layer.transform(y, no_tap)).item()
    z = x + y
    found = residual.through(layer, x, *residual.VARIANTS["the residual alone"])
    assert mx.array_equal(found, z + layer.transform(z, no_tap)).item()
    z = layer.self_attention_norm(y)
    found = residual.through(layer, x, *residual.VARIANTS["the norm alone"])
    assert mx.array_equal(found, layer.feed_forward_norm(layer.transform(z, no_tap))).item()


def test_positions_become_one_without_residuals_and_with_them_do_not(on_cpu) -> None:
    """Of each seed, not only in the mean."""
    for name, variant in residual.VARIANTS.items():
        for seed in range(residual.SEEDS):
            model, x = residual.fresh(seed, 4)
            for layer in model.encoder.layers:
                x = residual.through(layer, x, *variant)
            rows = np.array(x[0], dtype=np.float64)
            share = np.linalg.norm(rows - rows.mean(axis=0)) / np.linalg.norm(rows)
            assert claimed(22, SHARE.format(name)).holds([share]), (name, seed)


@pytest.mark.slow  # row 22 of test_table.py is the same numbers
@pytest.mark.usefixtures("on_cpu")  # queries too short for a gradient on a GPU
def test_gradients_of_all_four() -> None:
    """Only both keep them: the residual alone makes them explode, neither makes them vanish."""
    for name, values in residual.gradients_by_depth().items():
        assert claimed(22, GRADIENT.format(name)).holds([values[-1] / values[1]]), name
    assert (residual.DEPTHS[1], residual.DEPTHS[-1]) == (2, 24)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", [4, 12])
def test_layers_need_the_residual_to_train(layers: int, seed: int) -> None:
    """Copying five words: with it the loss falls to almost nothing, without it the order of the words stays unknown.
    It is enough without norms too, in twelve layers as in four."""
    losses = {name: residual.trained_loss(name, layers, seed) for name in residual.VARIANTS}
    assert losses["both"] < 0.2
    assert losses["the residual alone"] < 0.2
    assert losses["the norm alone"] > 0.5
    assert losses["neither"] > 0.5
