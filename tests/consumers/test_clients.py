"""Our server asked by others' clients, `openai`, `llm`, LangChain's and `libretranslatepy`, and by `curl`."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE, PYTHON
from chat_models import write_chat_model
from imports import ROOT
from small_models import DECODER, write_text_model
from waiting import PATIENCE

from export import OnnxTransformer, export_onnx
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.tensors import write_tensors

pytestmark = pytest.mark.consumers
KEY = "secret-of-the-tests"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "en-de": write_text_model(tmp_path_factory.mktemp("translator")) / "onnx",
        "stories": write_text_model(tmp_path_factory.mktemp("decoder"), **DECODER) / "onnx",
        "mini": _encoder(tmp_path_factory.mktemp("encoder")),
        "chat": write_chat_model(tmp_path_factory.mktemp("chat"), "qwen2") / "onnx",
    }


def _encoder(folder: Path) -> Path:
    """Which makes weights and vectors of tokens too."""
    write_text_model(folder, architecture="encoder", decoder_layers=0)
    random, shapes = np.random.default_rng(3), TextEmbedding(sparse=True, multi=5).shapes(32)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    made = TextEmbedding(normalize=True, sparse=True, multi=5, weights=weights)
    (folder / "model" / EMBEDDING).write_text(made.json())
    write_tensors(folder / "model" / DENSE, weights)
    return export_onnx(folder / "model", folder / "graphs")


@pytest.fixture(scope="module")
def port(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    named = [f"{name}={path}" for name, path in models.items()]
    command = [sys.executable, "-m", "export", "serve", *named, "--port", "0", "--threads", "1"]
    process = subprocess.Popen([*command, "--api-key-file", keys], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(found for line in process.stderr if (found := re.search(r":(\d+) \(ready in", line)))
        yield int(found[1])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def said(port: int, models: dict[str, Path]) -> dict[str, Any]:
    """What the clients said."""
    tokenizer = OnnxTransformer(models["mini"], threads=1).tokenizer
    assert tokenizer is not None
    ids = map(str, tokenizer.encode("one two"))
    command = [str(PYTHON), "-I", str(HERE / "with_clients.py"), str(port), KEY, *ids]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        pytest.fail(f"{PYTHON} is not there; run make test-consumers", pytrace=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai(said: dict[str, Any], models: dict[str, Path]) -> None:
    found, model = said["openai"], OnnxTransformer(models["stories"], threads=1)
    assert (found["models"], found["model"]) == (["en-de", "stories", "mini", "chat"], "stories")
    whole = model.complete("one two", max_new_tokens=12)
    assert found["text"] == found["streamed"] == whole
    assert found["usage"] == found["stream usage"]
    assert found["reason"] == ("length" if found["usage"] == 12 else "stop")
    drawn = {"sample": True, "seed": 5, "top_p": 0.9, "max_new_tokens": 12}
    assert found["drawn"] == model.complete(["one two"] * 2, **drawn)


def test_openai_chats(said: dict[str, Any], models: dict[str, Path]) -> None:
    found, model = said["openai"]["chat"], OnnxTransformer(models["chat"], threads=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
    ids = model.chat_ids(messages)
    [new] = model.generate([ids], max_new_tokens=9)
    whole = model.chat(messages, max_new_tokens=9)
    assert found["text"] == found["streamed"] == found["final"] == whole
    assert found["usage"] == found["stream usage"] == [len(ids), len(new)]
    assert found["reason"] == ("length" if len(new) == 9 else "stop")
    assert found["logprobs"] == pytest.approx(model.log_probabilities([ids], [new])[0].tolist(), abs=1e-5)
    assert "".join(first for first, _ in found["likeliest"]) == whole
    options = {"sample": True, "seed": 5, "top_p": 0.9, "presence_penalty": 1, "max_new_tokens": 9}
    assert model.tokenizer is not None
    assert found["drawn"] == [model.tokenizer.decode(ids) for ids in model.generate([ids] * 2, **options)]
    assert found["extra"] == model.chat(messages, repetition_penalty=1.5, max_new_tokens=9)
    assert "response_format: this server doesn't have it" in found["refused"]


def test_langchain_and_llm_chat(said: dict[str, Any], models: dict[str, Path]) -> None:
    model = OnnxTransformer(models["chat"], threads=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
    whole, ids = model.chat(messages, max_new_tokens=9), model.chat_ids(messages)
    found = said["langchain"]
    assert found["text"] == found["streamed"] == whole
    assert found["usage"] == found["stream usage"] == [len(ids), len(model.generate([ids], max_new_tokens=9)[0])]
    assert found["reason"] in ("length", "stop")
    assert found["batch"] == [whole, model.chat(messages[1:], max_new_tokens=9)]
    assert said["llm"]["text"] == said["llm"]["streamed"] == whole
    turns = [*messages, {"role": "assistant", "content": whole}, {"role": "user", "content": "And?"}]
    assert said["llm"]["next"] == model.chat(turns, max_new_tokens=9)


def test_openai_gets_vectors(said: dict[str, Any], models: dict[str, Path]) -> None:
    found, model = said["openai"]["embeddings"], OnnxTransformer(models["mini"], threads=1)
    texts = ["one two", "", "größer & 東京"]
    np.testing.assert_array_equal(np.array(found["texts"], np.float32), model.embed(texts))
    np.testing.assert_array_equal(np.array(found["floats"], np.float32), model.embed(texts, dimensions=5))
    np.testing.assert_array_equal(np.array(found["ids"], np.float32), model.embed(["one two"]))
    assert [{int(id): np.float32(x) for id, x in each.items()} for each in found["sparse"]] == model.embed(
        texts, kind="sparse"
    )
    for rows, expected in zip(found["multi"], model.embed(texts, kind="multi"), strict=True):
        np.testing.assert_array_equal(np.array(rows, np.float32).reshape(-1, 5), expected)
    assert model.tokenizer is not None
    assert found["tokens"] == sum(map(len, model.tokenizer.encode_batch(texts)))


@pytest.mark.parametrize(
    ("name", "kind", "status", "code"),
    [
        ("other model", "NotFoundError", 404, "model_not_found"),
        ("wrong value", "BadRequestError", 400, None),
        ("not done", "BadRequestError", 400, None),
        ("key", "AuthenticationError", 401, "invalid_api_key"),
        ("model", "NotFoundError", 404, "model_not_found"),
    ],
)
def test_openai_reads_errors(said: dict[str, Any], name: str, kind: str, status: int, code: str | None) -> None:
    assert said["openai"]["errors"][name][:3] == [kind, status, code]
    assert said["openai"]["errors"][name][3]


def test_libretranslate(said: dict[str, Any], models: dict[str, Path]) -> None:
    found, model = said["libretranslate"], OnnxTransformer(models["en-de"], threads=1)
    assert found["text"] == "\n".join(model.translate(["one two", "", "größer & 東京"]))
    assert found["auto"] == model.translate("one")
    assert [entry["code"] for entry in found["languages"]] == ["de", "en"]
    assert found["detect"] == [{"confidence": 0, "language": "en"}]
    assert found["refused"][0] == 401
    assert list(found["refused"][1]) == ["error"]


def test_curl(port: int, models: dict[str, Path]) -> None:
    """The examples of LibreTranslate's and of OpenAI's pages, with our models' names."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    translator, writer = (OnnxTransformer(models[name], threads=1) for name in ("en-de", "stories"))
    address = f"http://127.0.0.1:{port}"
    json_type = ["-H", "Content-Type: application/json"]

    def curl(path: str, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(["curl", "-sS", address + path, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    asked = {"q": "one", "source": "auto", "target": "de", "format": "text", "alternatives": 3, "api_key": KEY}
    found = curl("/translate", "-X", "POST", *json_type, "-d", json.dumps(asked))
    assert found["translatedText"] == translator.n_best("one", beam=4, n_best=4)[0].text
    assert found["detectedLanguage"]["language"] == "en"
    assert found["alternatives"]
    form = ["-d", "q=one two", "-d", "source=en", "-d", "target=de", "-d", f"api_key={KEY}"]
    assert curl("/translate", *form) == {"translatedText": translator.translate("one two")}
    key = ["-H", f"Authorization: Bearer {KEY}"]
    body = {"model": "stories", "prompt": "one two", "max_tokens": 7, "temperature": 0}
    found = curl("/v1/completions", *json_type, *key, "-d", json.dumps(body))
    assert found["choices"][0]["text"] == writer.complete("one two", max_new_tokens=7)
    assert curl("/v1/models", *key)["object"] == "list"
    hello = [{"role": "user", "content": "Hello!"}]
    body = {"model": "chat", "messages": hello, "max_tokens": 7, "temperature": 0}
    found = curl("/v1/chat/completions", *json_type, *key, "-d", json.dumps(body))
    answer = OnnxTransformer(models["chat"], threads=1).chat(hello, max_new_tokens=7)
    assert found["choices"][0]["message"]["content"] == answer
