"""twin.js, the page's live engine: every point is the reference's, and what it doesn't know it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import twin
from small_models import random_weights

from export.validate.findings import inner_names
from export.validate.reference import Reference
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

SOURCE, TARGET = [5, 9, 30, 7, 9, 2], [1, 8, 31, 4, 12, 44, 9]
ROUNDING = 1e-12  # of float64, in sums in another order
SIZES: dict[str, Any] = dict(
    vocab_size=50, d_model=16, heads=4, d_ff=24, max_positions=40, encoder_layers=2, decoder_layers=2
)
ONE: dict[str, dict[str, Any]] = {
    "decoder": dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output"),
    "encoder": dict(architecture="encoder", decoder_layers=0),
}
CONFIGS = {
    "paper": {},
    "paper, decoder": ONE["decoder"],
    "paper, encoder": ONE["encoder"],
    "pre": dict(norm_placement="pre", norm="rmsnorm", gated=True, activation="silu", positions="sinusoidal_halves"),
    "pre, decoder": dict(norm_placement="pre", positions="learned", activation="gelu", **ONE["decoder"]),
    "pre, encoder": dict(
        norm_placement="pre", first_norm=False, norm_bias=False, positions="none", embedding_norm=True, **ONE["encoder"]
    ),
    "untied": dict(
        tie_embeddings="none",
        source_vocab_size=60,
        positions="sinusoidal_concat",
        output_bias=True,
        attention_bias=True,
    ),
    "widths": dict(
        d_k=6, d_v=10, key_value_heads=2, attention_scale=0.5, logit_scale=0.5, activation="gelu_tanh", first_position=3
    ),
    "plain": dict(tie_embeddings="source-target", scale_embeddings=False, feed_forward_bias=False, norm_epsilon=1e-3),
}


def config_of(name: str) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, **CONFIGS[name]})


def input_of(config: TransformerConfig) -> dict[str, list[int]]:
    return ({"source": SOURCE} if config.has_encoder else {}) | ({"target": TARGET} if config.has_decoder else {})


def reference_points(config: TransformerConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    points: dict[str, np.ndarray] = {}
    given = [np.array([ids]) for ids in input_of(config).values()]
    Reference(config, weights, inner_points=True)(*given, tap=points.__setitem__)
    return {name: value[0] for name, value in points.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("twin")
    for name in CONFIGS:
        save_checkpoint(place / name, config_of(name), random_weights(config_of(name)))
    return place


@pytest.fixture(scope="module")
def computed(folder):
    """{name of a config: {point: array}}"""
    tasks = [{"kind": "points", "model": str(folder / name), **input_of(config_of(name))} for name in CONFIGS]
    return dict(zip(CONFIGS, map(twin.arrays, twin.answers(tasks)), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_point_is_the_references(name, computed):
    config = config_of(name)
    expected, found = reference_points(config, random_weights(config)), computed[name]
    assert list(found) == inner_names(config)
    assert {name: value.shape for name, value in found.items()} == {name: x.shape for name, x in expected.items()}
    for point, value in expected.items():
        np.testing.assert_allclose(found[point], value, rtol=ROUNDING, atol=ROUNDING, err_msg=point)
