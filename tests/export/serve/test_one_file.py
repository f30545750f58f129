"""One file with the search inside, served: the answers of `translate`, whoever else asks; what it can't do is said."""

from __future__ import annotations

import asyncio

import pytest
from combined import in_pairs
from serving import LINES, STREAM, alone, call, check_mixed_requests, client

from export import SearchModel, export_search
from export.__main__ import main
from export.runtime import sessions
from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.opening import OneFile, open_onnx, warmed
from mlx_transformer.decoding.search import SharedSearch
from mlx_transformer.decoding.steps import Stopped


@pytest.fixture(scope="module", params=in_pairs(["ids", "text"], ["float32", "int8"]))
def file(request, text_folder, tmp_path_factory):
    kind, precision = request.param
    if kind == "text":
        pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    out = tmp_path_factory.mktemp("file") / "one.onnx"
    return export_search(text_folder / "model", out, precision=precision, text=kind == "text")


@pytest.fixture(scope="module")
def model(file):
    return SearchModel(file, threads=1)


@pytest.mark.fast("text int8")
def test_concurrent_requests_are_answered_as_one_by_one(model):
    check_mixed_requests(model, count=12, clients=6, served=OneFile(model))


def test_answers_are_those_of_translate(model):
    with client(OneFile(model)) as (http_, _):
        for options in (
            {"beam": 3, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": 9},
            {"sample": True, "seed": 4, "temperature": 1.3, "top_k": 30, "top_p": 0.9},
            {"overlong": "split", "min_new_tokens": 3, "max_new_tokens": 3},
        ):
            lines = [*LINES, *(["one two three. " * 20] if "overlong" in options else [])]
            answer = http_.post("/translate", json={"text": lines, **options})
            assert (answer.status_code, answer.json()) == (200, {"translations": model.translate(lines, **options)})
        found = http_.post("/translate", json={"text": LINES, "beam": 4, "n_best": 3}).json()["n_best"]
        expected = model.n_best(LINES, beam=4, n_best=3)
        assert [[t["text"] for t in best] for best in found] == [[t.text for t in best] for best in expected]
        scores = [t["score"] for best in found for t in best]
        assert scores == pytest.approx([t.score for best in expected for t in best], rel=1e-4)


def test_limits_are_those_of_a_folder(model):
    with client(OneFile(model), max_queue=8) as (http_, _):
        for body, status, part in (
            ({"text": "x", "beam": 65}, 400, "this server takes 1 to 64"),
            ({"text": "x", "max_new_tokens": 61}, 400, "at most 60"),
            ({"text": ["x"] * 7}, 413, "at most 6"),
            ({"text": "one two " * 60}, 400, "line 1"),
        ):
            answer = http_.post("/translate", json=body)
            assert (answer.status_code, part in answer.json()["error"]) == (status, True), answer.text
        answer = http_.post(STREAM, json={"text": "one"})
        assert (answer.status_code, "send the text to /translate" in answer.json()["error"]) == (400, True)
        assert "mlx_transformer_sentences_total 0.0" in http_.get("/metrics").text


def test_who_leaves_is_not_computed_for(model, monkeypatch):
    """A run ends in the midst of its loop."""
    monkeypatch.setattr(sessions, "POLL_SECONDS", 0.001)
    looks = []

    def stopped():
        looks.append(None)
        return len(looks) > 2

    rows = ["one two three"] * 8 if model.takes_text else [[5] * 20] * 8
    with pytest.raises(Stopped):
        OneFile(model).search(rows, share=SharedSearch(stopped=stopped), beam=8, min_new_tokens=50)
    assert model.translate(["one"]), "others go on"


def test_a_request_that_is_left_frees_the_server(model, monkeypatch):
    monkeypatch.setattr(sessions, "POLL_SECONDS", 0.001)

    async def scene():
        app = App(lambda: alone(OneFile(model)), Batcher(8, 0.0, 64))
        async with app.lifespan(None):
            while app.shared.loaded is None:
                await asyncio.sleep(0.01)
            gone = asyncio.Event()
            body = {"text": ["one two three"] * 8, "beam": 32, "min_new_tokens": 50}
            leaving = asyncio.create_task(call(app.asgi, "/translate", body, gone))
            while not app.batcher.running:
                await asyncio.sleep(0.001)
            gone.set()
            await leaving
            status, answer = await call(app.asgi, "/translate", {"text": "one"})
            assert (status, "translations" in answer.decode()) == (200, True)

    asyncio.run(scene())


def test_a_server_starts_with_a_file(file, tmp_path, capsys):
    served = warmed(open_onnx(file, threads=1, precision=None, verify=True))
    assert isinstance(served, OneFile)
    for name, options, message in (
        ("model.bin", [], "is a file; a model is a folder, or one .onnx file"),
        ("bad.onnx", [], "bad.onnx: ONNX Runtime can't open it"),
        ("bad.onnx", ["--precision", "int8"], "is of one precision; leave out --precision"),
    ):
        (tmp_path / name).write_text("x")
        assert main(["serve", str(tmp_path / name), "--port", "0", *options]) == 2
        assert message in capsys.readouterr().err
