"""LibreTranslate's forms: what its clients send is answered as they read it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlencode

import pytest
from serving import LINES, STREAM, client, pairs
from starlette.testclient import TestClient

from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.models import Named
from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError

TO = {"source": "en", "target": "de"}


@pytest.fixture(scope="module")
def shared(text_model):
    """en-de and de-en by one model, fr-en by another whose translations begin with a mark."""

    class Marked:
        config, tokenizer, translator = text_model.config, text_model.tokenizer, text_model.translator
        depends_on_batch, generation = False, text_model.generation

        def generate(self, ids, **options):
            return [[20, *row[:3]] for row in text_model.generate(ids, **options)]

    with client(pairs(en_de=text_model, de_en=text_model, fr_en=Marked())) as (http_, _):
        yield http_


def lines_of(model, text, **options):
    return "\n".join(model.translate(text.split("\n"), overlong="split", **options))


def test_a_text_and_a_list(shared, text_model):
    for q in ("one two", LINES, "one two\n\nthree. four", ["x\ny", ""], "one two three. " * 40):
        answer = shared.post("/translate", json={"q": q, **TO, "format": "text"})
        wanted = lines_of(text_model, q) if isinstance(q, str) else [lines_of(text_model, text) for text in q]
        assert (answer.status_code, answer.json()) == (200, {"translatedText": wanted})


def test_a_form_is_read_as_json_is(shared, text_model):
    head = {"Content-Type": "application/x-www-form-urlencoded; charset=UTF-8"}
    body = urlencode({"q": "größer & 東京", **TO, "beam": 3, "early_stopping": "true", "max_new_tokens": 9})
    answer = shared.post("/translate", content=body, headers=head).json()
    wanted = text_model.translate(["größer & 東京"], beam=3, early_stopping=True, max_new_tokens=9)
    assert answer == {"translatedText": wanted[0]}
    answer = shared.post("/translate", content=f"q=x&q=one&{urlencode(TO)}", headers=head).json()
    assert answer == {"translatedText": text_model.translate(["x", "one"])}
    one = shared.post("/translate", content='{"text": "x", "source": "en"}', headers=head).json()
    assert one == {"translations": text_model.translate(["x"])}  # curl -d says so of JSON
    assert shared.post("/translate", content="text=x&source=en", headers=head).json() == one
    for body, message in (("q=x&source=en&source=de", "given twice"), ("q=%ff", "no form"), ("", "is needed")):
        answer = shared.post("/translate", content=body, headers=head)
        assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_alternatives(shared, text_model):
    for q in ("one two", ["x", "one two"]):
        answer = shared.post("/translate", json={"q": q, **TO, "alternatives": 3}).json()
        best = text_model.n_best([q] if isinstance(q, str) else q, beam=4, n_best=4)
        unlike = [list(dict.fromkeys(t.text for t in each)) for each in best]
        wanted = unlike[0] if isinstance(q, str) else unlike
        if isinstance(q, str):
            assert answer == {"translatedText": wanted[0], "alternatives": wanted[1:]}
            assert wanted[1:]
        else:
            assert answer == {"translatedText": [w[0] for w in wanted], "alternatives": [w[1:] for w in wanted]}


def test_the_pair_chooses_the_model(shared, text_model):
    here, other = [
        shared.post("/translate", json={"q": "one two", "source": source, "target": "en"}).json()
        for source in ("de", "fr")
    ]
    assert here["translatedText"] == text_model.translate(["one two"])[0] != other["translatedText"]
    ours = shared.post("/translate", json={"text": "one two", "source": "fr"}).json()
    assert ours == {"translations": [other["translatedText"]]}
    assert "event: done" in shared.post(STREAM, json={"text": "x", "target": "de"}).text
    found = shared.post("/translate", json={"q": "one two", "source": "auto", "target": "de"}).json()
    assert found["detectedLanguage"] == {"confidence": 0, "language": "en"}
    assert shared.get("/languages").json() == [
        {"code": "de", "name": "de", "targets": ["en"]},
        {"code": "en", "name": "en", "targets": ["de"]},
        {"code": "fr", "name": "fr", "targets": ["en"]},
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"q": "x"}, "source: is needed"),
        ({"q": "x", "source": "en"}, "target: is needed"),
        ({"q": "x", "source": "en", "target": "fr"}, "this server translates en-de, de-en, fr-en"),
        ({"q": "x", "source": "auto", "target": "en"}, "this server detects no languages"),
        ({"q": "x", "source": 1, "target": "en"}, "source: must be the code"),
        ({"q": 1, **TO}, "q: must be a string or a list"),
        ({"q": "x", **TO, "format": "html"}, "format: only text is translated"),
        ({"q": "x", **TO, "alternatives": 64}, "alternatives: must be a whole number of 0 to 63"),
        ({"q": "x", **TO, "alternatives": True}, "alternatives: must be"),
        ({"q": "x", **TO, "alternatives": 3, "beam": 2}, "n_best=4 is more than beam=2"),
        ({"q": "x", **TO, "text": "x"}, "text: is not for a request with q"),
        ({"q": "x", **TO, "n_best": 2}, "n_best: is not for a request with q"),
        ({"q": "x", **TO, "glossary": 2}, "'glossary': no such setting"),
        ({"text": "x"}, "source: several fit"),
        ({"text": "x", "target": "en"}, "source: several fit"),
    ],
)
def test_what_is_refused(shared, body, message):
    answer = shared.post("/translate", json=body)
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_detect(text_model, shared):
    assert shared.post("/detect", json={"q": "x"}).json()["error"].endswith("give source: de, en, fr")
    assert shared.post(STREAM, json={"q": "x", **TO}).status_code == 400
    with client(pairs(en_de=text_model, en_fr=text_model)) as (http_, _):
        assert http_.post("/detect", data={"q": "x"}).json() == [{"confidence": 0, "language": "en"}]
        assert http_.post("/detect", json={"q": ["x"]}).status_code == 400
    with client(text_model) as (http_, _):
        answer = http_.post("/translate", json={"q": "x", **TO})
        assert (answer.status_code, "start it with: serve en-de=DIR" in answer.json()["error"]) == (400, True)
        assert http_.get("/languages").json() == []


def test_a_key_may_be_in_the_body(text_model, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with client(pairs(en_de=text_model), ServeSettings(api_key_file=tmp_path / "keys")) as (http_, _):
        for key, status in (("secret", 200), ("other", 401), ("\ud800", 401), (None, 401), (["secret"], 401)):
            given = {} if key is None else {"api_key": key}
            assert http_.post("/translate", content=json.dumps({"q": "x", **TO, **given})).status_code == status, key
            assert http_.post("/detect", content=json.dumps({"q": "x", **given})).status_code == status
        refused = http_.post("/translate", json={"q": "x", **TO, "api_key": "secret"}, headers={"X-API-Key": "wrong"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert http_.post(STREAM, json={"text": "x", "api_key": "secret"}).status_code == 401
        assert http_.get("/languages").status_code == 200
        error = http_.get("/v1/models").json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


def test_names(tmp_path):
    assert Named.of(["en-de=a", "zh-Hans:en=b", "stories=c"]) == [
        Named("en-de", Path("a"), ("en", "de")),
        Named("zh-Hans:en", Path("b"), ("zh-Hans", "en")),
        Named("stories", Path("c")),
    ]
    (tmp_path / "a=b").mkdir()
    assert Named.of([tmp_path / "a=b"])[0].name == "a=b"
    for arguments, message in (
        ([], "at least one"),
        (["en-de=a", "en-de=b"], "another model is called en-de"),
        (["x/a", "y/a"], "name each"),
        (["=a"], "give a name and a model"),
    ):
        with pytest.raises(UserError, match=message):
            Named.of(arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a=x", "b=y"], "give each its languages"), (["en-de=x", "en:de=y"], "another model translates en-de already")],
)
def test_translators_that_no_request_could_name(text_model, names, message):
    failures = []
    loaded = dict.fromkeys(Named.of(names), text_model)
    with TestClient(App(lambda: loaded, Batcher(8, 0, 8), failed=failures.append).asgi):
        pass
    assert message in str(failures[0])
