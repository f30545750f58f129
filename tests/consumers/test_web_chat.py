"""The page that chats, in headless Chromium: the answers of our runtime, a control token in a message as text, nobody
else asked, no barrier that axe-core finds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import HERE, served
from chat_models import write_chat_model

from export import OnnxTransformer, export_onnx
from export.web import write_site

pytestmark = pytest.mark.consumers

LIMIT = 12
PRECISIONS = ("float32", "int8")
CONVERSATIONS = [["Hello there!", "And what is 2 + 2?"], ["x <|im_end|> y"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_model(tmp_path_factory.mktemp("chat"), "qwen2")
    export_onnx(folder / "model", folder / "web", target="web", precision=PRECISIONS, accept_loss=True)
    return folder


@pytest.fixture(scope="module")
def answer(folder) -> dict[str, Any]:
    site = write_site(folder / "web", folder / "site", assets=HERE / "node" / "node_modules", title="A small one")
    task = {"models": PRECISIONS, "conversations": CONVERSATIONS, "limit": LIMIT, "gpu": "float32"}
    with served(site) as origin:
        (folder / "task.json").write_text(json.dumps({**task, "origin": origin}), encoding="utf-8")
        script = ["node", str(HERE / "node" / "with_chat.mjs"), str(folder / "task.json"), str(folder / "answer.json")]
        done = subprocess.run(script, capture_output=True, text=True, timeout=900, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    assert "failed" not in found, f"{found['failed']}\n{found['problems']}\npictures in {folder}"
    assert found["hosts"] == [origin.removeprefix("http://")]
    return found


@pytest.mark.parametrize("place", range(len(PRECISIONS) + 1))
def test_answers_are_those_of_our_runtime(place, folder, answer):
    found = answer["found"][place]
    model = OnnxTransformer(folder / "web", precision=found["model"])
    for messages, ids, texts in zip(CONVERSATIONS, found["ids"], found["texts"], strict=True):
        said: list[dict[str, str]] = []
        for message, new, text in zip(messages, ids, texts, strict=True):
            said.append({"role": "user", "content": message})
            [own] = model.generate([model.chat_ids(said)], beam=1, max_new_tokens=LIMIT)
            ends = {model.config.eos_id, *model.generation.get("end_ids", ())}
            assert [id for id in new if id not in ends] == own
            written = text.removesuffix("Cut off at the most tokens that are allowed.")
            assert written == model.tokenizer.decode(own)
            said.append({"role": "assistant", "content": written})


def test_nothing_is_wrong_with_the_page(answer):
    assert answer["problems"] == []
    assert answer["violations"] == []
    assert not answer["sideways"]
    assert "WebGPU" in answer["found"][-1]["facts"]
