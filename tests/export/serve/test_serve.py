"""The server's endpoints: right answers, errors that say what to do, and readiness."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from types import SimpleNamespace

import pytest
from serving import LINES, STREAM, Held, alone, client
from starlette.testclient import TestClient
from waiting import PATIENCE, until

from export.serve import calls, requests
from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.requests import RequestError
from export.serve.translating import TranslateRequest
from mlx_transformer.system.errors import UserError


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 3, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": 9},
        {"sample": True, "seed": 4, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
        {"min_new_tokens": 3, "max_new_tokens": 3},
    ],
)
def test_answers_are_those_of_translate(text_model, options):
    with client(text_model) as (http_, _):
        answer = http_.post("/translate", json={"text": LINES, **options})
        assert answer.status_code == 200
        assert answer.json() == {"translations": text_model.translate(LINES, **options)}
        assert http_.post("/translate", json={"text": "x", **options}).json()["translations"] == text_model.translate(
            ["x"], **options
        )


def test_n_best_and_splitting(text_model):
    long = "one two three. four five six! " * 12
    with client(text_model) as (http_, _):
        found = http_.post("/translate", json={"text": LINES, "beam": 4, "n_best": 3}).json()
        expected = text_model.n_best(LINES, beam=4, n_best=3)
        assert found["translations"] == [best[0].text for best in expected]
        assert [[t["text"] for t in n] for n in found["n_best"]] == [[t.text for t in n] for n in expected]
        for given, wanted in zip(found["n_best"], expected, strict=True):
            assert [t["score"] for t in given] == pytest.approx([t.score for t in wanted], rel=1e-4)
        split = {"overlong": "split", "max_new_tokens": 4}
        assert http_.post("/translate", json={"text": long, **split}).json()["translations"] == text_model.translate(
            [long], **split
        )


def test_stream(text_model):
    with client(text_model) as (http_, _):
        for line in LINES:
            answer = http_.post("/translate/stream", json={"text": line, "sample": True, "seed": 2})
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
            *pieces, done = events
            [whole] = text_model.translate([line], sample=True, seed=2)
            assert "".join(json.loads(piece.removeprefix("data: "))["text"] for [piece] in pieces) == whole
            assert done == ["event: done", "data: " + json.dumps({"text": whole}, ensure_ascii=False)]


@pytest.fixture(scope="module")
def shared(text_model):
    with client(text_model) as (http_, _):
        yield http_


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"\xff\xfe{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"text": "x", "beam": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[]", 400, "an object is needed"),
        (b"{}", 400, '"text" is needed'),
        (b'{"text": 1}', 400, "text: must be a string"),
        (b'{"text": ["a", null]}', 400, "text: must be a string"),
        (b'{"text": "x", "bem": 4}', 400, "'bem': no such setting; there are beam"),
        (b'{"text": "x", "batch_tokens": 4}', 400, "no such setting"),
        (b'{"text": "x", "beam": 4, "text": "y"}', 400, "text: is given twice; give it once"),
        (b'{"text": {"a": 1, "b": 2, "a": 3}}', 400, "a: is given twice; give it once"),
        (b'{"text": "x", "beam": 1.5}', 400, "beam=1.5 must be"),
        (b'{"text": "x", "beam": 65}', 400, "beam=65: this server takes 1 to 64"),
        (b'{"text": "x", "sample": true, "temperature": 0.005}', 400, "temperature=0.005: this server takes 0.01 to"),
        (b'{"text": "x", "sample": true, "top_p": 0.0001}', 400, "top_p=0.0001: this server takes 0.001 to 1"),
        (b'{"text": "x", "min_new_tokens": 9223372036854775808}', 400, "min_new_tokens=9223372036854775808 must be"),
        (b'{"text": "x", "min_new_tokens": 61}', 400, "this server takes at most 60"),
        (b'{"text": "x", "sample": "no"}', 400, "sample: must be true or false"),
        (b'{"text": "x", "length_penalty": NaN}', 400, "length_penalty=nan must be a number"),
        (b'{"text": "x", "beam": "' + b"z" * 9000 + b'"}', 400, "zzz' must be"),
        (b'{"text": "x", "overlong": "no"}', 400, "error, truncate, split"),
        (b'{"text": "x", "max_new_tokens": 1000}', 400, "max_new_tokens=1000"),
        (b'{"text": ["x", "\\ud800"]}', 400, "text 2 holds a lone surrogate"),
        (json.dumps({"text": ["x", "one " * 99]}).encode(), 400, "line 2: 199 tokens, the model takes at most 60"),
        (json.dumps({"text": ["x"] * 65}).encode(), 413, "65 sentences, at most 48"),
        (json.dumps({"text": "one two. " * 900, "overlong": "split"}).encode(), 413, "at most 48; send it in parts"),
        (b"x" * (requests.MAX_BODY + 1), 413, "more than 262144 bytes"),
    ],
)
def test_bad_requests(shared, body, status, message):
    for path in ("/translate", "/translate/stream"):
        answer = shared.post(path, content=body)
        if path == "/translate/stream" and (b"[" in body[:12] and answer.status_code == 400):
            continue  # a list is refused there anyway, in its own words
        assert answer.status_code == status
        error = answer.json()["error"]
        assert message in error
        assert "\n" not in error
        assert len(error) <= 480


def test_stream_takes_one_line_and_no_beam(shared):
    answer = shared.post("/translate/stream", json={"text": ["a", "b"]})
    assert answer.status_code == 400
    assert "one string is streamed" in answer.json()["error"]
    answer = shared.post("/translate/stream", json={"text": "a", "beam": 2})
    assert answer.status_code == 400
    assert "stream with beam=1" in answer.json()["error"]


def test_help_and_unknown_addresses(shared):
    assert shared.get("/").text.startswith('POST /translate {"text"')
    assert shared.get("/nowhere").status_code == 404
    answer = shared.get("/translate")
    assert answer.status_code == 405
    assert "POST /translate" in answer.json()["error"]


def test_slow_body():
    with pytest.raises(RequestError, match=r"not complete after 0\.05 s") as caught:
        asyncio.run(requests.read_body(SimpleNamespace(stream=forever, headers={}), 0.05))
    assert caught.value.status == 408


async def forever():
    while True:
        await asyncio.sleep(0.01)
        yield b"{"


def test_fault_is_500_and_logged(text_model, caplog):
    class Broken(Held):
        def generate(self, ids, **options):
            raise RuntimeError("cable")

        def stream(self, line, **options):
            yield "half"
            raise RuntimeError("cable")

    with client(Broken(text_model)) as (http_, _):
        answer = http_.post("/translate", json={"text": "x"})
        assert answer.status_code == 500
        assert answer.json() == {"error": calls.FAULT}
        with caplog.at_level(logging.ERROR, "export.serve"):
            text = http_.post(STREAM, json={"text": "x"}).text
        assert text == f'data: {{"text": "half"}}\n\nevent: error\ndata: {{"error": "{calls.FAULT}"}}\n\n'
        assert "cable" in caplog.text
        assert 'status="500"} 1.0' in http_.get("/metrics").text


def test_not_ready_until_loaded(text_model):
    loaded, failures = threading.Event(), []

    def load():
        assert loaded.wait(PATIENCE)
        return alone(text_model)

    app = App(load, Batcher(8, 0, 8))
    with TestClient(app.asgi) as http_:
        assert http_.get("/health").status_code == 503
        assert http_.get("/health").json()["status"] == "starting"
        assert http_.get("/health").headers["retry-after"] == "1"
        answer = http_.post("/translate", json={"text": "x"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "mlx_transformer_ready 0.0" in http_.get("/metrics").text
        loaded.set()
        until(lambda: http_.get("/health").status_code == 200)

    def fail():
        raise UserError("no model")

    with TestClient(App(fail, Batcher(8, 0, 8), failed=failures.append).asgi):
        until(lambda: failures)
    assert str(failures[0]) == "no model"


def test_settings_are_those_of_options():
    wanted = TranslateRequest.of({"text": "x", "seed": 1, "beam": 2})
    assert wanted == TranslateRequest(["x"], {"beam": 2, "seed": 1}, "error", False)
    assert TranslateRequest.of({"text": [], "n_best": 1}) == TranslateRequest([], {"n_best": 1}, "error", True)
