"""A page in headless Chromium translates with a folder exported for the web and gives MLX's greedy tokens.

Once with onnxruntime-web and nothing else, once with transformers.js: on wasm with one thread, with two in a page that
is cross-origin isolated, and on WebGPU. `_quantized` and `_q4` files against our own runtime. Only localhost is asked.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from cases import BATCH, LOWER_PHRASES, NEW_TOKENS, Lower, run
from test_consumers import differing, new_tokens

from export.precision.table import PRECISIONS

pytestmark = pytest.mark.consumers

PHRASES = 64
THREADS = (1, 2)
ON_GPU, TOKENS_ON_GPU = 2, 12  # a processor plays the graphics card: minutes for what takes a card a second
# Lower precisions with the provider that has their kernels.
WHERE = {"int8": "wasm", "int4": "webgpu"}
# What WebGPU leaves to wasm: positions and the causal mask, of 64-bit integers. No product, no attention.
ON_HOST = set("Add And Cast Concat CumSum Gather LessOrEqual Max Range Shape Sub Unsqueeze".split())


@pytest.fixture(scope="module")
def lower(trained, tmp_path_factory: pytest.TempPathFactory) -> Lower:
    return Lower.of(trained, tmp_path_factory.mktemp("lower") / "web", "web")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def ask(trained, lower, place) -> Callable[[str], Any]:
    """ask(task's name) -> its answer. One browser answers all of them, in a page each."""
    texts = trained.phrases[:PHRASES]
    common = dict(batch=BATCH, max_new_tokens=NEW_TOKENS, threads=1)
    exact = {**common, "folder": str(trained.web)}
    rows = trained.tokenizer.encode_batch(texts)
    gpu = {**exact, "max_new_tokens": TOKENS_ON_GPU}
    tasks = [
        dict(name="ort webgpu", kind="ort", **gpu, rows=rows[:ON_GPU], provider="webgpu"),
        dict(name="transformers webgpu", kind="transformers", **gpu, texts=texts[:ON_GPU], device="webgpu"),
    ]
    for threads in THREADS:
        more = {**exact, "threads": threads}
        tasks += [
            dict(name=f"ort {threads}", kind="ort", rows=rows, **more),
            dict(name=f"transformers {threads}", kind="transformers", texts=texts, **more),
        ]
    for precision, provider in WHERE.items():
        count = ON_GPU if provider == "webgpu" else LOWER_PHRASES
        more = {**common, "folder": str(lower.folder), "batch": 1, "max_new_tokens": limit_on(provider)}
        suffix, dtype = PRECISIONS[precision].suffix, PRECISIONS[precision].dtype
        tasks += [
            dict(name=f"ort {precision}", kind="ort", rows=rows[:count], suffix=suffix, provider=provider, **more),
            dict(
                name=f"transformers {precision}",
                kind="transformers",
                texts=texts[:count],
                dtype=dtype,
                device=provider,
                **more,
            ),
        ]
    try:
        answers = run("chromium", tasks, place)
    except RuntimeError as error:
        pytest.fail(f"{error}\nThe browser's log: {place / 'browser.log'}", pytrace=False)

    def ask(name: str) -> Any:
        if "error" in answers[name]:
            pytest.fail(f"{name}: {answers[name]['error']}", pytrace=False)
        return answers[name]["value"]

    return ask


def limit_on(provider: str) -> int:
    return TOKENS_ON_GPU if provider == "webgpu" else NEW_TOKENS


def ids_of(trained, found: dict[str, Any]) -> list[list[int]]:
    """Of a transformers.js answer, as MLX gives them."""
    config = trained.model.config
    return [new_tokens(row, 1, {config.eos_id}, config.pad_id) for row in found["ids"]]


@pytest.mark.parametrize("threads", THREADS)
def test_onnxruntime_web(threads, trained, ask):
    found = ask(f"ort {threads}")
    assert found["isolated"] == (threads > 1)
    assert found["threads"] == threads
    assert not differing(trained, found["ids"])
    assert len(found["ids"]) == PHRASES


@pytest.mark.parametrize("threads", THREADS)
def test_transformers_js(threads, trained, ask):
    found = ask(f"transformers {threads}")
    assert not differing(trained, ids_of(trained, found))
    assert found["texts"] == trained.tokenizer.decode_batch(trained.tokens[:PHRASES])


def test_webgpu(trained, ask):
    """SwiftShader's device: the kernels are those of a graphics card, their speed is not."""
    expected = [row[:TOKENS_ON_GPU] for row in trained.tokens[:ON_GPU]]
    assert ask("ort webgpu")["ids"] == expected
    assert ids_of(trained, ask("transformers webgpu")) == expected


@pytest.mark.parametrize("task", ["ort webgpu", "ort int4"])
def test_products_and_attention_run_on_webgpu(task, ask, place):
    """By ONNX Runtime's own account of what runs each node."""
    ask(task)
    log = (place / "browser.log").read_text(encoding="utf-8")
    nodes, provider = defaultdict(set), ""
    for line in re.findall(rf"^{task}: .*VerifyEachNodeIsAssignedToAnEp\] +(.*)$", log, re.MULTILINE):
        if found := re.match(r"(?:Node\(s\)|All nodes) placed on \[(\w+)\]", line):
            provider = found[1]
        elif found := re.match(r"(\w+) \(", line):
            nodes[provider].add(found[1])
    assert {"Softmax", "LayerNormalization"} <= nodes["WebGpuExecutionProvider"]
    assert {"MatMul" if task == "ort webgpu" else "MatMulNBits"} <= nodes["WebGpuExecutionProvider"]
    assert nodes["CPUExecutionProvider"] <= ON_HOST


@pytest.mark.parametrize("kind", ["ort", "transformers"])
@pytest.mark.parametrize("precision", WHERE)
def test_lower_precisions(precision, kind, trained, lower, ask):
    found = ask(f"{kind} {precision}")
    rows = found["ids"] if kind == "ort" else ids_of(trained, found)
    count = ON_GPU if WHERE[precision] == "webgpu" else LOWER_PHRASES
    assert len(rows) == count
    assert not (problems := lower.decided_otherwise(precision, rows, limit_on(WHERE[precision]))), problems


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch):
    """A browser that isn't there."""
    monkeypatch.setitem(os.environ, "CHROMIUM", str(tmp_path / "no-chromium"))
    with pytest.raises(RuntimeError, match="no-chromium"):
        run("chromium", [], tmp_path)
