"""The page of `web` in headless Chromium, used as a person would: MLX's tokens, a silent console, nobody else
asked, no barrier that axe-core finds, and all of it again without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE, MODEL, TEXTS
from imports import ROOT
from tokenizers import Regex, pre_tokenizers

from export import OnnxTransformer, export_onnx, export_search
from export.web import write_site
from export.web.write import SITE
from mlx_transformer.system.machine import usable_cores
from mlx_transformer.text.tokenizer import SPLIT_PATTERN, Tokenizer

pytestmark = pytest.mark.consumers

COUNT = 8  # sentences of each search
SECONDS = 900
SAMPLE = {"temperature": 1.5, "topK": 20, "topP": 0.95, "seed": 12345}
WORD = 1  # whose alternatives are looked at
GPU_TOKENS = 8  # a processor plays the graphics card


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def site(trained, folder) -> Path:
    int8 = export_onnx(MODEL, folder / "int8", target="web", precision="int8", attention=True, accept_loss=True)
    file = export_search(MODEL, folder / "mine.onnx", target="cpu", attention=True)
    modules = HERE / "node" / "node_modules"
    return write_site([trained.web, int8, file], folder / "site", assets=modules, title="Phrases, English to German")


@pytest.fixture(scope="module")
def chosen(trained) -> list[str]:
    """Sentences that end, of many kinds, the first of more than one word."""
    finished = [text for text, tokens in trained.finished() if text == text.strip()]
    return sorted(finished[: COUNT + 4], key=lambda text: " " not in text)[:COUNT]


@pytest.fixture(scope="module")
def answer(trained, site, folder, chosen) -> dict[str, Any]:
    """All that the browser was asked, once."""
    short = min((text for text, ids in trained.finished() if len(ids) <= GPU_TOKENS), key=len, default=chosen[0])
    search = {"texts": chosen, "device": "auto"}
    task = {
        "site": str(site),
        "lines": [*TEXTS, *trained.phrases],
        "rows": trained.tokens,
        "word": WORD,
        "gpuText": short,
        "searches": [
            {"name": "greedy", "model": "float32", "method": "greedy", **search},
            {"name": "beam", "model": "float32", "method": "beam", **search},
            {"name": "sample", "model": "float32", "method": "sample", "fields": SAMPLE, **search},
            {"name": "int8", "model": "int8", "method": "greedy", **search},
            {"name": "inside, greedy", "model": "float32, search inside", "method": "greedy", **search},
            {"name": "inside, beam", "model": "float32, search inside", "method": "beam", **search},
            {"name": "inside, sample", "model": "float32, search inside", "method": "sample", **search},
        ],
    }
    command = [sys.executable, "-m", "export", "serve", "--web", str(site), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        line = server.stderr.readline()
        [task["origin"]] = re.findall(r"on (http://127\.0\.0\.1:\d+) ", line)
        task["pid"] = server.pid
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        script = ["node", str(HERE / "node" / "with_site.mjs"), str(folder / "task.json"), str(folder / "answer.json")]
        try:
            done = subprocess.run(script, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    assert "failed" not in found, f"{found['failed']}\n{found['problems']}\npictures in {folder}"
    return found


def ids_of(found: dict[str, Any]) -> list[list[int]]:
    assert not [each["error"] for each in found["found"] if each["error"]]
    return [each["ids"] for each in found["found"]]


@pytest.mark.parametrize("name", ["greedy", "inside, greedy"])
def test_greedy_tokens_are_those_of_mlx(name, trained, chosen, answer):
    assert ids_of(answer["searches"][name]) == trained.model.generate(trained.tokenizer.encode_batch(chosen))
    texts = [each["text"] for each in answer["searches"][name]["found"]]
    assert texts == trained.tokenizer.decode_batch(ids_of(answer["searches"][name]))


@pytest.mark.parametrize("name", ["beam", "inside, beam"])
def test_beams_are_those_of_mlx(name, trained, chosen, answer):
    rows = trained.tokenizer.encode_batch(chosen)
    assert ids_of(answer["searches"][name]) == trained.model.generate(rows, beam=4)
    [best] = trained.model.search(rows[-1:], beam=4, n_best=4)
    others = trained.tokenizer.decode_batch([hypothesis.ids for hypothesis in best[1:]])
    assert answer["searches"][name]["others"] == others


@pytest.mark.parametrize("name", ["sample", "inside, sample"])
def test_a_seed_draws_the_tokens_that_it_draws_elsewhere(name, trained, chosen, answer):
    options = dict(sample=True, temperature=1.5, top_k=20, top_p=0.95, seed=12345)
    expected = [trained.model.generate([row], **options)[0] for row in trained.tokenizer.encode_batch(chosen)]
    assert ids_of(answer["searches"][name]) == expected
    assert expected != ids_of(answer["searches"]["greedy"]), "so warm that a model which is sure writes something else"


def test_precisions_have_the_tokens_of_our_runtime(folder, trained, chosen, answer):
    model = OnnxTransformer(folder / "int8", precision="int8")
    rows = trained.tokenizer.encode_batch(chosen)
    pairs = zip(ids_of(answer["searches"]["int8"]), (model.generate([row])[0] for row in rows), strict=True)
    # Another order of additions is a step of the activations' grid: where two tokens are that near, either may win.
    assert sum(found == expected for found, expected in pairs) >= COUNT - 1


def groups(tokenizer: Tokenizer, ids: list[int], length: int) -> list[range]:
    """The tokens of each word of a text; `length`: where the last one ends."""
    text, pieces = tokenizer.decode(ids), pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    begins = {begin for _, (begin, _) in pieces.pre_tokenize_str(text)}
    starts = [i for i in range(len(ids)) if len(tokenizer.decode(ids[:i])) in begins]
    return [range(*pair) for pair in pairwise([*starts, length])]


@pytest.mark.parametrize(("name", "precision", "allowed"), [("int8", "int8", 2), ("inside, beam", "float32", 0.6)])
def test_attention_is_that_of_our_runtime(name, precision, allowed, folder, trained, chosen, answer):
    """In percent, by words: summed over a source word's tokens, the mean over those of an output's."""
    out = folder / f"shown-{precision}"
    model = OnnxTransformer(export_onnx(MODEL, out, precision=precision, attention=True, accept_loss=True))
    for text, found in zip(chosen, answer["searches"][name]["found"], strict=True):
        [source], ids = trained.tokenizer.encode_batch([text]), found["ids"]
        weights = model.cross_attention([source], [[model.config.bos_id, *ids[:-1]]])[0]
        columns = [*groups(trained.tokenizer, source[:-1], len(source) - 1), range(len(source) - 1, len(source))]
        rows = groups(trained.tokenizer, ids, len(ids))
        expected = [[100 * weights[list(row)][:, list(column)].sum(1).mean() for column in columns] for row in rows]
        assert np.abs(np.array(found["read"]["shares"]) - expected).max() <= allowed
        assert found["read"]["columns"][-1] == "(end)"
        assert "".join(found["read"]["columns"][:-1]) == "".join(text.split())
        assert "".join(found["read"]["rows"]) == "".join(found["text"].split())


def test_a_model_without_attention_shows_none(answer):
    assert {found["read"] for found in answer["searches"]["greedy"]["found"]} == {None}


def test_the_tokenizer_is_that_of_python(trained, answer):
    lines = [*TEXTS, *trained.phrases]
    assert answer["tokenized"]["ids"] == trained.tokenizer.encode_batch(lines)
    texts = trained.tokenizer.decode_batch(trained.tokens)
    assert answer["tokenized"]["texts"] == texts
    assert answer["tokenized"]["words"] == texts


def test_a_word_has_alternatives_and_the_chosen_one_is_forced(trained, chosen, answer):
    found, tokenizer = answer["alternatives"], trained.tokenizer
    assert len(found["choices"]) == 8
    assert "8 alternatives for" in found["said"]
    rows = tokenizer.encode_batch(chosen[:1])
    free = trained.model.generate(rows)
    assert [found["free"]["ids"]] == free
    same = next(i for i, (a, b) in enumerate(zip(found["chosen"]["ids"], free[0], strict=False)) if a != b)
    assert same > 0, "the first word was clicked"
    prefix = found["chosen"]["ids"][: same + 1]
    assert tokenizer.decode(prefix[-1:]).strip() in found["choices"][1]
    assert trained.model.generate(rows, prefix=[prefix]) == [found["chosen"]["ids"]]


def test_no_translation_stands_there_while_a_model_is_loaded(answer):
    assert answer["standing"] == []


def test_models_are_compared(site, answer):
    names = [model["name"] for model in json.loads((site / SITE).read_text(encoding="utf-8"))["models"]]
    assert [row.split("\t")[0] for row in answer["compared"]] == names
    assert all(len(row.split("\t")) == 5 for row in answer["compared"])


def test_nothing_is_said_on_the_console_and_nobody_else_asked(answer):
    assert answer["problems"] == []
    assert all(host.startswith("127.0.0.1:") for host in answer["hosts"]), answer["hosts"]


def test_no_barrier_is_found(answer):
    assert answer["violations"] == []
    assert not answer["sideways"], "a phone would have to scroll sideways"


def test_threads_where_the_page_is_isolated(trained, chosen, answer):
    assert answer["isolated"]
    threads = min(4, usable_cores())  # what Chromium counts
    assert re.search(rf"wasm, {threads} thread", answer["facts"])
    first, second = answer["visits"]
    expected = trained.model.generate(trained.tokenizer.encode_batch(chosen[:1]))
    assert [first["ids"], second["ids"]] == [*expected, *expected]
    assert "One thread: this page is not cross-origin isolated" in first["said"]
    assert "wasm, 1 thread" in first["facts"]
    assert second["said"] == "", "the service worker adds the headers"


def test_it_works_offline_after_the_first_visit(site, answer):
    offline = answer["offline"]
    assert offline["isolated"]
    assert offline["models"] == len(json.loads((site / SITE).read_text(encoding="utf-8"))["models"])
    for name, found in offline["found"].items():
        assert ids_of(found) == ids_of(answer["searches"][name])


@pytest.mark.parametrize(("method", "beam"), [("greedy", 1), ("beam", 4)])
def test_webgpu(method, beam, trained, answer, folder):
    """SwiftShader's device: the kernels are those of a graphics card, their speed is not."""
    text = json.loads((folder / "task.json").read_text(encoding="utf-8"))["gpuText"]
    assert "WebGPU" in answer["gpu"][method]["facts"]
    rows = trained.tokenizer.encode_batch([text])
    assert [answer["gpu"][method]["ids"]] == trained.model.generate(rows, beam=beam)
