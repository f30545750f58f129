"""Settings of published models: tokens and scores of `transformers` with them, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from combined import SLOW

from mlx_transformer import UserError, load
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.decoding.options import Options
from mlx_transformer.families.generation import settings_of
from mlx_transformer.generation.settings import SETTINGS, resolved

MARIAN = Path(__file__).parent / "rules_model"
GOLDEN = json.loads((Path(__file__).parent / "rules.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules") / "marian"
    import_huggingface(MARIAN, folder)
    return folder


# Every fifth has each rule and each form of the search.
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=SLOW)])
def test_tokens_and_scores_are_those_of_transformers(step, checkpoint):
    """The reference, by which `validate` judges MLX, finds every case (tests/export/validate)."""
    model, _ = load(checkpoint)
    for case in GOLDEN["cases"][::step]:
        settings, notes = settings_of({}, case["settings"], model.config, "here")
        assert not notes
        found = model.search(GOLDEN["ids"], **settings)
        assert [best[0].ids for best in found] == case["tokens"], case["settings"]
        if "scores" in case:
            np.testing.assert_allclose([best[0].score for best in found], case["scores"], rtol=1e-5, atol=1e-5)
        if settings.get("beam", 1) == 1:  # whose scores are computed only where they are asked for
            assert model.generate(GOLDEN["ids"], **settings) == case["tokens"]


def published(folder: Path, **generation) -> Path:
    """The tiny Marian with this generation_config.json."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((MARIAN / name).read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


CASE = next(c for c in GOLDEN["cases"] if c["settings"]["num_beams"] == 4 and "forced_bos_token_id" in c["settings"])


def test_settings_are_kept_and_honoured_unless_told_otherwise(tmp_path):
    theirs = published(tmp_path / "theirs", **CASE["settings"])
    assert import_huggingface(theirs, tmp_path / "ours") == [f"no tokenizer ({theirs} has no tokenizer.json)"]
    assert json.loads((tmp_path / "ours" / SETTINGS).read_text())["beam"] == 4
    model, _ = load(tmp_path / "ours")
    assert model.generate(GOLDEN["ids"]) == CASE["tokens"]
    greedy = model.generate(GOLDEN["ids"], beam=1, forced_first=[])
    assert greedy == model.generate(GOLDEN["ids"], **{**model.generation, "beam": 1, "forced_first": ()})
    assert greedy != CASE["tokens"]
    assert list(model.stream_ids(GOLDEN["ids"][0])) == model.generate(GOLDEN["ids"][:1], beam=1)[0]
    assert model.generate(GOLDEN["ids"], sample=True, seed=3)  # a beam of the model's own is no reason to refuse
    model.save(tmp_path / "saved")
    assert load(tmp_path / "saved")[0].generation == model.generation


def test_settings_come_back_as_they_went(tmp_path):
    for i, case in enumerate(GOLDEN["cases"][:: len(GOLDEN["cases"]) // 13]):
        import_huggingface(published(tmp_path / f"{i}", **case["settings"]), tmp_path / f"{i}-ours")
        to_huggingface(tmp_path / f"{i}-ours", tmp_path / f"{i}-theirs")
        import_huggingface(tmp_path / f"{i}-theirs", tmp_path / f"{i}-back")
        ours, back = (load(tmp_path / f"{i}-{name}")[0].generation for name in ("ours", "back"))
        assert ours == back


NOTES = {
    "settings of generation left behind: forced_decoder_ids": {"forced_decoder_ids": [[1, 3]]},
    "settings of generation left behind: encoder_no_repeat_ngram_size, do_sample": {
        "encoder_no_repeat_ngram_size": 3,
        "do_sample": True,
    },
    "settings of generation left behind: stop_strings, guidance_scale": {
        "stop_strings": ["x"],
        "guidance_scale": 2.0,
        "force_words_ids": [],
    },
    "settings of generation left behind: forced_eos_token_id=7": {"forced_eos_token_id": 7},
}


@pytest.mark.parametrize("note", NOTES)
def test_what_is_left_behind_is_said(note, tmp_path):
    assert note in import_huggingface(published(tmp_path / "theirs", **NOTES[note]), tmp_path / "ours")
    assert not (tmp_path / "ours" / SETTINGS).exists()


WRONG = {
    "forced_first: 40 is outside the vocabulary of 40": {"forced_bos_token_id": 40},
    "forced_first: 39 can't be forced": {"forced_bos_token_id": 39},
    "suppressed: \"'x'\" is no id": {"suppress_tokens": ["x"]},
    "end_ids: -1 is no id": {"eos_token_id": [0, -1]},
    "generation_config.json: eos_token_id=9 lacks config.json's 0, which ends here": {"eos_token_id": 9},
    "generation_config.json: eos_token_id=[9, 5] lacks config.json's 0, which ends here": {"eos_token_id": [9, 5]},
    "beam='many' must be a whole number": {"num_beams": "many"},
    "early_stopping='soon' must be true, false or \"never\"": {"num_beams": 2, "early_stopping": "soon"},
    "repetition_penalty=0.0 must be": {"repetition_penalty": 0.0},
    "repetition_penalty=1e-30 must be": {"repetition_penalty": 1e-30},
    "max_new_tokens='long' must be": {"max_length": "long"},
    "no_repeat_ngram=-1 must be": {"no_repeat_ngram_size": -1},
    "suppressed_first: 40 is outside the vocabulary of 40": {"begin_suppress_tokens": [40]},
    "banned_sequences: 41 is outside the vocabulary of 40": {"bad_words_ids": [[1, 41]]},
    "banned_sequences: 'x' is no id": {"bad_words_ids": [[1, "x"]]},
}


@pytest.mark.parametrize("reason", WRONG)
def test_settings_that_are_none(reason, tmp_path):
    folder = published(tmp_path / "theirs", **WRONG[reason])
    with pytest.raises(UserError) as error:
        import_huggingface(folder, tmp_path / "ours")
    assert reason in str(error.value)
    assert str(folder / "generation_config.json") in str(error.value)


def test_a_damaged_file_is_said(checkpoint, tmp_path):
    import_huggingface(MARIAN, tmp_path / "ours")
    (tmp_path / "ours" / "manifest.json").unlink()
    for text, reason in (("[]", "expected a JSON object"), ('{"beams": 2}', "did you mean 'beam'"), ("{", "not JSON")):
        (tmp_path / "ours" / SETTINGS).write_text(text)
        with pytest.raises(UserError, match=reason):
            load(tmp_path / "ours")[0].generate([[5, 0]])


def test_what_is_given_wins():
    own = {"beam": 4, "min_new_tokens": 9, "max_new_tokens": 20, "suppressed": (3,)}
    assert resolved(own, {}) == own
    assert resolved(own, {"beam": 1, "suppressed": ()}) == {**own, "beam": 1, "suppressed": ()}
    assert resolved(own, {"sample": True}) == {"sample": True, **{n: x for n, x in own.items() if n != "beam"}}
    assert resolved(own, {"max_new_tokens": 5}) == {"beam": 4, "max_new_tokens": 5, "suppressed": (3,)}
    assert resolved(own, {"min_new_tokens": 30}) == {"beam": 4, "min_new_tokens": 30, "suppressed": (3,)}
    for given in ({}, {"sample": True}, {"max_new_tokens": 5}, {"min_new_tokens": 30}):
        Options(**resolved(own, given))
