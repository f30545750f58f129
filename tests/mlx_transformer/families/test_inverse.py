"""What a family can write is what it reads back equal: all families, over configs drawn from every field of ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from covering_configs import configs
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from small_models import random_weights

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.families.engine import Family, Published, config_of, differences, exported, imported
from mlx_transformer.families.table import FAMILIES, family_of
from mlx_transformer.system.errors import UserError

HERE = Path("here")
ALWAYS = "vocab_size d_model encoder_layers decoder_layers heads d_ff activation positions max_positions dropout "
ALWAYS += "attention_dropout tie_embeddings scale_embeddings pad_id bos_id eos_id"
"""Fields of which every family says something, for none of their models is meant to have our default by chance."""


def nearest(family: Family, config: TransformerConfig) -> TransformerConfig:
    """What the family's reader makes of the config.json that its writer makes of any model's config, once its heads
    divide d_model and its vocabularies have one size, as most families want it."""
    widths = dict(d_model=-(-config.d_model // 8) * 8, heads=4, key_value_heads=4)
    config = dataclasses.replace(config, **widths, source_vocab_size=config.vocab_size)
    fields, problems = family.read_config(family.write_config(config), {})
    if problems:
        reject()
    try:
        return TransformerConfig.from_dict(fields)
    except UserError:  # such as ids outside the smaller of two vocabularies
        reject()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_forgets_a_field_that_all_have(name: str) -> None:
    fields, _ = FAMILIES[name].read_config({}, {})
    assert not set(ALWAYS.split()) - fields.keys()


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=3)
@given(data=st.data())
def test_there_and_back(name: str, data: st.DataObject) -> None:
    assert_back(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=400)
@given(data=st.data())
def test_there_and_back_many_times(name: str, data: st.DataObject) -> None:
    assert_back(name, data)


def assert_back(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    full = nearest(family, data.draw(configs(family.ours.get("architecture", "encoder-decoder"))))
    assert not differences(family, full)
    # Biases that it has everywhere and ours has not are zeros there, and left out again where ours has none by default.
    lacking = [name for name in ("attention_bias", "output_bias") if family.ours.get(name) and data.draw(st.booleans())]
    ours = dataclasses.replace(full, **dict.fromkeys(lacking, False))
    weights = random_weights(ours)
    values, tensors = exported(family, ours, weights.items(), HERE)
    back, read = imported(family, Published(HERE, values, {}, tensors))
    assert back == ours
    assert read.keys() == weights.keys() == parameter_shapes(ours).keys()
    offset = {n for n, (_, at) in family.places(full).items() if at.offset}  # w for 1 + w has fewer bits of small sums
    assert all(np.asarray(read[n]).tobytes() == weights[n].tobytes() for n in weights if n not in offset)
    assert all(np.allclose(read[n], weights[n], rtol=0, atol=2.0**-22) for n in offset & weights.keys())
    packed = sum(at.rows is not None and at.rows[0] > 0 for _, at in family.places(full).values())
    typed = dataclasses.replace(full, token_types=values.get("type_vocab_size", full.token_types))
    assert typed.token_types or "type_vocab_size" not in values  # `transformers` looks one up always
    assert len(set(map(id, tensors.values()))) == len(parameter_shapes(typed)) - packed


@settings(max_examples=30)
@given(config=configs())
def test_a_model_is_written_by_a_family_that_has_it_or_refused_with_reasons(config: TransformerConfig) -> None:
    assert_written_or_refused(config)


@pytest.mark.slow
@settings(max_examples=400)
@given(config=configs())
def test_many_models_are_written_by_a_family_that_has_them_or_refused(config: TransformerConfig) -> None:
    assert_written_or_refused(config)


def assert_written_or_refused(config: TransformerConfig) -> None:
    able = [family for family in FAMILIES.values() if not differences(family, config)]
    chosen = family_of(config)
    if able:
        assert chosen is able[0]
        return
    with pytest.raises(UserError) as error:
        exported(chosen, config, random_weights(config).items(), HERE)
    assert str(error.value).startswith(f"here: {chosen.name} has no such model: ")


def test_each_family_is_chosen_for_a_model_of_its_own() -> None:
    sizes = dict(vocab_size=50, d_model=32, heads=4, d_ff=48, encoder_layers=1, decoder_layers=1)
    t5 = dict(norm="rmsnorm", norm_placement="pre", positions="relative", feed_forward_bias=False)
    t5 |= dict(scale_embeddings=False, attention_scale=1.0, norm_epsilon=1e-6)
    models = {
        "marian": {},
        "pegasus": dict(norm_placement="pre"),
        "bart": dict(embedding_norm=True, positions="learned"),
        "mbart": dict(embedding_norm=True, positions="learned", norm_placement="pre"),
        "t5": {**t5, "logit_scale": 32**-0.5},
        "umt5": {**t5, "logit_scale": 32**-0.5, "positions": "relative_layers"},
    }
    for name, changes in models.items():
        assert family_of(TransformerConfig(**sizes, **changes)).model_type == name
    alone = dict(architecture="encoder", vocab_size=50, d_model=32, heads=4, d_ff=48, decoder_layers=0)
    alone |= dict(scale_embeddings=False, embedding_norm=True)
    bert = dict(positions="learned", attention_bias=True, activation="gelu", norm_epsilon=1e-12, dropout=0.1)
    head = dict(labels=("a", "b"), kind="classes")
    modern = dict(positions="rotary", norm_placement="pre", gated=True, first_norm=False, norm_bias=False, dropout=0.0)
    encoders = {
        "bert": {**bert, "head": Head(activation="gelu", norm=True), "output_bias": True, "token_types": 2},
        "distilbert": {**bert, "head": Head(**head, activation="relu"), "output_bias": True},
        "modernbert": {**modern, "head": Head(kind="hidden"), "layer_pattern": [{}, {"window": 4}]},
    }
    for name, changes in encoders.items():
        assert family_of(TransformerConfig(**alone, **changes)).model_type == name


DAMAGED = {
    "missing encoder.block.1.layer.1.layer_norm.weight (16,)": lambda t: t.pop(
        "encoder.block.1.layer.1.layer_norm.weight"
    ),
    "encoder.block.0.layer.1.DenseReluDense.wo.weight is (20, 16), expected (16, 20)": lambda t: t.update(
        {n: t[n].T for n in ["encoder.block.0.layer.1.DenseReluDense.wo.weight"]}
    ),
    "encoder.embed_tokens.weight differs from shared.weight, which config.json ties it to": lambda t: t.update(
        {"encoder.embed_tokens.weight": t["shared.weight"] + 1}
    ),
    "unknown decoder.block.0.layer.0.SelfAttention.q.bias (18,)": lambda t: t.update(
        {"decoder.block.0.layer.0.SelfAttention.q.bias": np.zeros(18, np.float32)}
    ),
}


def test_everything_that_is_wrong_with_a_folder_is_listed_at_once() -> None:
    t5 = FAMILIES["t5"]
    config = dataclasses.replace(
        nearest(t5, TransformerConfig(vocab_size=40, d_model=16, heads=3, d_k=6, d_v=6, d_ff=20, encoder_layers=2)),
        activation="relu",
    )
    values, tensors = exported(t5, config, random_weights(config).items(), HERE)
    # Unused, but in files of old.
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros((32, 3), np.float32)
    assert imported(t5, Published(HERE, values, {}, tensors))[0] == config
    for damage in DAMAGED.values():
        damage(tensors)
    with pytest.raises(UserError) as error:
        imported(t5, Published(HERE, values, {}, tensors))
    message = str(error.value)
    assert all(reason in message for reason in DAMAGED)
    assert message.count(";") == len(DAMAGED) - 1
    wrong = dict(feed_forward_proj="gated-tanh", d_kv="6", num_heads=2.5, is_encoder_decoder=False)
    with pytest.raises(UserError) as error:
        imported(t5, Published(HERE, {**values, **wrong}, {}, tensors))
    assert str(error.value) == (
        "here/config.json: num_heads=2.5 must be a whole number; d_kv='6' must be a whole number; "
        "feed_forward_proj='gated-tanh' is not one of relu, gelu, silu, gelu_new, gated-gelu, gated-relu, gated-silu; "
        "is_encoder_decoder is off"
    )


def test_a_tied_mt5_has_the_logits_of_the_version_that_saved_it() -> None:
    """Versions of transformers differ, so none is written."""
    mt5 = FAMILIES["mt5"]
    untied = nearest(mt5, TransformerConfig(vocab_size=40, tie_embeddings="source-target"))
    tied = {**mt5.write_config(untied), "tie_word_embeddings": True}
    scales = {v: mt5.read_config({**tied, "transformers_version": v}, {})[0]["logit_scale"] for v in ("4.57.6", "5.0")}
    assert scales == {"4.57.6": tied["d_model"] ** -0.5, "5.0": None}
    reason = "tie_word_embeddings is on, and no transformers_version says what that means"
    assert mt5.read_config(tied, {})[1] == [reason]
    four = config_of(mt5, {**tied, "transformers_version": "4.0"}, {}, HERE)
    assert reason in differences(mt5, four)
    assert not differences(FAMILIES["t5"], four)
