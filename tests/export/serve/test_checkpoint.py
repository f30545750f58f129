"""A checkpoint behind the endpoints: MLX computes what is answered, in one thread."""

from __future__ import annotations

import json

import pytest
from serving import LINES, STREAM
from starlette.testclient import TestClient
from waiting import until

from export.serve import serve
from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.models import Named
from export.serve.opening import check, load_all
from export.settings import ServeSettings
from mlx_transformer.commands.models import open_model
from mlx_transformer.runtime import load
from mlx_transformer.system.errors import UserError


@pytest.fixture(scope="module")
def http_(text_folder):
    named = Named.of([f"en-de={text_folder / 'model'}", f"de-en={text_folder / 'onnx'}"])
    settings = ServeSettings()
    app = App(lambda: load_all(named, settings, open_model), Batcher(8, 0.001, 64), settings)
    with TestClient(app.asgi, raise_server_exceptions=False) as found:
        until(lambda: found.get("/health").status_code == 200)
        yield found


@pytest.fixture(scope="module")
def model(text_folder):
    return load(text_folder / "model")[0]


@pytest.mark.fast("options1")
@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sample": True, "seed": 4, "top_k": 30}])
def test_answers_are_those_of_translate(http_, model, options):
    answer = http_.post("/translate", json={"text": LINES, "source": "en", **options})
    assert answer.json() == {"translations": model.translate(LINES, **options)}


def test_streams_one_after_the_other(http_, model):
    for line in LINES[:3]:
        text = http_.post(STREAM, json={"text": line, "source": "en"}).text
        done = json.loads(text.split("event: done\ndata: ")[1])
        assert done == {"text": model.translate(line)}
    answer = http_.post(STREAM, json={"text": "x", "source": "en", "beam": 2})
    assert (answer.status_code, "beam=1" in answer.json()["error"]) == (400, True)


def test_both_runtimes_in_one_server(http_, text_model):
    answer = http_.post("/translate", json={"q": "one two", "source": "de", "target": "en"})
    assert answer.json() == {"translatedText": text_model.translate("one two")}
    answer = http_.post("/translate", json={"text": "one", "source": "en", "alignment": True})
    assert (answer.status_code, "returns no attention" in answer.json()["error"]) == (400, True)


def test_what_is_refused(text_folder):
    checkpoint = text_folder / "model"
    with pytest.raises(UserError, match="leave out --workers"):
        serve(checkpoint, open_model, workers=2, port=0)
    with pytest.raises(UserError, match="is a checkpoint, and here an ONNX folder is needed"):
        serve(checkpoint, port=0)
    with pytest.raises(UserError, match="threads is for ONNX folders"):
        load_all(Named.of([checkpoint]), ServeSettings(threads=2), open_model)
    check(checkpoint, ServeSettings(), open_model)
