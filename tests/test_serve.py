"""The server: right answers in batches, bounds that hold, errors that say what to do, an orderly start and end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from small_models import SIZES, random_weights
from starlette.testclient import TestClient
from test_no_mlx import ROOT, WITHOUT_MLX

from export import OnnxTransformer, export_onnx
from export.__main__ import main
from export.serve import app as app_module
from export.serve.app import App
from export.serve.batching import Batcher, OverloadError
from export.serve.requests import RequestError, TranslateRequest
from mlx_transformer.spec.checkpoint import save_checkpoint
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

LINES = ["one two", "", "three. four five six!", "größer, 東京", "x", "two " * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer.train(["one two three. four five six! größer 東京 " * 3], vocab_size=280)
    config = TransformerConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size, "max_positions": 60})
    save_checkpoint(path / "model", config, random_weights(config), tokenizer.to_json())
    return export_onnx(path / "model", path / "onnx")


@pytest.fixture(scope="module")
def model(folder):
    return OnnxTransformer(folder, threads=1)


@contextlib.contextmanager
def client(model, **settings):
    """A client of a server in this process, ready."""
    given = {"max_batch": 8, "max_wait": 0.001, "max_queue": 64, **settings}
    app = App(lambda: model, Batcher(**given))
    with TestClient(app.asgi, raise_server_exceptions=False) as found:
        until(lambda: found.get("/health").status_code == 200)
        yield found, app


def until(condition, seconds=60.0):
    """Others may keep this machine busy: the limit is for what never comes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 3, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": 9},
        {"sample": True, "seed": 4, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
        {"min_new_tokens": 3, "max_new_tokens": 3},
    ],
)
def test_answers_are_those_of_translate(model, options):
    with client(model) as (http_, _):
        answer = http_.post("/translate", json={"text": LINES, **options})
        assert answer.status_code == 200
        assert answer.json() == {"translations": model.translate(LINES, **options)}
        assert http_.post("/translate", json={"text": "x", **options}).json()["translations"] == model.translate(
            ["x"], **options
        )


def test_n_best_and_splitting(model):
    long = "one two three. four five six! " * 12
    with client(model) as (http_, _):
        found = http_.post("/translate", json={"text": LINES, "beam": 4, "n_best": 3}).json()
        expected = model.n_best(LINES, beam=4, n_best=3)
        assert found["translations"] == [best[0].text for best in expected]
        assert [[t["text"] for t in n] for n in found["n_best"]] == [[t.text for t in n] for n in expected]
        for given, wanted in zip(found["n_best"], expected, strict=True):
            assert [t["score"] for t in given] == pytest.approx([t.score for t in wanted], rel=1e-4)
        split = {"overlong": "split", "max_new_tokens": 4}
        assert http_.post("/translate", json={"text": long, **split}).json()["translations"] == model.translate(
            [long], **split
        )


def test_stream(model):
    with client(model) as (http_, _):
        for line in LINES:
            answer = http_.post("/translate/stream", json={"text": line, "sample": True, "seed": 2})
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
            *pieces, done = events
            [whole] = model.translate([line], sample=True, seed=2)
            assert "".join(json.loads(piece.removeprefix("data: "))["text"] for [piece] in pieces) == whole
            assert done == ["event: done", "data: " + json.dumps({"text": whole}, ensure_ascii=False)]


def test_many_clients_share_batches(model):
    """Requests of three kinds from many threads: each gets its own answer, and fewer batches than requests ran."""
    requests = [({"text": LINES[i % len(LINES)]}, [{}, {"beam": 2}, {"max_new_tokens": 4}][i % 3]) for i in range(48)]
    with client(model, max_wait=0.05, workers=2) as (http_, app), ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda r: http_.post("/translate", json={**r[0], **r[1]}).json(), requests))
        metrics = http_.get("/metrics").text
        assert app.batcher.waiting == 0
        assert app.batcher.items == []
    assert [a["translations"][0] for a in answers] == [model.translate([r["text"]], **o)[0] for r, o in requests]
    assert 'mlx_transformer_requests_total{path="/translate",status="200"} 48.0' in metrics
    assert "mlx_transformer_sentences_total 48.0" in metrics
    sentences = float(re.search(r"^mlx_transformer_batch_sentences_sum (.*)", metrics, re.M)[1])
    batches = float(re.search(r"^mlx_transformer_batch_sentences_count (.*)", metrics, re.M)[1])
    assert sentences == 40  # without the empty lines
    assert batches <= 20


