"""One `OnnxTransformer` in eight threads: each request gets the answer that it gets alone, whatever runs beside it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from export import OnnxTransformer, export_onnx

THREADS = 8
WORDS = "one two three. four five six! größer 東京".split()
SETTINGS = [
    {"max_new_tokens": 8},
    {"beam": 3, "max_new_tokens": 6},
    {"sample": True, "seed": 5, "max_new_tokens": 8},
    {"beam": 2, "max_new_tokens": 9, "length_penalty": 1.0},
]


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(request, text_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    export_onnx(text_folder / "model", folder / "onnx", precision=request.param, target="cpu", force=True)
    return OnnxTransformer(folder / "onnx", threads=2)


def asked(count):
    """Lines and settings, small ones; the same are asked again and again, side by side with all others."""
    rng = random.Random(count)
    lines = [
        [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(rng.choice([1, 1, 3]))] for _ in range(40)
    ]
    return [(rng.choice(lines), rng.choice(SETTINGS)) for _ in range(count)]


def judge(model, count):
    """Requests in eight threads against each of them alone."""
    requests = asked(count)
    alone = {}
    for lines, settings in requests:
        key = str((lines, settings))
        if key not in alone:
            alone[key] = model.translate(lines, **settings)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda request: model.translate(request[0], **request[1]), requests))
    wrong = [i for i, (lines, settings) in enumerate(requests) if found[i] != alone[str((lines, settings))]]
    assert len({str(answer) for answer in found}) > 30, "there is something to mix up"
    assert wrong == []


@pytest.mark.fast("int8")
def test_eight_threads(model):
    judge(model, 80)


@pytest.mark.slow
def test_eight_threads_for_long(model):
    judge(model, 10_000)
