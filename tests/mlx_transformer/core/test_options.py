"""The matrices of models are made of the config's fields: a new option is in all of them without being listed."""

import dataclasses
from typing import Annotated, Literal

import pytest
from options import OPTIONS, completed, covering, factors_of, fitted, merged, options_of
from small_models import CHOICES, NAMED, alone, configs, encoder_decoder

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import Bounds, field_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(TransformerConfig):
    """What tomorrow's config may hold."""

    head_norm: bool = False
    residual: Literal["plain", "scaled", "gated"] = "plain"
    reach: Annotated[int, Bounds(at_least=1, at_most=4096)] | None = None
    capping: Annotated[float, Bounds(above=0)] | None = None


def test_options_are_the_fields_with_few_values() -> None:
    assert options_of(More).keys() - OPTIONS.keys() == {"head_norm", "residual"}
    assert options_of(More)["residual"] == ("plain", "scaled", "gated")
    assert OPTIONS["gated"] == (False, True)
    assert {"d_model", "dropout", "pad_id"}.isdisjoint(OPTIONS)
    assert field_types(More).keys() | {"decoder", "head", "layer_pattern", "rotary_scaling"} == {
        field.name for field in dataclasses.fields(More)
    }


def test_new_options_are_checked_by_their_annotations() -> None:
    assert More(vocab_size=9, reach=4, capping=30).capping == 30.0
    with pytest.raises(UserError) as caught:
        More.from_dict({"vocab_size": 9, "head_norm": 1, "residual": "none", "reach": 5000, "capping": 0})
    assert str(caught.value) == (
        "TransformerConfig: head_norm=1 must be true or false; "
        "residual='none' is not one of plain, scaled, gated; "
        "reach=5000 must be a whole number of at least 1 and at most 4,096; "
        "capping=0 must be a finite number above 0"
    )


def test_new_options_join_the_named_models() -> None:
    added = {"head_norm=True": {"head_norm": True}}
    added |= {f"residual={value}": {"residual": value} for value in ("scaled", "gated")}
    assert completed(NAMED, More) == CHOICES | added
    assert completed(NAMED) == CHOICES


def test_new_options_join_the_covering_set_in_every_pair() -> None:
    factors = factors_of({"reach": [{}, {"reach": 4}]}, More)
    chosen = [
        merged(factors, choice) for choice in covering(factors, lambda values: values == fitted(values), draws=3000)
    ]
    seen = {(c["residual"], c["norm"], c["head_norm"], c.get("reach")) for c in chosen}
    for first, second in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)):
        pairs = {(c[first], c[second]) for c in seen}
        assert len(pairs) == len({c[first] for c in seen}) * len({c[second] for c in seen})
    assert {c[0] for c in seen} == {"plain", "scaled", "gated"}
    assert len(chosen) < 48  # at least 8 positions x 4 placements of norms


@pytest.mark.parametrize("architecture", OPTIONS["architecture"])
def test_the_named_models_have_every_value_of_every_option(architecture: str) -> None:
    made = [encoder_decoder(n) if architecture == "encoder-decoder" else alone(n, architecture) for n in CHOICES]
    assert all(config in configs().values() for config in made)
    for name, values in OPTIONS.items():
        possible = {
            TransformerConfig(**fitted({"vocab_size": 9, "architecture": architecture, name: value}))
            for value in values
        }
        if name != "architecture":
            assert {getattr(config, name) for config in made} == {getattr(config, name) for config in possible}
