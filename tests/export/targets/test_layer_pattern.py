"""Layers with fields of their own (windows, rotary bases, heads, widths), and the norms that ModernBERT leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import combined
from random_models import write_model
from small_models import random_weights

from export import export_search
from export.validate import compare
from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
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


TRANSLATOR = dict(architecture="encoder-decoder", encoder_layers=2, decoder_layers=3)
OWN: dict[str, dict[str, Any]] = {
    "heads": dict(**TRANSLATOR, layer_pattern=[{}, {"heads": 2, "d_ff": 9, "activation": "gelu"}]),
    "rotary": dict(
        **TRANSLATOR,
        positions="rotary",
        layer_pattern=[{"positions": "none", "gated": True}, {"rotary_base": 50.0, "heads": 2}],
        decoder={"layer_pattern": [{"attention_bias": True}, {"d_k": 6, "d_v": 3, "attention_scale": 0.4}]},
    ),
    "a table in each layer": dict(**TRANSLATOR, positions="relative_layers", layer_pattern=[{}, {"heads": 2}]),
    "a table a stack": dict(
        **TRANSLATOR,
        positions="relative",
        layer_pattern=[{}, {"query_key_norm": True, "feed_forward_bias": False}],
        decoder={"heads": 2},
    ),
    "recurrent": dict(**TRANSLATOR, decoder_self_attention="ssru", layer_pattern=[{}, {"heads": 2}]),
    "decoder": dict(
        architecture="decoder",
        tie_embeddings="target-output",
        encoder_layers=0,
        decoder_layers=4,
        positions="rotary",
        norm="rmsnorm",
        layer_pattern=[
            {"window": 2},
            {"positions": "none"},
            {"rotary_base": 77.0, "d_k": 6, "window": 5},
            {"key_value_heads": 1, "d_ff": 7},
        ],
    ),
}
"""Models of which every layer is another."""


@pytest.mark.fast("heads-{}", "a table in each layer-{'target': 'cpu'}")
@pytest.mark.parametrize(
    ("name", "options"),
    combined(OWN, [{}, dict(target="cpu"), dict(precision="int8")], step=2),
    ids=str,
)
def test_layers_of_their_own_are_equal_in_every_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if OWN[name]["architecture"] == "decoder":
        options = {k: v for k, v in options.items() if k == "precision"}
    model, onnx = write_model(config_of(**OWN[name]), tmp_path, 5, accept_loss=True, **options)
    runtimes = ["onnxruntime"] if options else ["mlx", "onnxruntime"]
    report = compare(model, onnx, runtimes, 5, threads=1, searches=False)
    assert report.equal, report.failures()


@pytest.mark.fast("heads-portable")
@pytest.mark.parametrize(("name", "target"), combined([n for n in OWN if n != "decoder"], ["portable", "cpu"], step=3))
def test_the_search_inside_a_graph_is_equal(name: str, target: str, tmp_path: Path) -> None:
    model, _ = write_model(config_of(**OWN[name]), tmp_path, 5)
    report = compare(
        model, export_search(model, tmp_path / "one.onnx", target=target), ["onnxruntime"], 5, threads=1, longest=8
    )
    assert report.equal, report.failures()


@pytest.mark.parametrize("name", OWN)
def test_each_value_of_a_layer_counts(name: str) -> None:
    """Without it, the parameters or the output of the network are others."""
    config, rng = config_of(**OWN[name]), np.random.default_rng(3)
    weights, ids = random_weights(config), rng.integers(5, 40, (2, 7))
    targets = (ids,) if config.has_encoder and config.has_decoder else ()
    shapes, truth = parameter_shapes(config), Reference(config, weights)(ids, *targets)
    same = []
    for i, layer in enumerate(config.layer_pattern):
        for field in layer:
            entry = {other: x for other, x in layer.items() if other != field}
            pattern = [entry if n == i else each for n, each in enumerate(config.layer_pattern)]
            changed = replace(config, layer_pattern=pattern)
            if parameter_shapes(changed) == shapes:
                output = Reference(changed, weights)(ids, *targets)
                same += [(i, field)] if np.allclose(output, truth, rtol=1e-6) else []
    assert same == []


def config_of(**changes: Any) -> TransformerConfig:
    return TransformerConfig.from_dict({"architecture": "encoder", **SIZES, **changes})


@pytest.mark.fast("every third global-{'precision': 'float16'}", "modern-{'target': 'cpu'}", "all local-{}")
@pytest.mark.parametrize(
    ("name", "options"),
    combined(CONFIGS, [{}, dict(target="cpu"), dict(precision="float16")]),
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


ALONE = dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output")


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_a_key_at_the_edge_is_seen_and_one_beyond_is_not(window: int, causal: bool) -> None:
    """In one layer: whichever key changes changes what sees it, and nothing else; in both runtimes."""
    stack = dict(**ALONE, decoder_layers=1) if causal else dict(encoder_layers=1)
    config = config_of(**stack, positions="learned", window=window)
    weights = random_weights(config)
    models = Reference(config, weights), Transformer.from_weights(config, weights)
    ids = np.arange(5, 17)[None]
    changed = ids.copy()
    changed[0, 6] = 30
    for run in models if causal else (model.encode for model in models):
        before, after = (np.array(run(x)) for x in (ids, changed))
        moved = np.abs(before - after).max(axis=-1)[0] > 0
        assert np.flatnonzero(moved).tolist() == list(range(6 if causal else 6 - window, 6 + window + (not causal)))


@pytest.mark.parametrize(("window", "padded"), combined([1, 4, 40], [False, True]))
def test_a_decoder_with_windows_goes_on_from_its_cache_at_every_point(window: int, padded: bool) -> None:
    """Columns are counted, padding on the left with them; a window of one key more gives other logits."""
    layers: Any = dict(**ALONE, decoder_layers=3, positions="rotary", norm_placement="pre", key_value_heads=2)
    config = config_of(**layers, layer_pattern=[{"window": window}, {"window": window, "rotary_base": 100.0}, {}])
    weights, length = random_weights(config), 11
    ids = np.random.default_rng(2).integers(5, 40, (3, length))
    mask = np.arange(length) >= np.array([[0], [4], [9]]) if padded else np.ones((3, length), bool)
    reference, model = Reference(config, weights), Transformer.from_weights(config, weights)
    truth = reference(ids, mask=mask)
    wider = [{**layer, "window": window + 1} if layer else layer for layer in config.layer_pattern]
    other = Reference(replace(config, layer_pattern=wider), weights)(ids, mask=mask)
    assert (np.abs(other - truth)[mask].max() > 1e-3) == (window < length)
    for split in range(1, length):
        cache = model.start(prompt_mask=mask) if padded else model.start()
        parts = [ids[:, :split], *(ids[:, i : i + 1] for i in range(split, length))]
        logits = np.concatenate([np.array(model.step(part, cache)) for part in parts], axis=1)
        np.testing.assert_allclose(logits[mask], truth[mask], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(np.array(model(ids, mask=mask))[mask], truth[mask], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(window=0), "window=0 must be a whole number"),
        (dict(layer_pattern=[dict(window=0)]), "layer_pattern: window=0 must be a whole number"),
        (dict(layer_pattern=[dict(vocab_size=2)]), "layer_pattern: 'vocab_size' is not one of heads"),
        (dict(layer_pattern=[dict(heads=3)]), "layer_pattern: d_model=16 is not a multiple of heads=3"),
        (dict(layer_pattern=[dict(positions="learned")]), "positions='learned': layers can differ in"),
        (dict(positions="relative", layer_pattern=[dict(heads=2)]), "heads can't differ with positions='relative'"),
        (dict(layer_pattern=3), "layer_pattern=3 must be a list of tables"),
        (dict(layer_pattern=[dict(rotary_base=5.0)]), "rotary_base needs positions='rotary'"),
        (dict(positions="relative", window=2), "positions='relative' has no window"),
        (dict(norm="rmsnorm", norm_bias=False), "norm_bias=False needs layernorm"),
        (dict(first_norm=False), "first_norm=False: norms behind the sub-layers are in every layer"),
        (
            dict(architecture="encoder-decoder", decoder_layers=1, window=2),
            "window is of an encoder or a decoder alone",
        ),
        (dict(**ALONE, decoder_layers=1, first_norm=False, norm_placement="pre"), "needs architecture='encoder'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(**changes)
