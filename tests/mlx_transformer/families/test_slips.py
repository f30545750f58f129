"""Slips in a family's own file are told by what they are about, and what a folder says can't break its rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_transformer.families.engine import At, Family, config_of
from mlx_transformer.families.keys import Key
from mlx_transformer.families.table import FAMILIES
from mlx_transformer.system.errors import UserError

T5 = FAMILIES["t5"]
CONFIG = config_of(T5, {}, {}, Path("here"))
CROSS, NORM = "decoder.layers.*.cross_attention.(query|key|value|output)_proj", "decoder.layers.*.cross_attention_norm"


def with_names(**changes: str | At | None) -> Family:
    """T5 with other lines in its table of names, or, for None, without them."""
    names = {name: at for name, at in {**T5.names(CONFIG), **changes}.items() if at is not None}
    return replace(T5, names=lambda config: names)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (with_names(**{NORM: None}), "T5: no line of its names has decoder.layers.0.cross_attention_norm.weight"),
        (with_names(**{CROSS: "x.*.(q|k|v)"}), f"'x.*.(q|k|v)' has other choices or numbers than '{CROSS}'"),
        (with_names(**{NORM: "x.*.y.*"}), f"'x.*.y.*' has other choices or numbers than '{NORM}'"),
        (with_names(**{NORM: "x.*.(y|z)"}), f"'x.*.(y|z)' has other choices or numbers than '{NORM}'"),
    ],
    ids=["a gap", "fewer words", "another number", "a choice of nothing"],
)
def test_a_table_of_names(family: Family, message: str) -> None:
    with pytest.raises(LookupError) as error:
        family.places(CONFIG)
    assert str(error.value) == message


def test_one_key_of_two_fields_needs_words() -> None:
    with pytest.raises(ValueError, match="Key 'dropout_rate': 1 of theirs and 2 of ours need words"):
        Key("dropout_rate", ("dropout", "attention_dropout"), 0.1)


@pytest.mark.parametrize("width", [0, -4, 10**400], ids=["zero", "negative", "huge"])
def test_what_follows_is_computed_of_numbers_within_bounds(width: int) -> None:
    """The scale of T5's logits is a power of d_model."""
    with pytest.raises(UserError) as error:
        config_of(T5, {"d_model": width}, {}, Path("here"))
    message = str(error.value)
    assert message.startswith("here: TransformerConfig: d_model=")
    assert message.endswith("must be a whole number of at least 1 and at most 65,536")
