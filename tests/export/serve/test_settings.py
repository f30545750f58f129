"""A model's own settings and languages, as a server takes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from serving import LINES, client

from export.serve.models import Named
from export.serve.opening import load_all, open_onnx
from export.settings import ServeSettings
from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes
from mlx_transformer.system.errors import UserError


@pytest.fixture
def spoken(text_model, monkeypatch):
    """The model with a beam and two languages of its own."""
    monkeypatch.setitem(vars(text_model), "generation", {"beam": 3, "languages": {"eng_Latn": 20, "deu_Latn": 21}})
    return text_model


def test_a_models_own_settings_hold_unless_told_otherwise(spoken):
    with client(spoken) as (http, _):
        found = http.post("/translate", json={"text": LINES}).json()["translations"]
        assert found == spoken.translate(LINES) == spoken.translate(LINES, beam=3)
        assert http.post("/translate", json={"text": LINES, "beam": 1}).json()["translations"] == spoken.translate(
            LINES, beam=1
        )
        drawn = {"sample": True, "seed": 5}
        assert http.post("/translate", json={"text": LINES, **drawn}).json()["translations"] == spoken.translate(
            LINES, **drawn
        )
        rules = {
            "no_repeat_ngram": 1,
            "suppressed": [7, 9],
            "end_ids": [30],
            "forced_first": [40],
            "banned_sequences": [[7, 8]],
        }
        answer = http.post("/translate", json={"text": LINES, **rules})
        assert answer.json() == {"translations": spoken.translate(LINES, **rules)}


def test_languages_are_named_by_their_codes(spoken):
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    with client(spoken) as (http, _):
        found = http.post("/translate", json={"text": LINES, **languages}).json()["translations"]
        assert found == spoken.translate(LINES, **languages)
        ids = [[20, *row] for row in spoken.tokenizer.encode_batch(LINES)]
        forced = spoken.generate(ids, forced_first=[21])
        assert found == [
            spoken.tokenizer.decode(row) if line.strip() else "" for line, row in zip(LINES, forced, strict=True)
        ]
        streamed = http.post("/translate/stream", json={"text": LINES[0], **languages})
        assert streamed.status_code == 200
        for wrong, reason in (("xx", "none of the model's languages"), (5, "must be a string")):
            answer = http.post("/translate", json={"text": LINES, "target_language": wrong})
            assert answer.status_code == 400
            assert reason in answer.text


def test_libretranslates_codes_are_the_models(spoken):
    codes = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    expected = spoken.translate("one two", **codes)
    with client(spoken) as (http, _):
        assert http.get("/languages").json() == [
            {"code": "de", "name": "de", "targets": ["en"]},
            {"code": "en", "name": "en", "targets": ["de"]},
        ]
        for source, target in (("en", "de"), ("eng_Latn", "de-DE")):
            answer = http.post("/translate", json={"q": "one two", "source": source, "target": target})
            assert answer.json() == {"translatedText": expected}
        answer = http.post("/translate", json={"text": "one two", "source": "en", "target": "de"})
        assert answer.json() == {"translations": [expected]}
        streamed = http.post("/translate/stream", json={"text": "one two", "source": "en", "target": "de", "beam": 1})
        assert json.dumps(spoken.translate("one two", beam=1, **codes)) in streamed.text
        for wrong, reason in (
            ({"source": "en", "target": "fr"}, "target=fr: none of the model's languages; GET /languages lists them"),
            ({"source": "auto", "target": "de"}, "source: this server detects no languages"),
        ):
            answer = http.post("/translate", json={"q": "x", **wrong})
            assert answer.status_code == 400
            assert reason in answer.text
        assert "give source: de, en" in http.post("/detect", json={"q": "x"}).text


def test_a_model_that_is_told_the_target_alone_needs_no_source(spoken, monkeypatch):
    monkeypatch.setitem(spoken.generation, "target_language_in_source", True)
    expected = spoken.translate("one two", target_language="deu_Latn")
    with client(spoken) as (http, _):
        for source in ("en", "auto"):
            answer = http.post("/translate", json={"q": "one two", "source": source, "target": "de"})
            assert answer.json()["translatedText"] == expected


def test_languages_behind_the_source_and_at_the_start(spoken, monkeypatch):
    monkeypatch.setitem(spoken.generation, "source_language_last", True)
    monkeypatch.setitem(spoken.generation, "target_language_starts", True)
    rows = [[*row, 20] for row in spoken.tokenizer.encode_batch(["one two", "three"])]
    expected = spoken.tokenizer.decode_batch(spoken.generate(rows, start_id=21))
    with client(spoken) as (http, _):
        answer = http.post("/translate", json={"text": ["one two", "three"], "source": "en", "target": "de"})
        assert answer.json() == {"translations": expected}
        codes = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
        streamed = http.post("/translate/stream", json={"text": "one two", "beam": 1, **codes})
        assert json.dumps(spoken.translate("one two", beam=1, **codes)) in streamed.text


@pytest.fixture(scope="module")
def shortlist(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which names few tokens: those of ids below 40, and each source token itself."""
    size = json.loads((text_folder / "model" / "config.json").read_text())["vocab_size"]
    ids = np.arange(size, dtype=np.uint32)
    path = tmp_path_factory.mktemp("lists") / "lex.bin"
    path.write_bytes(shortlist_bytes(Shortlist(40, 1, np.arange(size + 1, dtype=np.uint64), ids)))
    return path


def test_a_shortlist_holds_for_every_request(text_folder, shortlist):
    named = Named("model", text_folder / "onnx")
    [model] = load_all([named], ServeSettings(threads=1, shortlist=shortlist), open_onnx).values()
    everything = open_onnx(named.path, threads=1, precision=None, verify=True)
    expected = open_onnx(named.path, threads=1, precision=None, verify=True)
    expected.use_shortlist(shortlist)
    with client(model) as (http, _):
        for options in ({}, {"beam": 3}):
            found = http.post("/translate", json={"text": LINES, **options}).json()["translations"]
            assert found == expected.translate(LINES, **options)
            assert found != everything.translate(LINES, **options)


def test_a_shortlist_is_for_translators_that_take_ids(text_folder, shortlist, tmp_path):
    class Text:
        config = open_onnx(text_folder / "onnx", threads=1, precision=None, verify=True).config
        takes_text = True

    with pytest.raises(UserError, match=r"one\.onnx: takes text, whose tokens are its own: leave out --shortlist"):
        load_all([Named("m", tmp_path / "one.onnx")], ServeSettings(shortlist=shortlist), lambda *_, **__: Text())
