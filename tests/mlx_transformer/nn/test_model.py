"""The MLX model: its parameters are the table's, its types stay, its inputs are checked, its gradients reach all."""

import mlx.core as mx
import numpy as np
import pytest
from combined import combined, slow
from drawn_configs import SMALL, configs
from hypothesis import given
from mlx.utils import tree_flatten, tree_map
from options import OPTIONS

from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count, parameter_shapes
from mlx_transformer.device import gradient_device
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path


def small(seed: int = 0, **changes) -> Transformer:
    mx.random.seed(seed)
    return Transformer(TransformerConfig(**{**SMALL, **changes}))


def inputs(config: TransformerConfig) -> list[mx.array]:
    source, target = mx.array([[5, 6, 7, 2], [8, 9, 10, 2]]), mx.array([[1, 12, 3], [1, 9, 4]])
    return [source, target] if config.architecture == "encoder-decoder" else [source]


@given(configs())
def test_parameters_are_the_table_and_all_receive_gradient(config: TransformerConfig) -> None:
    mx.random.seed(1)
    model = Transformer(config)
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    assert shapes == parameter_shapes(config)

    direction = mx.random.normal((*inputs(config)[-1].shape, config.vocab_size))

    def loss(parameters):
        model.update(parameters)
        return mx.sum(model(*inputs(config)) * direction)

    with mx.stream(gradient_device(min(ids.shape[1] for ids in inputs(config)))):
        gradients = dict(tree_flatten(mx.grad(loss)(model.parameters())))
        mx.eval(gradients)
    for name, gradient in gradients.items():
        assert mx.all(mx.isfinite(gradient)).item(), name
        # A key's bias adds the same number to all scores of a query, so softmax ignores it, unless positions turn it.
        turned = config.positions == "rotary" and "self_attention" in name
        if turned or not name.endswith("key_proj.bias"):
            assert mx.any(gradient != 0).item(), name


def test_presets_have_the_papers_parameter_counts() -> None:
    for name, exact, about in (("base", 63_045_632, 65e6), ("big", 214_171_648, 213e6)):
        model = Transformer(TransformerConfig.preset(name, 37_000))  # lazy: no weight is ever computed
        count = sum(value.size for _, value in tree_flatten(model.parameters()))
        assert count == parameter_count(model.config) == exact
        assert abs(count / about - 1) < 0.035


def test_initial_weights() -> None:
    model = small(d_model=64, vocab_size=500, d_ff=128, attention_bias=True, positions="learned", tie_embeddings="none")
    for name, value in tree_flatten(model.parameters()):
        array = np.array(value)
        if "embedding" in name or "positions" in name:
            np.testing.assert_allclose(array.std(), 64**-0.5, rtol=0.1, err_msg=name)
        elif array.ndim == 2:
            limit = np.sqrt(6 / sum(array.shape))
            assert 0.9 * limit < np.abs(array).max() <= limit, name
            np.testing.assert_allclose(array.std(), limit / np.sqrt(3), rtol=0.1, err_msg=name)
        else:
            assert np.all(array == (1.0 if name.endswith("norm.weight") else 0.0)), name
    again = small(d_model=64, vocab_size=500, d_ff=128, attention_bias=True, positions="learned", tie_embeddings="none")
    assert all(np.array_equal(a, b) for a, b in zip(model.weights().values(), again.weights().values(), strict=True))


def test_dropout_only_in_training_and_everywhere_the_paper_has_it() -> None:
    def differs(**rates) -> bool:
        model = small(**{"dropout": 0.0, **rates})
        first, second = model(*inputs(model.config)), model(*inputs(model.config))
        resting = model.eval()(*inputs(model.config))
        assert mx.array_equal(resting, model(*inputs(model.config))).item()
        return not mx.array_equal(first, second).item()

    assert not differs()
    assert differs(dropout=0.3)
    assert differs(attention_dropout=0.3)
    assert differs(activation_dropout=0.3)
    # Embedding + position: with sub-layers silenced, dropout still shows.
    model = small(dropout=0.5, architecture="encoder", decoder_layers=0, norm_placement="pre")
    for projection in ("self_attention.output_proj", "feed_forward.down_proj"):
        module, part = projection.split(".")
        silent = model.encoder.layers[0][module][part]
        silent.weight = mx.zeros_like(silent.weight)
    taps: dict[str, mx.array] = {}
    model(mx.array([[5, 6, 7]]), tap=taps.__setitem__)
    scale = taps["encoder.layers.0"] / taps["encoder.embedding"]
    assert set(np.round(np.array(scale).ravel(), 4).tolist()) == {0.0, 2.0}


