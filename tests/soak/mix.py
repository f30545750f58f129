"""What the soak asks: texts and settings drawn from a seed, the right answers computed one by one, and odd requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from chat_models import write_chat_model
from small_models import DECODER, write_text_model

from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.generation.stream import ended

WORDS = "one two three. four five six! größer 東京 x".split()
SETTINGS: list[dict[str, Any]] = [
    {},
    {},
    {"beam": 4},
    {"beam": 2, "length_penalty": 1.0},
    {"max_new_tokens": 12},
    {"beam": 4, "n_best": 2},
    {"sample": True, "seed": 3, "temperature": 0.9},
]
COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
SYSTEM = "Be brief, and answer in one of two languages: one two three. four five six!"
STOPS: list[dict[str, Any]] = [{}, {"stop": ["o"]}, {"n": 2, "temperature": 1, "seed": 4, "top_p": 0.9}]
KEYS = [f"key-of-client-{i}" for i in range(8)]


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of `count` requests."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(0, 9))) for _ in range(rng.choice([1, 1, 1, 2, 4, 8]))]
        found.append({"text": lines[0] if len(lines) == 1 else lines, **SETTINGS[i % len(SETTINGS)]})
    return found


def answers(model: Any, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """The translations of each, every sentence searched alone; drawn ones with those of their request."""
    found = []
    for body in bodies:
        options = {name: value for name, value in body.items() if name != "text"}
        lines = [body["text"]] if isinstance(body["text"], str) else body["text"]
        if options.get("sample"):
            found.append(model.translate(lines, **options))
        else:
            found.append([model.n_best([line], **options)[0][0].text for line in lines])
    return found


def models(folder: Path, translator: Path | None) -> dict[str, Path]:
    """Names and ONNX folders of what is served: a translator, random weights by default, a decoder and an encoder."""
    encoder = write_text_model(folder / "encoder", architecture="encoder", decoder_layers=0) / "onnx"
    (encoder / EMBEDDING).write_text(TextEmbedding(normalize=True).json())
    return {
        "en-de": translator or write_text_model(folder / "translator") / "onnx",
        "stories": write_text_model(folder / "decoder", **DECODER) / "onnx",
        "chat": write_chat_model(folder / "chat", "qwen2") / "onnx",
        "mini": encoder,
    }


def questions(opened: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """{path, body, answer} in each form that is served, with the right answer of each, computed alone: `count`
    translations, and a part of them in LibreTranslate's form, completions, chats and vectors."""
    bodies = requests(count, seed)
    right = answers(opened["en-de"], bodies)
    found = [{"path": "/translate", "body": body, "answer": each} for body, each in zip(bodies, right, strict=True)]
    theirs = [{**each, "body": in_their_form(each["body"])} for each in found[::3]]
    for number, body in enumerate(bodies[::4]):
        lines = [body["text"]] if isinstance(body["text"], str) else body["text"]
        asked = {"model": "stories", "prompt": lines[0], "max_tokens": 12, "temperature": 0}
        asked |= STOPS[number % len(STOPS)]
        theirs.append({"path": COMPLETIONS, "body": asked, "answer": continued(opened["stories"], asked)})
        talk = [{"role": "user", "content": line} for line in lines]
        talk = [{"role": "system", "content": SYSTEM}, *talk] if number % 3 else talk[:1]
        asked = {"model": "chat", "messages": talk, "max_tokens": 1 + 7 * (number % 5), "temperature": 0}
        asked |= STOPS[number % len(STOPS)]
        theirs.append({"path": CHATS, "body": asked, "answer": continued(opened["chat"], asked)})
        vectors = [opened["mini"].embed([line])[0].tolist() for line in lines]
        asked = {"model": "mini", "input": lines, "encoding_format": "float"}
        theirs.append({"path": EMBEDDINGS, "body": asked, "answer": vectors})
    return found + theirs