# ---- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"\xff\xfe{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"text": "x", "beam": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[]", 400, '"text" is needed'),
        (b"{}", 400, '"text" is needed'),
        (b'{"text": 1}', 400, "text: must be a string"),
        (b'{"text": ["a", null]}', 400, "text: must be a string"),
        (b'{"text": "x", "bem": 4}', 400, "'bem': no such setting; there are beam"),
        (b'{"text": "x", "batch_tokens": 4}', 400, "no such setting"),
        (b'{"text": "x", "beam": 0}', 400, "beam=0 must be"),
        (b'{"text": "x", "beam": 1.5}', 400, "beam=1.5 must be"),
        (b'{"text": "x", "beam": 65}', 400, "at most 64"),
        (b'{"text": "x", "sample": "no"}', 400, "sample: must be true or false"),
        (b'{"text": "x", "length_penalty": NaN}', 400, "length_penalty=nan must be a finite number"),
        (b'{"text": "x", "beam": "' + b"z" * 9000 + b'"}', 400, "zzz ..."),
        (b'{"text": "x", "overlong": "no"}', 400, "error, truncate, split"),
        (b'{"text": "x", "max_new_tokens": 1000}', 400, "max_new_tokens=1000"),
        (b'{"text": ["x", "\\ud800"]}', 400, "text 2 holds a lone surrogate"),
        (json.dumps({"text": ["x", "one " * 99]}).encode(), 400, "line 2: 199 tokens, the model takes at most 60"),
        (json.dumps({"text": ["x"] * 65}).encode(), 413, "65 lines, at most 64"),
        (json.dumps({"text": "one two. " * 900, "overlong": "split"}).encode(), 413, "at most 64; send it in parts"),
        (b"x" * (app_module.MAX_BODY + 1), 413, "more than 262144 bytes"),
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
        assert len(error) <= 410


@pytest.fixture(scope="module")
def shared(model):
    with client(model) as (http_, _):
        yield http_


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


def test_slow_body(model, monkeypatch):
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.05)
    with pytest.raises(RequestError, match="not complete") as caught:
        asyncio.run(app_module._body(SimpleNamespace(stream=forever)))
    assert caught.value.status == 408


async def forever():
    while True:
        await asyncio.sleep(0.01)
        yield b"{"


# ---- bounds ----------------------------------------------------------------------------------------------------------


class Held:
    """A model whose searches wait until they are let go; it notes the rows of each."""

    def __init__(self, model):
        self.model, self.translator, self.go, self.calls = model, model.translator, threading.Event(), []

    def generate(self, ids, **options):
        self.calls.append(len(ids))
        assert self.go.wait(60)
        return self.model.generate(ids, **options)

    def stream(self, line, **options):
        pieces = self.model.stream(line, **options)

        def noted():
            self.calls.append(line)
            yield from pieces

        return noted()


