"""The three models that come with the page: what it says of them is true of the numbers that are shipped."""

from __future__ import annotations

import json

import numpy as np
import pytest
import shipped_models as shipped
from shipped_models import DECODER, ENCODER, GOLDEN, SHIPPED, TIRED, TRANSLATOR, WIDE

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.data.built_in import NOTES, PREPARED
from mlx_transformer.training.recipe import load_recipe

NUMBERS = {TRANSLATOR: 295_936, DECODER: 144_256, ENCODER: 144_256}


@pytest.fixture(scope="module")
def facts():
    return shipped.facts()


@pytest.mark.parametrize("name", NUMBERS)
def test_they_are_small_and_made_by_their_recipes(name):
    checkpoint = open_checkpoint(SHIPPED / name)
    recipe = load_recipe(name, {})
    assert parameter_count(checkpoint.config) == NUMBERS[name]
    assert checkpoint.config == recipe.config(checkpoint.config.vocab_size)
    assert checkpoint.config.vocab_size == recipe.data.vocab_size
    assert {array.dtype for _, array in checkpoint.tensors()} == {np.dtype(np.float16)}
    files = {file.name for file in (SHIPPED / name).iterdir()}
    assert files == {"config.json", "manifest.json", "model.safetensors", "tokenizer.json"}


def close(found, golden, where="facts"):
    """Words are equal, numbers to two digits."""
    if isinstance(golden, dict):
        assert found.keys() == golden.keys(), where
        for name in golden:
            close(found[name], golden[name], f"{where}: {name}")
    elif isinstance(golden, list):
        assert len(found) == len(golden), where
        for one, other in zip(found, golden, strict=True):
            close(one, other, where)
    elif isinstance(golden, float):
        assert found == pytest.approx(golden, rel=5e-3, abs=1e-9), where
    else:
        assert found == golden, where


def test_numbers_are_those_that_are_told(facts):
    close(shipped.rounded(facts), json.loads(GOLDEN.read_text(encoding="utf-8")))


def test_sentences_of_the_notes_are_translated_also_the_one_that_it_never_saw(facts):
    assert facts["translations"] == NOTES


def test_switches_break_what_they_should(facts):
    found = facts["switches"]
    one, other = found["orders"]["positions"]
    assert one[0] == other[0]
    assert one[1] == pytest.approx(other[1], rel=1e-9)
    assert found["orders"]["on"][0][0] != found["orders"]["on"][1][0]
    moved = found["memory of a word in another place"]
    assert moved["positions"] < 1e-12 < 0.1 < moved["on"]
    ahead = found["earlier logits with another last word"]
    assert ahead["on"] == 0
    assert ahead["mask"] > 0.1
    assert found["bits"]["scale"]["encoder"] < found["bits"]["on"]["encoder"]
    assert found["bits"]["scale"]["cross"] < found["bits"]["on"]["cross"]
    log_p = found["log p"]
    assert log_p["on"] > -0.5
    assert log_p["residual"] < -20
    assert found["written"]["mask"][0] == found["written"]["on"][0] == NOTES[TIRED]  # word by word there is no future


def test_what_is_lost_without_a_part(facts):
    """All 24 heads and all ten sub-layers off, one at a time."""
    parts = dict(facts["parts"])
    whole = parts.pop("nothing")
    assert len(parts) == 34
    lost = {name: min(each[text] - whole[text] for text in whole) for name, each in parts.items()}
    encoder_heads = [loss for name, loss in lost.items() if name.startswith("encoder") and name[-1].isdigit()]
    assert len(encoder_heads) == 8
    assert sorted(encoder_heads)[1] > -0.06  # looking isn't using, but for one
    assert lost["encoder 0 self_attention 2"] < -1
    assert lost["decoder 1 cross_attention 0"] < -5


def test_the_others_go_on_and_fill_in(facts):
    cat, chicken = facts["next words"].values()
    assert cat[0][0] == " CAT"
    assert cat[0][1] > 0.9
    assert chicken[0][1] < 0.3  # it can't know
    fried, named = facts["hidden words"].values()
    assert {word for word, _ in fried} < {f" {prepared}" for prepared, _ in PREPARED}  # which of them it can't know
    assert named[0][0] == " CAT"
    assert named[0][1] > 0.9


def test_heads_look_where_the_page_says(facts):
    """Layers and heads counted from 1."""
    river = {(place, head, word, seen): weight for place, head, word, seen, weight in facts["looks"][shipped.RIVER]}
    assert river["encoder 2 self_attention", 3, " the", " bank"] > 0.99
    assert river["encoder 2 self_attention", 1, " the", " river"] > 0.99
    assert river["encoder 2 self_attention", 1, " bank", " river"] > 0.9
    for text, pronoun, why in ((TIRED, " es", " tired"), (WIDE, " sie", " wide")):
        looks = {(place, head, word, seen): weight for place, head, word, seen, weight in facts["looks"][text]}
        assert looks["encoder 1 self_attention", 3, " it", " street"] > 0.99  # also where it is the animal
        assert looks["encoder 2 self_attention", 4, " it", " street"] > 0.9
        assert looks["decoder 1 cross_attention", 4, pronoun, why] > 0.8
