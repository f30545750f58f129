"""Layers of an encoder that see near keys alone, or turn by a base of their own; norms without bias, and none first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import combined
from random_models import write_model
from small_models import random_weights

from export.validate import compare
from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

SIZES = dict(vocab_size=40, d_model=16, heads=4, d_ff=24, encoder_layers=4, decoder_layers=0, max_positions=24)
LOCAL = dict(window=3, rotary_base=100.0)
CONFIGS: dict[str, dict[str, Any]] = {
    "all local": dict(positions="learned", window=1),
    "every third global": dict(positions="rotary", layer_pattern=[{}, LOCAL, LOCAL], norm_placement="pre"),
    "modern": dict(positions="rotary", layer_pattern=[{}, LOCAL], norm_placement="pre", first_norm=False)
    | dict(norm_bias=False, embedding_norm=True, gated=True, feed_forward_bias=False, activation="gelu"),
    "wider than the text": dict(positions="none", layer_pattern=[dict(window=1000), {}, dict(window=2)]),
    "no bias": dict(norm_bias=False),
}


def config_of(**changes: Any) -> TransformerConfig:
    return TransformerConfig.from_dict({"architecture": "encoder", **SIZES, **changes})


@pytest.mark.parametrize(
    ("name", "options"),
    combined(CONFIGS, [{}, dict(target="coreml", fixed_shape="2x12"), dict(precision="float16")]),
    ids=str,
)
def test_layers_are_equal_in_every_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, onnx = write_model(config_of(**CONFIGS[name]), tmp_path, 5, accept_loss=True, **options)
    report = compare(model, onnx, ["onnxruntime"] if options else ["mlx", "onnxruntime"], 5, threads=1)
    assert report.equal, report.failures()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_kept(name: str) -> None:
    config = config_of(**CONFIGS[name])
    assert TransformerConfig.from_json(config.to_json()) == config


def test_a_pattern_is_as_short_as_it_can_be() -> None:
    def pattern(*layers: dict) -> list[dict]:
        return config_of(positions="rotary", layer_pattern=layers).to_dict().get("layer_pattern", [])

    assert pattern({}, LOCAL, {}, LOCAL) == [{}, LOCAL]
    assert pattern({}, {"rotary_base": 10000.0}) == pattern() == []
    assert pattern(LOCAL, LOCAL, LOCAL) == [LOCAL]
    assert config_of(positions="rotary", layer_pattern=[{}, LOCAL]).of("encoder", 3).window == 3


@pytest.mark.parametrize("window", [1, 3])
def test_a_key_at_the_edge_is_seen_and_one_beyond_is_not(window: int) -> None:
    """In one layer: whichever key changes changes what sees it, and nothing else; in both runtimes."""
    config = config_of(encoder_layers=1, positions="learned", window=window)
    weights = random_weights(config)
    runtimes = (Reference(config, weights).encode, Transformer.from_weights(config, weights).encode)
    ids = np.arange(5, 17)[None]
    changed = ids.copy()
    changed[0, 6] = 30
    for encode in runtimes:
        before, after = (np.array(encode(x)) for x in (ids, changed))
        moved = np.abs(before - after).max(axis=-1)[0] > 0
        assert np.flatnonzero(moved).tolist() == list(range(6 - window, 7 + window))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(window=0), "window=0 must be a whole number"),
        (dict(layer_pattern=[dict(window=0)]), "layer_pattern: window=0 must be a whole number"),
        (dict(layer_pattern=[dict(heads=2)]), "layer_pattern: 'heads' is not one of rotary_base, window"),
        (dict(layer_pattern=3), "layer_pattern=3 must be a list of tables"),
        (dict(layer_pattern=[dict(rotary_base=5.0)]), "rotary_base is of rotary positions"),
        (dict(positions="relative", window=2), "no window, no pattern"),
        (dict(norm="rmsnorm", norm_bias=False), "norm_bias is of layernorm"),
        (dict(first_norm=False), "first_norm: norms behind the sub-layers are in every layer"),
        (dict(architecture="encoder-decoder", decoder_layers=1, window=2), "of an encoder alone"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(**changes)
