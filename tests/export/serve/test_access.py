"""Pages of other origins, keys, and settings that can't be."""

from __future__ import annotations

import pytest
from serving import client

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import field_types

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
    [("", "holds no key"), ("# nothing\n\n", "holds no key"), ("good\nof two words\n", "line 2: a key is of ASCII")],
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