@slow
def test_attention_dropout_has_the_fused_forms_mean() -> None:
    model = small(attention_dropout=0.25, dropout=0.0, architecture="encoder", decoder_layers=0)
    x = mx.random.normal((2, 5, 16))
    module = model.encoder.layers[0].self_attention
    k, v = module.keys_values(x)
    mask = mx.array([[True, True, False, True, True], [True] * 5])[:, None, None, :]
    mean = sum(module.attend(x, k, v, mask) for _ in range(3000)) / 3000
    model.eval()
    np.testing.assert_allclose(np.array(mean), np.array(module.attend(x, k, v, mask)), atol=0.05)


@pytest.mark.parametrize(("dtype", "positions"), combined([mx.float16, mx.bfloat16], OPTIONS["positions"]))
def test_half_precision_stays_half_precision(dtype: mx.Dtype, positions: str) -> None:
    for changes in ({}, dict(norm="rmsnorm", norm_placement="pre", gated=True, activation="gelu", output_bias=True)):
        model = small(positions=positions, attention_dropout=0.1, activation_dropout=0.1, **changes)
        model.set_dtype(dtype)
        mask = [[True, True, True, True], [False, True, True, True]]
        types = set()

        def check_type(name, value, types=types):
            types.add(value.dtype)

        for train in (True, False):
            model.train(train)
            model(*inputs(model.config), mask, tap=check_type)
        cache = model.start(model.encode(inputs(model.config)[0], mask), mask)
        model.step([[1, 3], [1, 4]], cache, tap=check_type)
        model.step([[1], [1]], cache, tap=check_type)
        types |= {array.dtype for array in cache.arrays()}
        with mx.stream(gradient_device(min(ids.shape[1] for ids in inputs(model.config)))):
            gradients = mx.grad(lambda p, m=model: m.update(p)(*inputs(m.config)).sum())(model.parameters())
            mx.eval(gradients)
        types |= {gradient.dtype for _, gradient in tree_flatten(gradients)}
        assert types == {dtype}


@pytest.mark.parametrize(("dtype", "positions"), combined([mx.float16, mx.bfloat16], OPTIONS["positions"]))
def test_half_precision_gradients_are_float32s(dtype: mx.Dtype, positions: str) -> None:
    """Of the same rounded weights, each parameter's within 16 epsilons of its norm (measured: 5). With activations that
    have no corner: where a rounded sum changes its sign, ReLU's gradient is another."""
    for changes in ({"activation": "gelu"}, dict(norm="rmsnorm", norm_placement="pre", gated=True, activation="silu")):
        model, exact = (small(positions=positions, dropout=0.0, **changes) for _ in range(2))
        model.set_dtype(dtype)
        exact.update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
        direction = mx.random.normal((2, 3, 23))

        def gradients(model: Transformer, direction: mx.array = direction) -> dict[str, np.ndarray]:
            def loss(parameters):
                return mx.sum(model.update(parameters)(*inputs(model.config)) * direction)

            computed = tree_flatten(mx.grad(loss)(model.parameters()))
            return {name: np.array(gradient.astype(mx.float32)) for name, gradient in computed}

        computed = gradients(model)
        for name, expected in gradients(exact).items():
            error = np.linalg.norm(computed[name] - expected) / np.linalg.norm(expected)
            assert error < 16 * mx.finfo(dtype).eps, (name, error)


def test_tap_names() -> None:
    taps: dict[str, mx.array] = {}
    model = small(norm_placement="pre").eval()
    source, target = inputs(model.config)
    logits = model(source, target, tap=taps.__setitem__)
    assert (
        list(taps)
        == (
            "encoder.embedding encoder.layers.0.self_attention encoder.layers.0.feed_forward encoder.layers.0 "
            "encoder.norm decoder.embedding decoder.layers.0.self_attention decoder.layers.0.cross_attention "
            "decoder.layers.0.feed_forward decoder.layers.0 decoder.layers.1.self_attention "
            "decoder.layers.1.cross_attention decoder.layers.1.feed_forward decoder.layers.1 decoder.norm logits"
        ).split()
    )
    assert mx.array_equal(taps["logits"], logits).item()
    assert taps["encoder.norm"].shape == (2, 4, 16)
    memory = model.encode(source)
    stepped: dict[str, mx.array] = {}
    model.step(target, model.start(memory), tap=stepped.__setitem__)
    assert list(stepped) == [name for name in taps if not name.startswith("encoder.")]
    for name, value in stepped.items():
        np.testing.assert_allclose(np.array(value), np.array(taps[name]), atol=1e-5, err_msg=name)


