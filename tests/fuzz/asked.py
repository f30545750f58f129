"""Requests to the server with fields of every kind: each is answered or refused, in the form that its clients read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

from attempts import Attempt
from damage import NUMBERS, TEXTS

NAMES = "beam n_best min_new_tokens max_new_tokens length_penalty top_k seed sample temperature top_p overlong".split()
FIELDS = {
    "/translate": ["text", "q", "source", "target", "format", "alternatives", "api_key", "alignment", *NAMES],
    "/translate/stream": ["text", "q", "source", "target", *NAMES],
    "/detect": ["q", "api_key"],
    "/v1/completions": [
        *("model", "prompt", "max_tokens", "n", "best_of", "stop", "stream", "stream_options", "logprobs", "echo"),
        *("logit_bias", "presence_penalty", "suffix", "temperature", "top_p", "top_k", "seed", "user", "speculate"),
    ],
    "/v1/chat/completions": [
        *("model", "messages", "max_completion_tokens", "n", "stop", "stream", "stream_options", "logprobs", "seed"),
        *("top_logprobs", "tools", "tool_choice", "response_format", "chat_template_kwargs", "min_p", "metadata"),
        "speculate",
        *["messages"] * 5,
    ],
    "/v1/embeddings": ["model", "input", "encoding_format", "dimensions", "prompt", "prompt_name", "user"],
    "/rerank": ["model", "query", "documents", "texts", "top_n", "return_documents", "raw_scores", "truncate"],
    "/predict": ["model", "inputs", "raw_scores", "truncate"],
}
USUAL: dict[str, dict[str, Any]] = {
    "/translate": {"q": "one two", "source": "en", "target": "de"},
    "/translate/stream": {"text": "one two"},
    "/detect": {"q": "one"},
    "/v1/embeddings": {"model": "mini", "input": "one two"},
    "/rerank": {"query": "one", "documents": ["one two", "three"]},
    "/predict": {"inputs": "one two"},
    "/v1/completions": {"model": "stories", "prompt": "one two", "temperature": 0},
    "/v1/chat/completions": {"model": "stories", "messages": [{"role": "user", "content": "one"}], "temperature": 0},
}


def messages(random: Random) -> list[Any]:
    """A conversation in which something may be wrong."""
    odd = [*TEXTS, *NUMBERS, None, [], {}, [{"type": "text", "text": "one"}], [{"type": "image_url"}]]
    found = []
    for _ in range(random.randint(1, 4)):
        message = {"role": random.choice(["system", "user", "assistant", "tool", "developer"]), "content": "one two"}
        for name in random.choices(
            ["role", "content", "name", "tool_calls", "tool_call_id"], k=random.choice([0, 0, 1])
        ):
            message[name] = random.choice(odd)
        found.append(random.choice(odd) if random.random() < 0.05 else message)
    return found


def asked(random: Random, folder: Path) -> Attempt:
    """One request to a server of the folder's model."""
    path = random.choice(list(FIELDS))
    values: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}, ["a", "\ud800"], ["one"] * 99, {"include_usage": True}]
    values += [messages(random) for _ in range(20)]
    body = {**USUAL[path], **{random.choice(FIELDS[path]): random.choice(values) for _ in range(random.randint(0, 2))}}
    form = random.random() < 0.3
    kind = "application/x-www-form-urlencoded" if form else "application/json"

    def python() -> object:
        from starlette.testclient import TestClient
        from waiting import until

        from export.serve.app import App
        from export.serve.batching import Batcher
        from export.serve.models import Named
        from export.serve.opening import load_all, open_onnx
        from export.settings import ServeSettings

        settings = ServeSettings(threads=1)
        names = {"en-de": "onnx", "mini": "vectors-onnx", "ranks": "ranks-onnx", "stories": "alone-onnx"}
        models = Named.of([f"{name}={folder / place}" for name, place in names.items()])
        app = App(lambda: load_all(models, settings, open_onnx), Batcher(8, 0, 64))
        with TestClient(app.asgi) as http_:
            until(lambda: http_.get("/health").status_code == 200)
            texts = {name: str(value) for name, value in body.items()}
            content = urlencode(texts, errors="replace").encode() if form else json.dumps(body).encode()
            answer = http_.post(path, content=content, headers={"Content-Type": kind})
        assert answer.status_code in (200, 400, 404, 413), (answer.status_code, body)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert isinstance(error, dict if path.startswith("/v1") else str), error
        return answer.status_code

    python.__name__ = f"{path} {kind} {json.dumps(body)[:120]}"
    return python
