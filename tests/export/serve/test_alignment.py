"""`"alignment": true`: the links of words, as `translate --alignment --json` has them, of a folder and of one file."""

import pytest
from combined import thinned
from copying_model import write_copying_model
from serving import STREAM, client, pairs

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.serve.opening import OneFile

LINES = ["one two  three.", "", "four", "seven eight nine ten"]
LINKS = [[[0, 0], [1, 1], [2, 2]], [], [[0, 0]], [[0, 0], [1, 1], [2, 2], [3, 3]]]
MODELS = ["cpu", "portable", "int4", "file"]


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    return write_copying_model(tmp_path_factory.mktemp("copying"))


@pytest.fixture(scope="module", params=thinned(MODELS, 3))
def model(request, copying, tmp_path_factory):
    """As `translate` has it, and as the server has it."""
    out = tmp_path_factory.mktemp(request.param) / "model.onnx"
    if request.param == "file":
        file = SearchModel(export_search(copying / "model", out, attention=True), threads=1)
        return file, OneFile(file)
    target, precision = (request.param, "float32") if request.param != "int4" else ("portable", "int4")
    folder = out.with_suffix("")
    export_onnx(copying / "model", folder, target=target, precision=precision, attention=True, accept_loss=True)
    onnx = OnnxTransformer(folder, threads=1)
    return onnx, onnx


def links(translation):
    return [[*link] for link in translation.alignment.links] if translation.alignment else []


@pytest.mark.fast("cpu")
def test_links_are_those_of_translate(model):
    translated, served = model
    with client(served) as (http_, _):
        answer = http_.post("/translate", json={"text": LINES, "alignment": True})
        assert (answer.status_code, answer.json().keys()) == (200, {"translations", "alignment"})
        expected = translated.translator.n_best(LINES, aligned=True)
        assert answer.json()["translations"] == [best[0].text for best in expected]
        assert answer.json()["alignment"] == [links(best[0]) for best in expected]
        plain = http_.post("/translate", json={"text": LINES, "alignment": False}).json()
        assert plain == {"translations": answer.json()["translations"]}


def test_tags_of_html_follow_the_links(model):
    _, served = model
    with client(pairs(en_de=served)) as (http_, _):
        html = "<p>one <b>two</b> <code>x</code> three.</p>"
        body = {"q": html, "source": "en", "target": "de", "format": "html"}
        assert http_.post("/translate", json=body).json() == {"translatedText": html}


def test_each_of_the_best_has_its_own_and_pieces_count_on(model):
    translated, served = model
    with client(served) as (http_, _):
        options = {"beam": 2, "n_best": 2}
        answer = http_.post("/translate", json={"text": LINES, "alignment": True, **options}).json()
        expected = translated.translator.n_best(LINES, aligned=True, **options)
        assert [[t["text"] for t in best] for best in answer["n_best"]] == [[t.text for t in b] for b in expected]
        assert [[t["alignment"] for t in best] for best in answer["n_best"]] == [
            [links(t) for t in best] for best in expected
        ]
        assert answer["alignment"] == [links(best[0]) for best in expected]
        long = " ".join(["one two."] * 18)  # more tokens than there are positions
        split = {"text": long, "overlong": "split", "alignment": True}
        [found] = http_.post("/translate", json=split).json()["alignment"]
        assert found == links(translated.translator.n_best([long], overlong="split", aligned=True)[0][0])
        assert len(found) > 30


def test_a_copy_is_aligned_along_the_diagonal(copying, tmp_path):
    onnx = OnnxTransformer(export_onnx(copying / "model", tmp_path / "onnx", attention=True), threads=1)
    with client(onnx) as (http_, _):
        assert http_.post("/translate", json={"text": LINES, "alignment": True}).json()["alignment"] == LINKS


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_model_without_says_what_to_do(kind, copying, tmp_path):
    if kind == "folder":
        served = OnnxTransformer(copying / "onnx", threads=1)
    else:
        served = OneFile(SearchModel(export_search(copying / "model", tmp_path / "one.onnx"), threads=1))
    with client(served) as (http_, _):
        answer = http_.post("/translate", json={"text": "one", "alignment": True})
        assert answer.status_code == 400
        assert answer.json()["error"].endswith("export it with --attention, for a folder or a file")
        assert http_.post("/translate", json={"text": "one", "alignment": False}).status_code == 200


def test_what_a_request_may_say(model):
    _, served = model
    with client(served) as (http_, _):
        wrong = http_.post("/translate", json={"text": "one", "alignment": 1})
        assert (wrong.status_code, wrong.json()) == (400, {"error": "alignment: must be true or false"})
        streamed = http_.post(STREAM, json={"text": "one", "alignment": True})
        assert streamed.status_code == 400
        assert "send the text to /translate" in streamed.json()["error"]
