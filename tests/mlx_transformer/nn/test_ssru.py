"""A decoder of SSRUs: the parallel recurrence is the loop, its gradient the loop's; steps of any length are the full
pass; a beam moves one vector a layer; a sentence doesn't depend on its neighbours."""

import math

import mlx.core as mx
import numpy as np
import pytest
from drawn_configs import SMALL

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.nn.ssru import LayerState, recurrence
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path

EPSILON = 2.0**-24
"""The largest relative error of one operation in float32."""
LENGTHS = (1, 2, 3, 4, 7, 8, 9, 31, 64, 130)


def config(**changes) -> TransformerConfig:
    return TransformerConfig(**{**SMALL, "decoder_self_attention": "ssru", **changes})


def small(**changes) -> Transformer:
    mx.random.seed(3)
    return Transformer(config(**changes)).eval()


def drawn(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forget gates that are near 0 and near 1 as well, inputs, and a gradient (2, length, 5)."""
    rng = np.random.default_rng(length)
    f = 1 / (1 + np.exp(-rng.normal(0, 12, (2, length, 5))))
    f[:, ::3, 0], f[:, 1::3, 1] = 0, 1
    v, g = rng.normal(size=(2, 2, length, 5))
    return f.astype(np.float32), v.astype(np.float32), g.astype(np.float32)


def loop(f: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The definition, in float64."""
    c, states = np.zeros(v[:, 0].shape), []
    for t in range(v.shape[1]):
        c = f[:, t].astype(np.float64) * c + v[:, t]
        states.append(c)
    return np.stack(states, axis=1)


def bound(magnitude: np.ndarray, length: int) -> np.ndarray:
    """What rounding can add up to: each round multiplies twice and adds once, what was added being at most `magnitude`,
    the same sum of absolute values."""
    return 3 * (math.ceil(math.log2(length)) + 1) * EPSILON * magnitude


@pytest.mark.parametrize("length", LENGTHS)
def test_the_recurrence_is_the_loop(length: int) -> None:
    f, v, _ = drawn(length)
    error = np.abs(np.array(recurrence(mx.array(f), mx.array(v))) - loop(f, v))
    assert np.all(error <= bound(loop(f, np.abs(v)), length))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_its_gradient_is_the_loops(length: int, compiled: bool) -> None:
    """g_t = dc_t + f_{t+1} g_{t+1}, dv = g, df_t = g_t c_{t-1}, one step after another in float64."""
    f, v, dc = drawn(length)

    def loss(f: mx.array, v: mx.array) -> mx.array:
        return mx.sum(recurrence(f, v) * mx.array(dc))

    gradient = mx.grad(loss, (0, 1))
    df, dv = (mx.compile(gradient) if compiled else gradient)(mx.array(f), mx.array(v))
    after, before = np.concatenate([f[:, 1:], 0 * f[:, :1]], axis=1)[:, ::-1], [(0, 0), (1, 0), (0, 0)]
    g, g_bound = (loop(after, x[:, ::-1])[:, ::-1] for x in (dc, np.abs(dc)))
    c, c_bound = (np.pad(loop(f, x), before)[:, :-1] for x in (v, np.abs(v)))
    assert np.all(np.abs(np.array(dv) - g) <= bound(g_bound, length))
    assert np.all(np.abs(np.array(df) - g * c) <= 3 * bound(g_bound * c_bound, length))


def test_its_gradient_is_that_of_differences() -> None:
    """In float64 nothing but the step's square is left; MLX has that on the CPU alone."""
    rng = np.random.default_rng(0)
    with mx.stream(mx.cpu):
        f, v, dc = (mx.array(x, mx.float64) for x in (rng.uniform(0, 1, (1, 6, 2)), *rng.normal(size=(2, 1, 6, 2))))

        def loss(f: mx.array, v: mx.array) -> mx.array:
            return mx.sum(recurrence(f, v) * dc)

        gradients = mx.grad(loss, (0, 1))(f, v)
        for which, gradient in enumerate(gradients):
            for place in np.ndindex(1, 6, 2):
                step = np.zeros((1, 6, 2))
                step[place] = 1e-6
                change = mx.array(step, mx.float64)
                ends = [[f, v], [f, v]]
                ends[0][which], ends[1][which] = ends[0][which] - change, ends[1][which] + change
                difference = (loss(*ends[1]).item() - loss(*ends[0]).item()) / 2e-6
                assert abs(difference - gradient[place].item()) < 1e-8


@pytest.mark.parametrize("first", range(1, 12))
def test_a_cache_split_anywhere_is_the_full_pass(first: int) -> None:
    model, rng = small(), np.random.default_rng(1)
    source, target = rng.integers(3, 19, (3, 6)), rng.integers(3, 19, (3, 12))
    full, cache = np.array(model(source, target)), model.start(model.encode(source))
    parts = [model.step(target[:, :first], cache)]
    parts += [model.step(target[:, t : t + 1], cache) for t in range(first, 11)]
    parts.append(model.step(target[:, max(first, 11) :], cache))
    found = np.concatenate([np.array(part) for part in parts], axis=1)
    np.testing.assert_allclose(found, full, rtol=0, atol=2e-5 * np.sqrt(np.mean(full**2)))


def test_the_state_stays_one_vector_a_layer_and_moves_with_its_row() -> None:
    model, rng = small(), np.random.default_rng(2)
    source, target = rng.integers(3, 19, (2, 6)), rng.integers(3, 19, (2, 5))
    cache = model.start(model.encode(source))
    for t in range(4):
        model.step(target[:, t : t + 1], cache)
        assert [tuple(layer.state.shape) for layer in cache.layers] == [(2, 16), (2, 16)]
    alone = np.array(model.step(target[:, 4:], cache))
    cache = model.start(model.encode(source))
    model.step(target[:, :4], cache)
    cache.repeat(2)  # rows 0 0 1 1
    other = rng.integers(3, 19, (4, 1))
    other[[1, 2]] = target[[0, 1], 4:]
    held = [np.array(layer.state) for layer in cache.layers]
    cache.reorder(mx.array([1, 0, 3, 2]))
    cache.keep(mx.array([2, 3]))
    np.testing.assert_array_equal(np.array(cache.layers[1].state), held[1][[3, 2]])
    assert np.allclose(np.array(model.step(other[[2, 3]], cache))[0], alone[1], atol=1e-5)


def test_a_sentence_does_not_depend_on_its_neighbours() -> None:
    """Shorter targets are padded on the right, where no token looks."""
    model, rng = small(), np.random.default_rng(4)
    source, target = rng.integers(3, 19, (3, 6)), rng.integers(3, 19, (3, 9))
    padded = target.copy()
    padded[1, 5:] = 0
    together, alone = np.array(model(source, padded)), np.array(model(source[1:2], target[1:2]))
    np.testing.assert_allclose(together[1, :5], alone[0, :5], rtol=0, atol=1e-5)


def test_the_state_is_kept_before_the_relu() -> None:
    """Negative numbers come back: with relu(c) as the state, c of two steps would differ."""
    state = LayerState()
    f, v = mx.full((1, 2, 1), 0.5), mx.array([[[-4.0], [1.0]]])
    assert state.extend(f[:, :1], v[:, :1]).item() == -4.0
    assert state.extend(f[:, 1:], v[:, 1:]).item() == -1.0
    assert state.extend(mx.full((1, 3, 1), 1.0), mx.zeros((1, 3, 1))).tolist() == [[[-1.0], [-1.0], [-1.0]]]


def test_parameters() -> None:
    shapes = parameter_shapes(config(attention_bias=True))
    own = {name.rpartition("self_attention.")[2]: s for name, s in shapes.items() if "decoder.layers.1.self_a" in name}
    assert own == {
        "input_proj.weight": (16, 16),
        "forget_proj.weight": (16, 16),
        "forget_proj.bias": (16,),
        "decoder.layers.1.self_attention_norm.weight": (16,),
        "decoder.layers.1.self_attention_norm.bias": (16,),
    }
    assert "encoder.layers.0.self_attention.query_proj.bias" in shapes


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_half_precision(dtype: mx.Dtype) -> None:
    model = small()
    model.set_dtype(dtype)
    cache = model.start(model.encode([[5, 6, 7]]))
    for length in (3, 1):
        assert model.step([[5] * length], cache).dtype == dtype
    assert {array.dtype for array in cache.arrays()} == {dtype}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(architecture="decoder", encoder_layers=0, tie_embeddings="none"),
            "only an encoder-decoder has it, not 'decoder'",
        ),
        (
            dict(architecture="encoder", decoder_layers=0),
            "only an encoder-decoder has it, not 'encoder'",
        ),
        (dict(positions="relative"), "positions='relative' act in self-attention, which a decoder .* lacks"),
        (dict(positions="rotary"), "positions='rotary' act in self-attention, which a decoder .* lacks"),
        (dict(decoder_self_attention="gru"), "decoder_self_attention='gru' is not one of attention, ssru"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)
