"""The MLX model against the float64 reference: any config, padded batches, weights that are nowhere 0 or 1."""

import mlx.core as mx
import numpy as np
import pytest
from drawn_configs import SMALL, configs
from hypothesis import given, settings
from hypothesis import strategies as st
from options import OPTIONS

from export.validate.reference import Reference
from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn.attention import Attention
from mlx_transformer.nn.inputs import as_tokens
from mlx_transformer.nn.masks import padding_mask

pytestmark = pytest.mark.gpu_path


def compare(config: TransformerConfig, seed: int) -> None:
    """Every tap of a padded batch, and the cached steps of a decoder, within float32's rounding."""
    rng = np.random.default_rng(seed)
    mx.random.seed(seed % 2**31)
    start = Transformer(config).weights()
    weights = {k: v + rng.normal(0, 0.1, v.shape).astype(np.float32) for k, v in start.items()}
    model, reference = Transformer.from_weights(config, weights), Reference(config, weights)
    source, mask = rng.integers(3, 19, (3, 6)), np.ones((3, 6), bool)
    mask[0, :2] = mask[1, 4:] = False
    pair = config.architecture == "encoder-decoder"
    ids = (source, rng.integers(3, 19, (3, 5))) if pair else (source,)
    taps: dict[str, mx.array] = {}
    expected: dict[str, np.ndarray] = {}
    model(*ids, mask, tap=taps.__setitem__)
    reference(*ids, mask=mask, tap=expected.__setitem__)
    assert list(taps) == list(expected)
    for name, value in expected.items():
        real = mask if value.shape[1] == 6 else np.ones(value.shape[:2], bool)
        scale = np.sqrt(np.mean(value[real] ** 2))
        np.testing.assert_allclose(np.array(taps[name])[real], value[real], rtol=0, atol=2e-5 * scale, err_msg=name)


@settings(max_examples=20)
@given(configs(), st.integers(0, 2**32 - 1))
def test_any_config(config: TransformerConfig, seed: int) -> None:
    compare(config, seed)


@pytest.mark.parametrize("activation", OPTIONS["activation"])
@pytest.mark.parametrize("gated", [False, True])
def test_activations(activation: str, gated: bool) -> None:
    compare(TransformerConfig(**{**SMALL, "activation": activation, "gated": gated}), 0)


@pytest.mark.parametrize("norm", OPTIONS["norm"])
def test_epsilon_counts(norm: str) -> None:
    compare(TransformerConfig(**{**SMALL, "norm": norm, "norm_epsilon": 0.1}), 0)


@pytest.mark.parametrize("placement", OPTIONS["norm_placement"])
def test_rotary_positions_and_grouped_heads(placement: str) -> None:
    changes = dict(positions="rotary", key_value_heads=2, norm_placement=placement, rotary_base=50.0)
    compare(TransformerConfig(**{**SMALL, **changes}), 0)


@pytest.mark.parametrize("placement", OPTIONS["norm_placement"])
@pytest.mark.parametrize("positions", ["sinusoidal_concat", "learned", "none"])
def test_recurrent_decoders(placement: str, positions: str) -> None:
    changes = dict(norm_placement=placement, positions=positions, key_value_heads=2, attention_bias=True)
    compare(TransformerConfig(**{**SMALL, **changes, "decoder_self_attention": "ssru"}), 5)


@pytest.mark.parametrize("alone", ["encoder", "decoder"])
def test_bounded_scores(alone: str) -> None:
    """Grouped heads and padding included, and in training, where weights are dropped out."""
    layers = dict(encoder_layers=2, decoder_layers=0) if alone == "encoder" else dict(encoder_layers=0)
    changes = dict(score_cap=0.3, attention_scale=2.0, key_value_heads=2, layer_pattern=[{}, {"score_cap": 0.1}])
    changes |= dict(architecture=alone, tie_embeddings="none", **layers)
    config = TransformerConfig(**{**SMALL, **changes, "attention_dropout": 1e-12, "dropout": 0.0})
    compare(config, 0)
    model = Transformer(config)
    dropped, fused = (np.array(each([[3, 4, 5, 6]])) for each in (model.train(), model.eval()))
    np.testing.assert_allclose(dropped, fused, atol=1e-5)


def test_shown_weights_are_those_of_the_fused_form() -> None:
    """Grouped heads and rotary angles included: weights @ values, head by head, give what `attend` gives."""
    from mlx_transformer.nn.attention import matmul_shared_heads, merge_heads
    from mlx_transformer.nn.positions import positions_of, rotation

    config = TransformerConfig(**{**SMALL, "key_value_heads": 2, "positions": "rotary"})
    mx.random.seed(0)
    module, x = Attention(config).eval(), mx.random.normal((2, 5, 16))
    angles = rotation(config, positions_of(5), mx.float32)
    k, v = module.keys_values(x, angles)
    for mask in (None, "causal"):
        weights = module.weights(x, k, mask, angles)
        unfused = module.output_proj(merge_heads(matmul_shared_heads(weights, v)))
        fused = module.attend(x, k, v, mask, angles)
        np.testing.assert_allclose(np.array(unfused), np.array(fused), atol=1e-6)


def test_no_row_of_a_padding_mask_is_empty() -> None:
    mask = padding_mask(mx.array([[True, False], [False, False]]))
    assert mask.tolist() == [[[[True, False]]], [[[True, True]]]]


def test_masks_that_hide_nothing_are_dropped() -> None:
    """Then the fused kernels run without one. To the right of a causal model's tokens nothing needs hiding."""
    everything, right, left = [[True] * 3], [[True, True, False]], [[False, True, True]]
    assert as_tokens(everything, (1, 3), "mask") is None
    assert as_tokens(right, (1, 3), "mask", causal=True) is None
    for mask, causal in ((right, False), (left, False), (left, True), ([[True, False, True]], True)):
        tokens = as_tokens(mask, (1, 3), "mask", causal=causal)
        assert tokens is not None
        assert tokens.tolist() == mask