def test_nothing_is_parked_in_the_model() -> None:
    """A forward pass, a step and their gradient leave every attribute of every module as it was."""
    model = small(positions="rotary")
    snapshot = [(name, dict(vars(module)), dict(module)) for name, module in model.named_modules()]
    model(*inputs(model.config))
    model.step([[1, 3]], model.start(model.encode(mx.array([[5, 6]]))))
    after = [(name, dict(vars(module)), dict(module)) for name, module in model.named_modules()]
    assert [name for name, *_ in snapshot] == [name for name, *_ in after]
    for (name, *before), (_, *now) in zip(snapshot, after, strict=True):
        for old, new in zip(before, now, strict=True):
            assert old.keys() == new.keys(), name
            assert all(old[key] is new[key] for key in old), name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m([[5, 23]], [[1]]), "source_ids: id 23 at row 0, position 1 is outside the vocabulary of 23"),
        (lambda m: m([[5], [6]], [[1], [-1]]), "target_ids: id -1 at row 1, position 0"),
        (lambda m: m.encode([[]]), "source_ids: expected a batch"),
        (lambda m: m.encode([5, 6]), "source_ids: expected a batch"),
        (lambda m: m.encode(mx.array([5, 6])), "source_ids: expected a batch"),
        (lambda m: m.encode([[5, 6], [7]]), "source_ids: rows have different lengths"),
        (lambda m: m.encode([[5.0, 6.5]]), "source_ids: ids must be integers, not float64"),
        (lambda m: m.encode(mx.array([[5.0]])), "source_ids: ids must be integers, not mlx.core.float32"),
        (
            lambda m: m.encode([[5, 6]], [[True]]),
            r"source_mask: its shape \(1, 1\) differs from that of the input, \(1, 2\)",
        ),
        (lambda m: m.decode([[99]], m.encode([[5]])), "target_ids: id 99"),
        (lambda m: m.step([[99]], m.start(m.encode([[5]]))), "ids: id 99"),
        (lambda m: m.start(), "an encoder-decoder decodes from a memory"),
    ],
)
def test_bad_inputs_are_named(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(small().eval())


def test_methods_a_shape_lacks_are_named() -> None:
    encoder = small(architecture="encoder", decoder_layers=0)
    decoder = small(architecture="decoder", encoder_layers=0, tie_embeddings="none")
    with pytest.raises(UserError, match="architecture 'encoder' cannot start"):
        encoder.start()
    with pytest.raises(UserError, match="architecture 'decoder' cannot encode"):
        decoder.encode([[5]])
    assert encoder(ids := [[5, 6, 7]]).shape == decoder(ids).shape == (1, 3, 23)
    assert encoder.encode(ids, mask := [[True, True, False]]).shape == decoder.hidden(ids, mask).shape == (1, 3, 16)


@pytest.mark.parametrize(("architecture", "positions"), combined(["encoder", "decoder"], OPTIONS["positions"]))
def test_padding_on_either_side_changes_nothing(architecture: str, positions: str) -> None:
    layers = {"encoder": dict(decoder_layers=0), "decoder": dict(encoder_layers=0, tie_embeddings="none")}
    model = small(architecture=architecture, positions=positions, **layers[architecture]).eval()
    row = [5, 6, 7, 8]
    unpadded = np.array(model([row]))[0]
    for mask in (np.array([[0, 0, 1, 1, 1, 1]]), np.array([[1, 1, 1, 1, 0, 0]]), np.array([[0, 1, 1, 1, 1, 0]])):
        ids = np.full((1, 6), 9)
        ids[mask == 1] = row
        for given_mask in (mask.astype(bool), mx.array(mask), mask.tolist()):
            padded = np.array(model(ids, given_mask))
            assert np.all(np.isfinite(padded))
            np.testing.assert_allclose(padded[mask == 1], unpadded, atol=2e-5)


def test_a_row_without_any_token_is_finite_and_harmless() -> None:
    model = small().eval()
    source, mask = [[5, 6, 7], [5, 6, 7]], mx.array([[True, True, True], [False] * 3])
    logits = model(source, [[1, 4], [1, 4]], mask)
    assert mx.all(mx.isfinite(logits)).item()
    np.testing.assert_allclose(np.array(logits[:1]), np.array(model(source[:1], [[1, 4]])), atol=1e-5)


def test_saved_and_loaded_bit_for_bit(tmp_path) -> None:
    model = small(tie_embeddings="target-output", output_bias=True)
    folder = save_checkpoint(tmp_path / "model", model.config, model.weights())
    again = Transformer.load(folder)
    assert again.config == model.config
    assert not again.training
    assert not again.decoder.layers[0].dropout.training
    for (name, a), (other, b) in zip(model.weights().items(), again.weights().items(), strict=True):
        assert name == other
        assert a.tobytes() == b.tobytes()
    x = inputs(model.config)
    assert mx.array_equal(model.eval()(*x), again(*x)).item()
    with pytest.raises(UserError, match=r"missing output_proj.bias \(23,\)"):
        Transformer.from_weights(model.config, {k: v for k, v in model.weights().items() if k != "output_proj.bias"})


def test_bfloat16_weights_reach_numpy() -> None:
    model = small()
    model.set_dtype(mx.bfloat16)
    exact = tree_map(lambda value: value.astype(mx.float32), model.parameters())
    for name, value in tree_flatten(exact):
        np.testing.assert_array_equal(model.weights()[name], np.array(value))
