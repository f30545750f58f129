"""What the tests of the server share: one in this process with a client, and a model that waits to be let go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from starlette.testclient import TestClient
from waiting import until

from export.serve.app import DEFAULTS, App
from export.serve.batching import Batcher
from export.serve.models import Named

LINES = ["one two", "", "three. four five six!", "größer, 東京", "x", "two " * 8]
STREAM = "/translate/stream"


def alone(model):
    """What an application loads that has this model only."""
    return {Named("alone", Path("alone")): model}


def pairs(**models):
    """What one loads that has several: en_de=model is en-de=DIR on the command line."""
    names = {name.replace("_", "-"): model for name, model in models.items()}
    return dict(zip(Named.of([f"{name}=DIR" for name in names]), names.values(), strict=True))


@contextlib.contextmanager
def client(model, settings=DEFAULTS, **given):
    """A client of a server in this process, ready. model: one, or what `pairs` gives."""
    loaded = model if isinstance(model, dict) and all(isinstance(key, Named) for key in model) else alone(model)
    app = App(lambda: loaded, Batcher(**{"max_batch": 8, "max_wait": 0.001, "max_queue": 64, **given}), settings)
    with TestClient(app.asgi, raise_server_exceptions=False) as found:
        until(lambda: found.get("/health").status_code == 200)
        yield found, app


class Held:
    """A model whose searches wait until they are let go; it notes the rows of each."""

    def __init__(self, model, depends_on_batch=False):
        self.model, self.translator, self.go, self.calls = model, model.translator, threading.Event(), []
        self.config, self.tokenizer, self.generation = model.config, model.tokenizer, model.generation
        self.depends_on_batch, self.has_steps = depends_on_batch, model.has_steps

    def generate(self, ids, **options):
        self._wait(ids, options["share"])
        return self.model.generate(ids, **options)

    def search(self, ids, **options):
        self._wait(ids, options["share"])
        return self.model.search(ids, **options)

    def _wait(self, ids, share):
        self.calls.append(len(ids))
        until(lambda: self.go.is_set() or share.stopped())

    def stream(self, line, **options):
        pieces = self.model.stream(line, **options)

        def noted():
            self.calls.append(line)
            yield from pieces

        return noted()


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


def check_mixed_requests(model, count, clients, served=None):
    """Requests of one and of several lines, greedy and with beams, by many clients at once: answered as one by one.
    served: the model as the server has it, where that is another."""
    lines = [f"{first} {second}" for first in LINES for second in LINES]
    kinds = [
        {"max_new_tokens": 12},
        {"beam": 2, "max_new_tokens": 20},
        {"beam": 4, "n_best": 2, "max_new_tokens": 9},
        {},
    ]
    requests = [([lines[(7 * i + j) % len(lines)] for j in range(1 + i % 3)], i % len(kinds)) for i in range(count)]

    @cache
    def alone(line, kind):
        return [found.text for found in model.n_best([line], **kinds[kind])[0]]

    with client(served or model, max_batch=32, max_wait=0.02, max_queue=4 * count) as (http_, _):

        def ask(request):
            answer = http_.post("/translate", json={"text": request[0], **kinds[request[1]]}).json()
            if "n_best" in answer:
                return [[entry["text"] for entry in entries] for entries in answer["n_best"]]
            return [[text] for text in answer["translations"]]

        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(ask, requests))
    assert answers == [[alone(line, kind) for line in lines] for lines, kind in requests]
