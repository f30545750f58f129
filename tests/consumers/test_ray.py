"""The examples for Ray in the docs: a text translated, and requests of a translator and of a decoder answered by two
workers, though one is killed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cases import HERE
from chat_models import write_chat_model
from imports import ROOT
from small_models import write_text_model

import mlx_transformer as mt

pytestmark = pytest.mark.consumers
PYTHON = Path(os.environ.get("RAY_PYTHON", ROOT / ".venv-ray/bin/python"))
MINUTES = 8


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    model = mt.OnnxTransformer(write_text_model(tmp_path) / "onnx", threads=1)
    lines = [f"line {i} of {i % 7} lines" if i % 11 else "" for i in range(700)]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    decoder = mt.OnnxTransformer(write_chat_model(tmp_path / "chats", "smollm2") / "onnx", threads=1)
    command = [PYTHON, HERE / "with_ray.py", model.where, decoder.where, tmp_path / "text", tmp_path / "out", tmp_path]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'docs'}", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES, env=environment)
    except FileNotFoundError:
        pytest.fail(f"{PYTHON} is not there; run make test-ray", pytrace=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["killed"]
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1] == model.translate(lines, beam=4)
    assert len(list(tmp_path.glob("worker-*"))) >= 2
    of_translator, of_decoder = said["asked"]
    texts = [request["text"] for request in of_translator]
    expected = [model.translate(texts, beam=4)]
    expected += [
        [
            decoder.chat(x["messages"]) if "messages" in x else decoder.complete(x["text"], max_new_tokens=128)
            for x in of_decoder
        ]
    ]
    assert [[answer["answer"] for answer in each] for each in said["answers"]] == expected
    for each in said["answers"]:
        assert len({answer["worker"] for answer in each}) >= 3  # two, and the one in the place of the killed