def continued(model: Any, asked: dict[str, Any]) -> list[str]:
    """What a decoder alone answers to a completion or a chat."""
    given = {"max_new_tokens": asked["max_tokens"], "stop": asked.get("stop", ())}
    if asked["temperature"]:
        given |= {"sample": True, "seed": asked["seed"], "top_p": asked["top_p"]}
    if "messages" not in asked:
        return model.complete([asked["prompt"]] * asked.get("n", 1), **given)
    stop, ids = given.pop("stop"), model.chat_ids(asked["messages"])
    return ended(model.tokenizer, model.generate([ids] * asked.get("n", 1), **given), stop)


def in_their_form(body: dict[str, Any]) -> dict[str, Any]:
    """The same request as LibreTranslate's clients make it; the best translation alone is asked for."""
    rest = {name: value for name, value in body.items() if name not in ("text", "n_best")}
    return {"q": body["text"], "source": "en", "target": "de", **rest}


def translations(answer: dict[str, Any]) -> list[str]:
    """The translations of an answer in either form."""
    found = answer["translatedText"] if "translatedText" in answer else answer["translations"]
    return [found] if isinstance(found, str) else found


def is_right(path: str, found: dict[str, Any], answer: list[Any]) -> bool:
    """Whether this is the answer to a request of that path."""
    if path == COMPLETIONS:
        return [choice["text"] for choice in found["choices"]] == answer
    if path == CHATS:
        return [choice["message"]["content"] for choice in found["choices"]] == answer
    if path == EMBEDDINGS:
        return np.array_equal(np.array([each["embedding"] for each in found["data"]], np.float32), answer)
    return translations(found) == answer


def may_stream(body: dict[str, Any]) -> bool:
    """Whether what a request asks for is one text, whose tokens are sure one by one, and in no client's own form."""
    one = isinstance(body.get("text"), str) or "prompt" in body or "messages" in body
    return one and body.get("beam", 1) == 1 and body.get("n", 1) == 1


def head(body: bytes, path: str = "/translate", key: str = KEYS[0], method: str = "POST", more: str = "") -> bytes:
    """The head of a request with this body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: soak", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", more + "\r\n" if more else "\r\n"]).encode()


def odd() -> list[tuple[bytes, int]]:
    """Requests that nobody should send, and the status of their answers."""

    def post(body: bytes, **given: Any) -> bytes:
        return head(body, **given) + body

    def asked(**body: Any) -> bytes:
        return post(json.dumps({"text": "x", **body}).encode())

    return [
        (post(b""), 400),
        (post(b"\xff\xfe"), 400),
        (post(b"[" * 50_000), 400),
        (post(b'{"text": ' + b"9" * 5000 + b"}"), 400),
        (asked(beam=10**9), 400),
        (asked(length_penalty=65536), 400),
        (asked(min_new_tokens=2**63), 400),
        (asked(text=["x"] * 5000), 413),
        (asked(text="\ud800"), 400),
        (post(b"x" * 300_000), 413),
        (asked(q="x"), 400),
        (post(b'{"q": "x", "source": "en", "target": "fr"}'), 400),
        (post(b'{"q": "x", "source": "en", "target": "de", "format": "pdf"}'), 400),
        (post(b"q=%ff", more="Content-Type: application/x-www-form-urlencoded"), 400),
        (post(b"[]", path="/detect"), 400),
        (post(b"{}", path="/v1/completions"), 400),
        (post(b'{"model": "gpt", "prompt": "x"}', path="/v1/completions"), 404),
        (post(b'{"model": "stories", "prompt": "x", "max_tokens": -1}', path="/v1/completions"), 400),
        (post(b'{"model": "chat", "messages": [{"role": "user", "content": 3}]}', path=CHATS), 400),
        (post(b'{"model": "stories", "messages": [{"role": "user", "content": "x"}]}', path=CHATS), 400),
        (post(b'{"model": "mini", "input": [[9999999]]}', path="/v1/embeddings"), 400),
        (post(b'{"model": "stories", "input": "x"}', path="/v1/embeddings"), 400),
        (post(b"{}", path="/nowhere"), 404),
        (post(b"{}", method="DELETE"), 405),
        (post(b"{}", key="wrong"), 401),
        (post(b"{}", more="X-Filler: " + "y" * 100_000), 431),
        (b"GET /" + b"z" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3, 400),  # TLS
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ]
