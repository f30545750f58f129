"""A model's own settings and languages, pages of other origins, and keys, as a server takes them."""

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
from mlx_transformer.system.fields import field_types


@pytest.fixture
def spoken(text_model, monkeypatch):
    """The model with a beam and two languages of its own, which it translates between unless told otherwise."""
    languages = {"languages": {"eng_Latn": 20, "deu_Latn": 21}}
    usual = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    monkeypatch.setitem(vars(text_model), "generation", {"beam": 3, **languages, **usual})
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
        for wrong, reason in (("xx", "unknown language 'xx'"), (5, "must be a string")):
            answer = http.post("/translate", json={"text": LINES, "target_language": wrong})
            assert answer.status_code == 400
            assert reason in answer.text


def test_a_model_of_several_languages_asks_for_them(spoken, monkeypatch):
    for name, language in (("source_language", "deu_Latn"), ("target_language", "eng_Latn")):
        expected = spoken.translate(LINES, **{name: language})
        with client(spoken) as (http, _):
            assert http.post("/translate", json={"text": LINES, name: language}).json()["translations"] == expected
            monkeypatch.delitem(spoken.generation, name)
            for route in ("/translate", "/translate/stream"):
                answer = http.post(route, json={"text": LINES[0]})
                assert answer.status_code == 400
                assert f"{name}: the model has 2 languages" in answer.text
        monkeypatch.setitem(spoken.generation, name, language)


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


ORIGIN = "https://example.org"
KEYS = "# of the staging machine\n  k-first-4711  \n\nsecond+key/=\n"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def test_without_a_key_only_health_answers(text_model, key_file):
    with client(text_model, ServeSettings(api_key_file=key_file)) as (http_, app):
        wrong = [{}, {"Authorization": "Bearer nothing"}, {"Authorization": "Bearer "}, {"X-API-Key": "second+key/"}]
        wrong += [{"Authorization": "Basic k-first-4711"}, {"Authorization": "Bearer # of the staging machine"}]
        for headers in wrong:
            for path in ("/translate", "/translate/stream"):
                answer = http_.post(path, json={"text": "x"}, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer KEY" in answer.json()["error"]
            assert [http_.get(path, headers=headers).status_code for path in ("/", "/metrics")] == [401] * 2
        assert http_.get("/health").status_code == 200
        right = [{"Authorization": "Bearer k-first-4711"}, {"authorization": "bearer second+key/="}]
        for headers in [*right, {"X-API-Key": "k-first-4711"}]:
            answer = http_.post("/translate", json={"text": "x"}, headers=headers)
            assert answer.json() == {"translations": text_model.translate(["x"])}
        assert app.batcher.turns.clients == {}


def test_whose_turn_it_is_follows_the_key(text_model, key_file, monkeypatch):
    with client(text_model, ServeSettings(api_key_file=key_file)) as (http_, app):
        names = []
        submit = app.batcher.submit
        monkeypatch.setattr(app.batcher, "submit", lambda *a, client, **k: names.append(client) or submit(*a, **k))
        for key in ("k-first-4711", "second+key/=", "k-first-4711"):
            assert http_.post("/translate", json={"text": "x"}, headers={"X-API-Key": key}).status_code == 200
    assert names[0] == names[2] != names[1]


def test_pages_of_an_origin_may_ask_if_they_are_told_so(text_model, key_file):
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = (
        "authorization,content-type,x-stainless-lang"  # as OpenAI's client in a page
    )
    allowed = "access-control-allow-origin"
    with client(text_model) as (http_, _):
        assert allowed not in http_.post("/translate", json={"text": "x"}, headers={"Origin": ORIGIN}).headers
        assert http_.options("/translate", headers=ask).status_code == 405
    with client(text_model, ServeSettings(cors=(ORIGIN, "http://localhost:3000"), api_key_file=key_file)) as (http_, _):
        before = http_.options("/translate", headers=ask)  # browsers ask this without a key
        assert before.status_code == 200
        assert before.headers[allowed] == ORIGIN
        answer = http_.post("/translate", json={"text": "x"}, headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers[allowed]) == (401, ORIGIN), "the page can read why"
        other = {**ask, "Origin": "https://elsewhere.example"}
        assert allowed not in http_.options("/translate", headers=other).headers
    with client(text_model, ServeSettings(cors=("*",))) as (http_, _):
        assert http_.post("/translate", json={"text": "x"}, headers={"Origin": ORIGIN}).headers[allowed] == "*"


@pytest.mark.parametrize("origin", ["example.org", "https://", "https://example.org/", "https://a:port", "", "null/x"])
def test_what_is_no_origin(origin):
    with pytest.raises(UserError, match="is no origin: give scheme and host"):
        ServeSettings(cors=(origin,))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no key"), ("# nothing\n\n", "has no key"), ("good\nof two words\n", "line 2: a key must be ASCII")],
)
def test_files_without_keys(tmp_path, text, message):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        ServeSettings(api_key_file=path).api_keys()
    with pytest.raises(UserError, match="no such file"):
        ServeSettings(api_key_file=tmp_path / "none").api_keys()


NUMBERS = [name for name, kind in field_types(ServeSettings).items() if kind.type in (int, float) and not kind.choices]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_bounded(name):
    bounds = field_types(ServeSettings)[name].bounds
    beyond = [bounds.at_most + 1] if bounds.at_most < float("inf") else []
    for value in (bounds.at_least - 1, *beyond, float("nan"), float("inf"), "1", True):
        with pytest.raises(UserError, match=f"^{name}="):
            ServeSettings(**{name: value})
    assert getattr(ServeSettings(**{name: bounds.at_least}), name) == bounds.at_least
