"""Classes of texts, and documents in the order of a query, in the forms of those whose clients ask for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from head_models import head_model, reranker
from serving import client

from export import OnnxTransformer, export_onnx
from export.serve.models import Named

WORDS = "a good film it was bad so not".split()
QUERY, DOCUMENTS = "good film", ["it was bad", "a good film", "not so bad"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("labels"), {}
    made = {"ranks": reranker(folder / "ranks"), "tells": head_model("bert-classes", folder / "tells")}
    for name, checkpoint in made.items():
        export_onnx(checkpoint, folder / name / "onnx")
        found[name] = OnnxTransformer(folder / name / "onnx", threads=1)
    return found


@pytest.fixture(scope="module")
def shared(models, text_model):
    names = dict(zip(Named.of(["ranks=a", "tells=b", "en-de=c"]), [*models.values(), text_model], strict=True))
    with client(names, max_queue=1024) as (http_, _):
        yield http_


def expected(models, **options):
    return [
        (each.index, pytest.approx(each.relevance_score))
        for each in models["ranks"].rerank(QUERY, DOCUMENTS, **options)
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_by_their_relevance_in_cohere_s_form(shared, models, path):
    body = {"model": "ranks", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answer = shared.post(path, json=body)
    assert answer.status_code == 200, answer.text
    values = answer.json()
    assert values["model"] == "ranks"
    assert [(each["index"], each["relevance_score"]) for each in values["results"]] == expected(models, top_n=2)
    assert [each["document"]["text"] for each in values["results"]] == [
        DOCUMENTS[i] for i, _ in expected(models, top_n=2)
    ]
    jina = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}  # of the only one with one class
    assert "document" not in shared.post(path, json=jina).json()["results"][0]


def test_documents_by_their_relevance_in_tei_s_form(shared, models):
    answer = shared.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True, "truncate": True})
    found = answer.json()
    assert [(each["index"], each["score"]) for each in found] == expected(models)
    assert [each["text"] for each in found] == [DOCUMENTS[each["index"]] for each in found]
    raw = shared.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert [each["index"] for each in raw] == [each["index"] for each in found]
    assert max(each["score"] for each in raw) != found[0]["score"]


def test_classes_of_texts_and_pairs(shared, models):
    def said(text):
        return [{"label": e.label, "score": pytest.approx(e.probability)} for e in models["tells"].classify(text)]

    answer = shared.post("/predict", json={"model": "tells", "inputs": "a good film"})
    assert answer.json() == said("a good film")
    answer = shared.post("/predict", json={"model": "tells", "inputs": ["not", ["it was bad"], ["so", "it was bad"]]})
    assert answer.json() == [said("not"), said("it was bad"), said(("so", "it was bad"))]


def test_twenty_clients_at_once_get_what_each_would_alone(shared, models):
    random = Random(0)
    asked = [[" ".join(random.choices(WORDS, k=random.randint(1, 12))) for _ in range(4)] for _ in range(30)]

    def ask(texts):
        body = {"model": "ranks", "query": texts[0], "documents": texts}
        return shared.post("/rerank", json=body).json()["results"]

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, asked))
    for texts, results in zip(asked, found, strict=True):
        alone = {each.index: each.relevance_score for each in models["ranks"].rerank(texts[0], texts)}
        assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        ("/rerank", {"model": "tells"}, 400, "tells: rerank needs a head with one class; its head has 3"),
        ("/rerank", {"model": "en-de"}, 400, "model: en-de is a translator; send its text to /translate"),
        ("/rerank", {"model": "x"}, 404, "model: there is no 'x'"),
        ("/rerank", {"query": 3}, 400, '"query" and "documents" are needed'),
        ("/rerank", {"documents": []}, 400, "documents: must be a list of at least one text"),
        ("/rerank", {"documents": ["a", 3]}, 400, "documents: must be a string or a list of strings"),
        ("/rerank", {"documents": ["a"] * 600}, 413, "documents: 600 texts, at most 512; send it in parts"),
        ("/rerank", {"top_n": 0}, 400, "top_n=0 must be a whole number of at least 1"),
        ("/rerank", {"texts": ["a"]}, 400, '"query" and "documents" are needed'),
        ("/rerank", {"truncate": False}, 400, "truncate: texts that are too long are cut; leave it out"),
        ("/rerank", {"stream": True}, 400, "'stream': no such setting; there are model, query"),
        ("/predict", {}, 400, "model: several fit, say which: ranks, tells"),
        ("/predict", {"model": "tells", "inputs": [["a", "b", "c"]]}, 400, "inputs: each must be a text, or a list of"),
        ("/predict", {"model": "tells", "inputs": []}, 400, "inputs: must hold at least one text"),
        ("/predict", {"model": "tells", "raw_scores": "yes"}, 400, "raw_scores: must be true or false"),
    ],
)
def test_what_is_refused(shared, path, changes, status, message):
    body = {"query": "a", "documents": ["b"]} if path == "/rerank" else {"inputs": "a"}
    answer = shared.post(path, json={**body, **changes})
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_a_classifier_makes_no_vectors(shared):
    answer = shared.post("/v1/embeddings", json={"model": "tells", "input": "a"})
    assert "model: tells tells classes; send its texts to /predict" in answer.json()["error"]["message"]
