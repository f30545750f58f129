"""Rotary positions with other frequencies and widths: against transformers, and the same in every runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import SLOW
from random_models import write_model
from small_models import DECODER, random_weights

from export import OnnxTransformer
from export.validate import compare
from export.validate.reference import Reference
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.positions import rotary_frequencies, rotary_tables
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

GOLDEN = json.loads((Path(__file__).parents[2] / "mlx_transformer/core/golden_rotary.json").read_text())
SIZES = dict(**DECODER, vocab_size=40, d_model=16, heads=4, key_value_heads=2, d_k=8, d_ff=24, decoder_layers=2)
SIZES |= dict(max_positions=30, positions="rotary", norm="rmsnorm", norm_placement="pre", rotary_base=100.0)
LINEAR = dict(kind="linear", factor=4.0)
YARN = dict(kind="yarn", factor=4.0, length=40, beta_fast=2.0, beta_slow=0.5, truncate=True, attention_factor=1.3)
LONG = dict(kind="longrope", short=[1.0, 1.5, 2.0, 2.5], long=[2.0, 4.0, 6.0, 9.0], length=12, attention_factor=1.2)
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": dict(rotary_scaling=LINEAR),
    "llama3": dict(rotary_scaling=dict(kind="llama3", factor=8.0, low=1.0, high=4.0, length=20)),
    "yarn": dict(rotary_scaling=YARN),
    "longrope": dict(rotary_scaling=LONG),
    "divisors": dict(rotary_scaling=dict(kind="divisors", divisors=[1.0, 1.5, 8.0]), rotary_width=6),
    "partial": dict(rotary_width=2),
    "by layer": dict(
        rotary_scaling=LINEAR,
        layer_pattern=[{"rotary_scaling": {}, "rotary_base": 7.0}, {"rotary_width": 4}, {"positions": "none"}],
        decoder_layers=4,
    ),
}


def config_of(name: str, **changes: Any) -> TransformerConfig:
    return TransformerConfig.from_dict({**SIZES, **SCALINGS[name], **changes})


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda row: f"{row['scaling']['kind']}-{row['width']}")
def test_frequencies_are_those_of_transformers(golden: dict[str, Any]) -> None:
    """Within three roundings to float32, of which the angle itself is one."""
    changes = dict(rotary_scaling=golden["scaling"], rotary_base=golden["base"], rotary_width=golden["width"], d_k=96)
    config = TransformerConfig.from_dict({**SIZES, **changes})
    for long, name in ((False, "frequencies"), (True, "long")):
        np.testing.assert_allclose(rotary_frequencies(config, long), golden[name], rtol=4e-7)


def test_a_table_is_that_of_transformers_at_far_positions() -> None:
    """Its angles are float32: position times frequency, rounded once."""
    config = TransformerConfig.from_dict({**SIZES, "rotary_base": 10000.0, "max_positions": 10000})
    frequency = np.float32(1) / np.array([1, 10, 100, 1000], np.float32)
    angle = (np.float32(9999) * frequency).astype(np.float64)
    cos, sin = (table[9999] for table in rotary_tables(10000, config))
    assert np.array_equal(cos, np.cos(angle).astype(np.float32))
    assert np.array_equal(sin, np.sin(angle).astype(np.float32))
    assert np.abs(cos - np.cos(9999 * 10.0 ** -np.arange(4))).max() > 1e-5  # float64's are others


@pytest.mark.fast("partial", "longrope")
@pytest.mark.parametrize(
    "name",
    [name if name in ("by layer", "longrope", "partial") else pytest.param(name, marks=SLOW) for name in SCALINGS],
)
def test_runtimes_agree(name: str, tmp_path: Path) -> None:
    model, onnx = write_model(config_of(name), tmp_path, 3)
    searches = name == "by layer"  # a table of its own in some layers: the others' is one table, whatever is in it
    report = compare(model, onnx, ["mlx", "onnxruntime"], 3, threads=1, searches=searches)
    assert report.equal, report.failures()


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no scaling": ("linear", dict(rotary_scaling={})),
    "another base": ("linear", dict(rotary_base=101.0)),
    "another factor": ("llama3", dict(rotary_scaling=dict(kind="llama3", factor=7.0, low=1.0, high=4.0, length=20))),
    "another length": ("llama3", dict(rotary_scaling=dict(kind="llama3", factor=8.0, low=1.0, high=4.0, length=21))),
    "linear for llama3": ("llama3", dict(rotary_scaling=dict(kind="linear", factor=8.0))),
    "no attention factor": ("yarn", dict(rotary_scaling={**YARN, "attention_factor": 1.0})),
    "not truncated": ("yarn", dict(rotary_scaling={**YARN, "truncate": False})),
    "another beta": ("yarn", dict(rotary_scaling={**YARN, "beta_fast": 4.0})),
    "always short": ("longrope", dict(rotary_scaling={**LONG, "length": 1000})),
    "always long": ("longrope", dict(rotary_scaling={**LONG, "short": LONG["long"]})),
    "no divisors": ("divisors", dict(rotary_scaling={})),
    "pairs over the whole head": ("partial", dict(rotary_width=None)),
    "one scaling for all layers": ("by layer", dict(layer_pattern=[{"rotary_base": 7.0}, {"rotary_width": 4}])),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_option_counts(name: str) -> None:
    """With the wrong one the logits are others, by far more than the rounding that the rule allows."""
    right, changes = WRONG[name]
    config = config_of(right)
    weights, ids = random_weights(config), np.random.default_rng(3).integers(5, 40, (2, 20))
    short, long = (
        np.abs(Reference(replace(config, **changes), weights)(x) - Reference(config, weights)(x)).max()
        for x in (ids[:, :10], ids)
    )
    assert max(short, long) > 1e-3


def test_a_row_is_long_by_its_own_length() -> None:
    """Beside a long row a short one has its own frequencies, and each run those of its last position."""
    config = config_of("longrope")
    weights, rng = random_weights(config), np.random.default_rng(1)
    ids = rng.integers(5, 40, (2, 20))
    mask = np.arange(20) >= np.array([[0], [9]])
    models = Reference(config, weights), Transformer.from_weights(config, weights)
    for model in models:
        both, alone = np.array(model(ids, mask=mask)), np.array(model(ids[1:, 9:]))
        np.testing.assert_allclose(both[1:, 9:], alone, rtol=1e-4, atol=1e-5)
    short, long = (
        replace(config, rotary_scaling={**LONG, "short": LONG[n], "long": LONG[n]}) for n in ("short", "long")
    )
    for length, same in ((12, short), (13, long)):
        expected = Reference(same, weights)(ids[:1, :length])
        assert np.array_equal(models[0](ids[:1, :length]), expected)
        np.testing.assert_allclose(np.array(models[1](ids[:1, :length])), expected, rtol=1e-4, atol=1e-5)


def test_each_token_is_that_of_a_full_pass_where_a_text_becomes_long(tmp_path: Path) -> None:
    """The longest short text has 12 tokens. Beams cross it in `compare`."""
    config = config_of("longrope")
    model, onnx = write_model(config, tmp_path, 3)
    reference = Reference(config, open_checkpoint(model).unread())
    prompts = [list(range(5, 5 + n)) for n in (7, 11, 12, 13)]
    never = dict(suppressed=[config.pad_id, config.bos_id, config.eos_id], max_new_tokens=6)
    for runtime in (Transformer.load(model), OnnxTransformer(onnx)):
        for prompt, (found,) in zip(prompts, runtime.search(prompts, **never), strict=True):
            for i, token in enumerate(found.ids):
                logits = reference([[*prompt, *found.ids[:i]]])[0, -1]
                assert token == 3 + logits[3:].argmax()


def test_a_decoder_ends_at_its_length_in_both_runtimes(tmp_path: Path) -> None:
    model, onnx = write_model(config_of("linear"), tmp_path, 3)
    for runtime in (Transformer.load(model), OnnxTransformer(onnx)):
        assert len(runtime.search([[5] * 25], min_new_tokens=6)[0][0].ids) == 6
        with pytest.raises(UserError, match="31 tokens, the model takes at most 30"):
            runtime.search([[5] * 31])
        with pytest.raises(UserError, match="leaves room for 6 tokens"):
            runtime.search([[5] * 25], max_new_tokens=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rotary_width=10), "rotary_width=10 is wider than a head, d_k=8"),
        (dict(rotary_width=3), "turns pairs: rotary_width=3 must be even"),
        (dict(rotary_scaling=3), "rotary_scaling=3 must be a table"),
        (dict(rotary_scaling={"factor": 2}), "kind=None is not one of linear, llama3"),
        (dict(rotary_scaling={"kind": "dynamic"}), "kind='dynamic' is not one of linear, llama3"),
        (dict(rotary_scaling={"kind": "linear"}), "rotary_scaling: linear needs factor"),
        (dict(rotary_scaling={**LINEAR, "low": 1}), "rotary_scaling: linear has no 'low'"),
        (dict(rotary_scaling={"kind": "linear", "factor": True}), "factor=True must be a number above 0"),
        (dict(rotary_scaling={"kind": "linear", "factor": float("nan")}), "factor=nan must be a number above 0"),
        (dict(rotary_scaling={**YARN, "length": 8.5}), "length=8.5 must be a whole number"),
        (dict(rotary_scaling={**YARN, "truncate": 1}), "truncate=1 must be true or false"),
        (dict(rotary_scaling=YARN, rotary_base=1.0), "yarn needs a base over 1: rotary_base=1.0"),
        (
            dict(rotary_scaling={"kind": "divisors", "divisors": [1, 2]}),
            "divisors has 2 numbers, needs one for each of 4",
        ),
        (dict(rotary_scaling={"kind": "divisors", "divisors": [1, 2, 3, "x"]}), "must be a list of numbers"),
        (dict(rotary_scaling=dict(kind="llama3", factor=2, low=4, high=4, length=9)), "high=4 must be more than low=4"),
        (dict(layer_pattern=[{"rotary_scaling": {"kind": "linear"}}]), "layer_pattern: rotary_scaling: linear needs"),
        (
            dict(architecture="encoder", encoder_layers=1, decoder_layers=0, tie_embeddings="all", rotary_scaling=LONG),
            "longrope is of a decoder alone, not of 'encoder'",
        ),
        (dict(layer_pattern=[{"rotary_width": 0}]), "layer_pattern: rotary_width=0 must be a whole number"),
        (dict(positions="learned", rotary_scaling=LINEAR), "rotary_scaling needs positions='rotary', not 'learned'"),
        (dict(positions="none", layer_pattern=[{"rotary_width": 2}]), "layer_pattern: rotary_width needs positions"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TransformerConfig.from_dict({**SIZES, **changes})