def test_full_queue_and_disconnect(model):
    """One batch runs, the queue fills, the next request is told to come back; who leaves is never computed."""
    held = Held(model)
    with client(held, max_batch=2, max_queue=4) as (http_, app), ThreadPoolExecutor(8) as pool:
        first = pool.submit(http_.post, "/translate", json={"text": ["x", "one"]})
        until(lambda: app.batcher.running == 2)
        second = pool.submit(http_.post, "/translate", json={"text": ["x", "two", "three"]})
        until(lambda: app.batcher.waiting == 3)
        for path in ("/translate", "/translate/stream"):
            size = 2 if path == "/translate" else 1
            body = {"text": ["x"] * size if size > 1 else "x"}
            if size == 1:  # one place is left, and a stream takes it
                third = pool.submit(http_.post, path, json=body)
                until(lambda: app.batcher.waiting == 4)
            answer = http_.post(path, json=body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "try again" in answer.json()["error"]
        assert http_.get("/health").json() == {"status": "ready", "waiting": 4, "running": 2}
        held.go.set()
        assert first.result().json()["translations"] == model.translate(["x", "one"])
        assert second.result().json()["translations"] == model.translate(["x", "two", "three"])
        assert third.result().status_code == 200
        assert http_.get("/health").json() == {"status": "ready", "waiting": 0, "running": 0}
    assert held.calls[0] == 2
    assert held.calls.count("x") == 1
    assert max(c for c in held.calls if isinstance(c, int)) == 2, "max_batch"


def test_who_leaves_is_never_computed(model):
    held = Held(model)
    app = App(lambda: held, Batcher(1, 0, 8))

    async def scene():
        async with app.lifespan(app.asgi):
            while app.service is None:
                await asyncio.sleep(0.005)
            running = asyncio.create_task(call(app.asgi, "/translate", {"text": "x"}))
            while not app.batcher.running:
                await asyncio.sleep(0.005)
            gone = asyncio.Event()
            leaving = [asyncio.create_task(call(app.asgi, p, {"text": "one"}, gone)) for p in ("/translate", STREAM)]
            while app.batcher.waiting != 2:
                await asyncio.sleep(0.005)
            gone.set()
            await asyncio.gather(*leaving)
            assert app.batcher.waiting == 0
            assert app.batcher.items == []
            held.go.set()
            assert (await running)[0] == 200

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert [c for c in held.calls if isinstance(c, int)] == [1], "only the first was searched"
    assert "mlx_transformer_dropped_requests_total 2.0" in app.metrics.text().decode()


STREAM = "/translate/stream"


async def call(asgi, path, body, gone=None):
    """One request as a server of ASGI makes it; the client leaves when `gone` is set. -> status, body"""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await asgi({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)
    status = next((m["status"] for m in sent if m["type"] == "http.response.start"), None)
    return status, b"".join(m.get("body", b"") for m in sent)


def test_batches():
    """Equal work together, at most max_batch, the oldest with its nearest in length, and nobody waits forever."""
    calls = []

    def work(payloads):
        calls.append(payloads)
        return [-p for p in payloads]

    def other(payloads):
        return work(payloads)

    async def scene():
        batcher = Batcher(3, 0.01, 100)
        lengths = [5, 90, 6, 50, 4, 91, 5]
        jobs = [batcher.submit(work, lengths, lengths), batcher.submit(other, [7], [7])]
        batcher.start()
        results = [await batcher.results(job) for job in jobs]
        assert results == [[-n for n in lengths], [-7]]
        assert calls == [[5, 5, 6], [90, 91, 50], [4], [7]] or calls == [[5, 5, 4], [90, 91, 50], [6], [7]]
        await batcher.stop()
        # After two together one waits for a second, max_wait at most; after one alone it waits for nobody.
        batcher = Batcher(8, 0.3, 100)
        batcher.start()
        took = []
        for count in (2, 1, 1):
            began = time.monotonic()
            await batcher.results(batcher.submit(work, [1] * count, [1] * count))
            took.append(time.monotonic() - began)
        assert took[1] >= 0.29
        assert min(took[0], took[2]) < 0.29
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_one_bad_item_spoils_no_other():
    def work(payloads):
        if 13 in payloads:
            raise UserError("thirteen")
        return payloads

    async def scene():
        batcher = Batcher(8, 0.01, 10)
        batcher.start()
        jobs = [batcher.submit(work, [n], [n]) for n in (1, 13, 2)]
        found = await asyncio.gather(*map(batcher.results, jobs), return_exceptions=True)
        assert found[0] == [1]
        assert found[2] == [2]
        assert str(found[1]) == "thirteen"
        batcher.submit(work, list(range(10)), [1] * 10)
        with pytest.raises(OverloadError, match="10 sentences are waiting"):
            batcher.submit(work, [1], [1])
        await batcher.stop()
        assert all(item.future.cancelled() for item in batcher.items)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_fault_is_500_and_logged(model, caplog):
    class Broken(Held):
        def generate(self, ids, **options):
            raise RuntimeError("cable")

        def stream(self, line, **options):
            yield "half"
            raise RuntimeError("cable")

    with client(Broken(model)) as (http_, _):
        answer = http_.post("/translate", json={"text": "x"})
        assert answer.status_code == 500
        assert answer.json() == {"error": app_module.FAULT}
        with caplog.at_level(logging.ERROR, "export.serve"):
            text = http_.post(STREAM, json={"text": "x"}).text
        assert text == f'data: {{"text": "half"}}\n\nevent: error\ndata: {{"error": "{app_module.FAULT}"}}\n\n'
        assert "cable" in caplog.text
        assert 'status="500"} 1.0' in http_.get("/metrics").text


def test_not_ready_until_loaded(model):
    loaded, failures = threading.Event(), []

    def load():
        assert loaded.wait(60)
        return model

    app = App(load, Batcher(8, 0, 8))
    with TestClient(app.asgi) as http_:
        assert http_.get("/health").status_code == 503
        assert http_.get("/health").json()["status"] == "starting"
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
    wanted = TranslateRequest.parse(b'{"text": "x", "seed": 1, "beam": 2}', 9)
    assert wanted == TranslateRequest(["x"], {"beam": 2, "seed": 1}, "error", False)
    assert TranslateRequest.parse(b'{"text": [], "n_best": 1}', 9) == TranslateRequest([], {"n_best": 1}, "error", True)


# ---- the process -----------------------------------------------------------------------------------------------------


def started(folder, *arguments, before=""):
    """The server in a process of its own, and its port once it is ready."""
    script = f"{before}\nfrom export.__main__ import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", script, "serve", str(folder), "--threads", "1", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ)
    for line in process.stderr:
        if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+) \(ready in", line):
            return process, int(found[1])
    raise AssertionError(f"it ended with {process.wait()}")


def post(port, path, body=None):
    """-> status, text; without a body it is a GET."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_process(folder, model, number, status):
    """A machine without MLX serves; told to end, it answers what it has taken, and says so by its exit status."""
    process, port = started(folder, "--max-wait-ms", "400", before=WITHOUT_MLX)
    try:
        assert post(port, STREAM, {"text": "x"})[1].count("event: done") == 1
        code, text = post(port, "/translate", {"text": LINES, "beam": 2})
        assert code == 200
        assert json.loads(text) == {"translations": model.translate(LINES, beam=2)}
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(post, port, "/translate", {"text": "x"})  # waits 400 ms for company
            until(lambda: json.loads(post(port, "/health")[1])["waiting"] == 1)
            process.send_signal(number)
            assert json.loads(last.result()[1]) == {"translations": model.translate(["x"])}
        assert process.wait(60) == status
        said = process.stderr.read()
        assert "Traceback" not in said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_what_cannot_be_served(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("it is served"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
        assert f"127.0.0.1:{port}: can't listen there (Address already in use); choose" in capsys.readouterr().err
    for arguments, message in [
        ([str(folder), "--max-batch", "0"], "max_batch=0 must be at least 1"),
        ([str(folder), "--threads", "0"], "threads=0 must be at least 1"),
        ([str(folder), "--max-wait-ms", "-1"], "max_wait_ms=-1.0 must be from 0"),
        ([str(folder), "--port", "70000"], "port=70000 must be from 0 to 65535"),
        ([str(folder), "--host", "256.0.0.1"], "256.0.0.1:8000: can't listen there"),
        ([str(tmp_path)], str(tmp_path)),
    ]:
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_model_that_cannot_translate(folder, tmp_path, capsys):
    """Found only when it is loaded: one line and exit 2 all the same."""
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "tokenizer.json":
            target = tmp_path / "onnx" / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "export", "serve", str(tmp_path / "onnx"), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "no tokenizer.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra(folder):
    script = (
        "import sys\nsys.modules['starlette'] = None\n"  # importing it is ModuleNotFoundError
        f"from export.__main__ import main\nraise SystemExit(main(['serve', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr == "python -m export: serve needs starlette: pip install 'mlx-transformer[serve]'\n"
