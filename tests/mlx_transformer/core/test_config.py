"""TransformerConfig: defaults of the paper, presets with its parameter counts, strict JSON in and out."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from options import drawn, options

from mlx_transformer.core.config import PRESETS, YOUNGER, TransformerConfig
from mlx_transformer.core.parameters import parameter_count, parameter_shapes
from mlx_transformer.system.errors import UserError

VOCABULARY = 37_000  # section 5.1: about 37000 tokens, shared


def test_defaults_are_the_papers_base_model():
    config = TransformerConfig(vocab_size=VOCABULARY)
    base = dataclasses.replace(config, dropout=0.1)
    assert TransformerConfig.preset("base", VOCABULARY) == base
    assert (config.encoder_layers, config.d_model, config.d_ff, config.heads) == (6, 512, 2048, 8)
    assert (config.d_k, config.d_v, config.key_value_heads, config.source_vocab_size) == (64, 64, 8, VOCABULARY)
    assert (config.norm_placement, config.activation, config.positions) == ("post", "relu", "sinusoidal")


@pytest.mark.parametrize(("name", "count"), [("base", 65e6), ("big", 213e6)])
def test_parameters_of_table_3(name, count):
    config = TransformerConfig.preset(name, VOCABULARY)
    assert parameter_count(config) == pytest.approx(count, rel=0.04)
    assert parameter_count(config) == sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())


def test_base_counted_by_hand():
    """Six layers of 4 d^2 (encoder) and 8 d^2 (decoder) attention, 2 d d_ff + d_ff + d, norms of 2 d; one embedding."""
    d, ff = 512, 2048
    feed_forward, norm = 2 * d * ff + ff + d, 2 * d
    encoder, decoder = 4 * d * d + feed_forward + 2 * norm, 8 * d * d + feed_forward + 3 * norm
    assert parameter_count(TransformerConfig.preset("base", VOCABULARY)) == 6 * (encoder + decoder) + VOCABULARY * d


def test_a_student_is_marians_tiny():
    """Sizes, and the number of parameters that its published files have with 32,000 pieces."""
    config = TransformerConfig.preset("student", 32_000)
    assert parameter_count(config) == 16_907_008
    assert (config.decoder_self_attention, config.norm_placement, config.tie_embeddings) == ("ssru", "post", "all")
    assert (config.positions, config.norm_epsilon) == ("sinusoidal_concat", 1e-6)
    assert TransformerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "student"])
def test_presets_have_heads_that_metal_has_fused_attention_for(name):
    assert TransformerConfig.preset(name, 100).d_k == 64


def test_preset_with_changes():
    config = TransformerConfig.preset("tiny", 500, d_ff=96, norm="rmsnorm")
    assert (config.d_ff, config.norm, config.d_model) == (96, "rmsnorm", 128)
    with pytest.raises(UserError, match="unknown preset 'huge': choose one of tiny, small, base, big, student"):
        TransformerConfig.preset("huge", 500)
    with pytest.raises(UserError, match=r"unknown key 'dff' \(did you mean 'd_ff'\?\)"):
        TransformerConfig.preset("tiny", 500, dff=96)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig(vocab_size=9).d_model = 4  # type: ignore[misc]


@st.composite
def configs(draw):
    numbers = st.fixed_dictionaries(
        {
            "vocab_size": st.integers(3, 50),
            "d_model": st.sampled_from([8, 12, 64]),
            "heads": st.sampled_from([1, 2, 4]),
            "dropout": st.floats(0, 0.9),
            "norm_epsilon": st.floats(1e-12, 1e-2),
        }
    )
    return drawn({**draw(options()), **draw(numbers), "d_k": 4, "d_v": 6})


@settings(max_examples=30)
@given(configs())
def test_json_round_trip(config):
    assert_comes_back(config)


@pytest.mark.slow
@settings(max_examples=1000)
@given(configs())
def test_json_round_trip_many_times(config):
    assert_comes_back(config)


def assert_comes_back(config):
    assert TransformerConfig.from_json(config.to_json()) == config
    assert TransformerConfig.from_dict(config.to_dict()) == config
    assert json.loads(config.to_json())["d_v"] == 6


@pytest.mark.parametrize("name", ["dropout", "norm_epsilon", "rotary_base"])
def test_a_whole_number_where_a_float_is_meant_becomes_one(name):
    config = TransformerConfig.from_json(json.dumps({"vocab_size": 9, name: 0 if name == "dropout" else 1}))
    assert type(getattr(config, name)) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("[" * 100_000, "not JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not JSON"),
        ("{}", "vocab_size is missing"),
        ('{"vocab_size": 9, "headz": 2, "xyzzy": 1}', r"unknown key 'headz' .*'head'.*; unknown key 'xyzzy'$"),
        ('{"vocab_size": 9, "dropout": NaN}', "dropout=nan"),
        ('{"vocab_size": 9, "heads": true}', "heads=True must be a whole number"),
        ('{"vocab_size": null}', "vocab_size=None must be a whole number"),
        ('{"vocab_size": 9, "d_model": "512", "heads": [8], "positions": {}}', "d_model='512' must"),
        ('{"vocab_size": 9, "encoder_layers": 1000000000}', "must be a whole number of at least 0 and at most 1,000$"),
        ('{"vocab_size": 4294967296}', "vocab_size=4294967296 must be a .* at most 1,048,576$"),
        ('{"vocab_size": 9, "max_positions": 2147483647}', "max_positions=2147483647 must be .* at most 1,048,576$"),
        ('{"vocab_size": 9, "d_model": 1000000000, "d_k": 0}', r"d_model=\d+ must be .* at most 65,536; d_k=0 must be"),
        ('{"vocab_size": 9, "positions": "%s"}' % ("x" * 1000), r"positions='x{12}\.\.\.x{13}' is not one of"),
    ],
)
def test_what_is_no_config_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        TransformerConfig.from_json(text)


def test_a_number_that_python_does_not_write():
    with pytest.raises(UserError, match="heads=a number of 33220 bits must be a whole number"):
        TransformerConfig(vocab_size=9, heads=10**10_000)
    with pytest.raises(UserError, match=r"heads=\[a number of 33220 bits\] must be a whole number"):
        TransformerConfig(vocab_size=9, heads=[10**10_000])  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(TransformerConfig)]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=5),
            st.lists(st.integers(), max_size=2),
        ),
    )
)
def test_any_values_give_a_config_or_a_user_error(values):
    try:
        config = TransformerConfig.from_dict(values)
    except UserError as error:
        assert str(error).startswith("TransformerConfig: ")  # noqa: PT017
    else:
        assert TransformerConfig.from_json(config.to_json()) == config


def test_files_of_models_without_younger_fields_stay_as_they_were():
    """Folders, search files and digests of config.json are the same bytes as before there were such fields."""
    plain = TransformerConfig(vocab_size=9)
    assert plain.to_dict().keys().isdisjoint(YOUNGER)
    assert {field.name for field in dataclasses.fields(plain)} == plain.to_dict().keys() | set(YOUNGER)
    scaled = dataclasses.replace(plain, attention_scale=1)
    assert json.loads(scaled.to_json())["attention_scale"] == 1.0
    assert TransformerConfig.from_json(scaled.to_json()) == scaled != plain


def test_a_stack_sees_what_it_has_of_its_own():
    config = TransformerConfig(vocab_size=9, d_model=64, heads=4, decoder={"heads": 8, "d_ff": 100})
    encoder, decoder = config.of("encoder"), config.of("decoder")
    assert (encoder.heads, encoder.d_k, encoder.d_ff) == (4, 16, 2048)
    assert (decoder.heads, decoder.key_value_heads, decoder.d_k, decoder.d_v, decoder.d_ff) == (8, 8, 8, 8, 100)
    assert config.of("decoder") is decoder
    assert decoder.of("decoder") is decoder
    assert hash(config) != hash(encoder)
    assert TransformerConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["decoder"] == {"heads": 8, "d_ff": 100}
    shapes = parameter_shapes(config)
    assert shapes["encoder.layers.0.feed_forward.up_proj.weight"] == (2048, 64)
    assert shapes["decoder.layers.0.feed_forward.up_proj.weight"] == (100, 64)
    relative = parameter_shapes(dataclasses.replace(config, positions="relative"))
    assert [relative[f"{stack}.positions.weight"] for stack in ("encoder", "decoder")] == [(32, 4), (32, 8)]


def test_of_a_stack_only_what_differs_is_kept():
    same = TransformerConfig(vocab_size=9, decoder={"heads": 8, "d_k": 64, "d_ff": 2048})
    assert same == TransformerConfig(vocab_size=9)
    assert "decoder" not in same.to_dict()
    assert same.of("decoder") is same
    assert dict(TransformerConfig(vocab_size=9, decoder={"heads": 16, "d_k": 32, "d_v": 64}).decoder) == {
        "heads": 16,
        "d_v": 64,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder": 3}, "decoder=3 must be a table of fields"),
        ({"decoder": {"dropout": 0.1}}, "decoder: 'dropout' is not one of heads, key_value_heads, d_k, d_v, d_ff"),
        ({"decoder": {"heads": "8"}}, r"decoder: heads='8' must be a whole number"),
        ({"decoder": {"heads": [8]}}, r"decoder: heads=\[8\] must be a whole number"),
        ({"decoder": {"heads": 7}}, "decoder: d_model=512 is not a multiple of heads=7: give d_k and d_v"),
        (
            dict(architecture="decoder", encoder_layers=0, tie_embeddings="none", decoder={"heads": 4}),
            "decoder: an architecture of 'decoder' alone has one stack",
        ),
    ],
)
def test_what_a_stack_cannot_have(fields, message):
    with pytest.raises(UserError, match=message):
        TransformerConfig.from_dict({"vocab_size": 9, **fields})
