"""Encoders behind the server: vectors, classes and relevance, each as the model gives it alone, whoever else asks."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from head_models import head_model, reranker
from serving import client
from small_models import write_text_model

from export import OnnxTransformer, export_onnx
from export.serve.models import Named
from mlx_transformer import Transformer
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.tensors import write_tensors

PATH = "/v1/embeddings"
WORDS = "one two three. four five six! größer 東京".split()
MADE = TextEmbedding(normalize=True, max_length=30, prompts={"query": "one: "})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write_text_model(tmp_path_factory.mktemp("encoder"), architecture="encoder", decoder_layers=0)
    (folder / "onnx" / EMBEDDING).write_text(MADE.json())
    return OnnxTransformer(folder / "onnx", threads=2)


@pytest.fixture(scope="module")
def shared(encoder, text_model):
    models = dict(zip(Named.of(["mini=a", "en-de=b"]), [encoder, text_model], strict=True))
    with client(models, max_queue=1024) as (http_, _):
        yield http_


def vectors(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)


def test_one_text_and_several(shared, encoder):
    answer = shared.post(PATH, json={"model": "mini", "input": "one two"})
    values = answer.json()
    assert (values["object"], values["model"], values["data"][0]["object"]) == ("list", "mini", "embedding")
    tokens = len(encoder.tokenizer.encode("one two"))
    assert values["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    np.testing.assert_array_equal(vectors(answer), encoder.embed(["one two"]))
    texts = ["", "two", "one two three. " * 9]
    answer = shared.post(PATH, json={"model": "mini", "input": texts})
    assert [each["index"] for each in answer.json()["data"]] == [0, 1, 2]
    np.testing.assert_array_equal(vectors(answer), encoder.embed(texts))


def test_ids_in_place_of_text(shared, encoder):
    rows = encoder.tokenizer.encode_batch(["one", "two three."])
    expected = encoder.embed(["one", "two three."])
    np.testing.assert_array_equal(vectors(shared.post(PATH, json={"model": "mini", "input": rows})), expected)
    np.testing.assert_array_equal(vectors(shared.post(PATH, json={"model": "mini", "input": rows[1]})), expected[1:])


def test_base64_and_fewer_dimensions(shared, encoder):
    body = {"model": "mini", "input": ["one", "two"], "encoding_format": "base64", "dimensions": 7, "user": "me"}
    data = shared.post(PATH, json=body).json()["data"]
    found = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data])
    np.testing.assert_array_equal(found, encoder.embed(["one", "two"], dimensions=7))


def test_a_folder_of_fewer_dimensions(encoder, tmp_path):
    """Exported with the first 16: what the whole model gives of them, and no more of them can be had."""
    checkpoint = tmp_path / "model"
    write_text_model(tmp_path, architecture="encoder", decoder_layers=0)
    (checkpoint / EMBEDDING).write_text(MADE.json())
    cut = OnnxTransformer(export_onnx(checkpoint, tmp_path / "cut", dimensions=16), threads=1)
    texts = ["one", "two three. " * 20, ""]
    with client(dict(zip(Named.of(["cut=a"]), [cut], strict=True))) as (http_, _):
        found = vectors(http_.post(PATH, json={"model": "cut", "input": texts}))
        fewer = vectors(http_.post(PATH, json={"model": "cut", "input": texts, "dimensions": 7}))
        more = http_.post(PATH, json={"model": "cut", "input": texts, "dimensions": 17})
    np.testing.assert_array_equal(found, cut.embed(texts))
    np.testing.assert_allclose(found, encoder.embed(texts, dimensions=16), rtol=0, atol=3e-6)
    np.testing.assert_allclose(fewer, encoder.embed(texts, dimensions=7), rtol=0, atol=3e-6)
    assert more.status_code == 400
    assert "dimensions=17: the model's vectors have 16" in more.text


@pytest.fixture(scope="module")
def three_kinds(tmp_path_factory):
    """A model that makes weights and vectors of tokens too, in both runtimes."""
    folder = tmp_path_factory.mktemp("kinds")
    write_text_model(folder, architecture="encoder", decoder_layers=0)
    random = np.random.default_rng(3)
    shapes = TextEmbedding(sparse=True, multi=5).shapes(32)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    made = TextEmbedding(pooling=("cls",), normalize=True, max_length=30, sparse=True, multi=5, weights=weights)
    (folder / "model" / EMBEDDING).write_text(made.json())
    write_tensors(folder / "model" / DENSE, weights)
    export_onnx(folder / "model", folder / "graphs")
    return {"folder": OnnxTransformer(folder / "graphs", threads=1), "checkpoint": Transformer.load(folder / "model")}


@pytest.mark.parametrize("form", ["float", "base64"])
def test_weights_and_vectors_of_tokens(three_kinds, form):
    texts = ["one two", "größer & 東京", "one two three. " * 9, ""]
    with client(dict(zip(Named.of(["folder=a", "checkpoint=b"]), three_kinds.values(), strict=True))) as (http_, _):
        for name, model in three_kinds.items():
            body = {"model": name, "input": texts, "encoding_format": form}
            plain, dense = (http_.post(PATH, json={**body, **more}).json() for more in ({}, {"kind": "dense"}))
            assert plain == dense
            found = http_.post(PATH, json={**body, "kind": "sparse"}).json()["data"]
            weights = [{int(id): np.float32(x) for id, x in each["weights"].items()} for each in found]
            assert weights == model.embed(texts, kind="sparse")
            assert any(weights)
            several = http_.post(PATH, json={**body, "kind": "multi"}).json()["data"]
            for each, expected in zip(several, model.embed(texts, kind="multi"), strict=True):
                np.testing.assert_array_equal(np.array(each["embeddings"], np.float32).reshape(-1, 5), expected)
            keys = {"object", "index", "embedding"}
            assert [(set(each), each["embedding"]) for each in found] == [(keys | {"weights"}, None)] * 4
            assert [(set(each), each["embedding"]) for each in several] == [(keys | {"embeddings"}, None)] * 4
            ids = model.tokenizer.encode("one two")
            alone = [http_.post(PATH, json={**body, "input": x, "kind": "sparse"}).json() for x in (ids, "one two")]
            assert alone[0] == alone[1]
            assert alone[0]["usage"]["total_tokens"] == len(ids)
            refused = http_.post(PATH, json={**body, "kind": "multi", "dimensions": 3})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith("dimensions: is of a text's one vector (kind=dense)")


def test_prompts(shared, encoder):
    asked = {"model": "mini", "input": "two", "prompt_name": "query"}
    np.testing.assert_array_equal(vectors(shared.post(PATH, json=asked)), encoder.embed(["one: two"]))


def test_twenty_clients_at_once_get_what_each_would_alone(shared, encoder):
    random = Random(0)
    asked = [[" ".join(random.choices(WORDS, k=random.randint(0, 20))) for _ in range(5)] for _ in range(60)]

    def ask(number: int) -> np.ndarray:
        more = {"dimensions": 9} if number % 7 == 0 else {}
        return vectors(shared.post(PATH, json={"model": "mini", "input": asked[number], **more}))

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(len(asked))))
    for number, (texts, rows) in enumerate(zip(asked, found, strict=True)):
        more = {"dimensions": 9} if number % 7 == 0 else {}
        np.testing.assert_array_equal(rows, np.stack([encoder.embed(text, **more) for text in texts]))


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "gpt"}, 404, "model: there is no 'gpt'; there are mini, en-de"),
        ({"model": "en-de"}, 400, "model: en-de is a translator; send its text to /translate"),
        ({"input": []}, 400, "input: must hold at least one text, or one row of ids"),
        ({"input": 3}, 400, "input: must be a string or a list of strings"),
        ({"input": ["a", 3]}, 400, "input: must be a string or a list of strings"),
        ({"input": [[]]}, 400, "input: a row of ids must be a list of at least one whole number"),
        ({"input": [[4, 999]]}, 400, "input row 0, position 1: id 999 is outside the vocabulary"),
        (
            {"input": [[4], [5, 10**30]]},
            400,
            "input row 1, position 1: id of more than 64 bits is outside the vocabulary",
        ),
        ({"input": [2**63, -1]}, 400, "input row 0, position 0: id 9223372036854775808 is outside the vocabulary"),
        ({"input": [4] * 31}, 400, "input: 31 tokens, the model takes at most 30"),
        ({"input": ["a"] * 600}, 413, "input: 600 texts, at most 512; send it in parts"),
        ({"dimensions": 33}, 400, "dimensions=33: the model's vectors have 32"),
        ({"kind": "sparse"}, 400, "kind=sparse: the model has no such head; its texts have one vector each"),
        ({"kind": "words"}, 400, "kind='words' is not one of dense, sparse, multi"),
        ({"kind": ["dense"]}, 400, "kind=['dense'] is not one of dense, sparse, multi"),
        ({"dimensions": "all"}, 400, "dimensions='all' must be a whole number"),
        ({"encoding_format": "float16"}, 400, "encoding_format: must be float or base64"),
        ({"prompt_name": "title"}, 400, "prompt_name='title' is none of the model's prompts: it has query"),
        ({"stream": True}, 400, "'stream': no such setting; there are model, input, encoding_format, dimensions, kind"),
    ],
)
def test_what_is_refused_is_said_in_openai_s_form(shared, changes, status, message):
    answer = shared.post(PATH, json={"model": "mini", "input": "one", **changes})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_what_is_missing(shared):
    answer = shared.post(PATH, json={"model": "mini"})
    assert '"model" and "input" are needed' in answer.json()["error"]["message"]


def test_an_encoder_completes_nothing(shared):
    answer = shared.post("/v1/completions", json={"model": "mini", "prompt": "one"})
    assert answer.json()["error"]["message"] == "model: mini makes vectors; send its texts to /v1/embeddings"
    assert [each["id"] for each in shared.get("/v1/models").json()["data"]] == ["mini", "en-de"]


FILM_WORDS = "a good film it was bad so not".split()
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
def heads(models, text_model):
    names = dict(zip(Named.of(["ranks=a", "tells=b", "en-de=c"]), [*models.values(), text_model], strict=True))
    with client(names, max_queue=1024) as (http_, _):
        yield http_


def expected(models, **options):
    return [
        (each.index, pytest.approx(each.relevance_score))
        for each in models["ranks"].rerank(QUERY, DOCUMENTS, **options)
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_by_their_relevance_in_cohere_s_form(heads, models, path):
    body = {"model": "ranks", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answer = heads.post(path, json=body)
    assert answer.status_code == 200, answer.text
    values = answer.json()
    assert values["model"] == "ranks"
    assert [(each["index"], each["relevance_score"]) for each in values["results"]] == expected(models, top_n=2)
    assert [each["document"]["text"] for each in values["results"]] == [
        DOCUMENTS[i] for i, _ in expected(models, top_n=2)
    ]
    jina = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}  # of the only one with one class
    assert "document" not in heads.post(path, json=jina).json()["results"][0]


def test_documents_by_their_relevance_in_tei_s_form(heads, models):
    answer = heads.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True, "truncate": True})
    found = answer.json()
    assert [(each["index"], each["score"]) for each in found] == expected(models)
    assert [each["text"] for each in found] == [DOCUMENTS[each["index"]] for each in found]
    raw = heads.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert [each["index"] for each in raw] == [each["index"] for each in found]
    assert max(each["score"] for each in raw) != found[0]["score"]


def test_classes_of_texts_and_pairs(heads, models):
    def said(text):
        return [{"label": e.label, "score": pytest.approx(e.probability)} for e in models["tells"].classify(text)]

    answer = heads.post("/predict", json={"model": "tells", "inputs": "a good film"})
    assert answer.json() == said("a good film")
    answer = heads.post("/predict", json={"model": "tells", "inputs": ["not", ["it was bad"], ["so", "it was bad"]]})
    assert answer.json() == [said("not"), said("it was bad"), said(("so", "it was bad"))]


def test_twenty_clients_at_once_get_the_classes_each_would_alone(heads, models):
    random = Random(0)
    asked = [[" ".join(random.choices(FILM_WORDS, k=random.randint(1, 12))) for _ in range(4)] for _ in range(30)]

    def ask(texts):
        body = {"model": "ranks", "query": texts[0], "documents": texts}
        return heads.post("/rerank", json=body).json()["results"]

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
def test_wrong_fields_of_heads_are_refused(heads, path, changes, status, message):
    body = {"query": "a", "documents": ["b"]} if path == "/rerank" else {"inputs": "a"}
    answer = heads.post(path, json={**body, **changes})
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_a_classifier_makes_no_vectors(heads):
    answer = heads.post("/v1/embeddings", json={"model": "tells", "input": "a"})
    assert "model: tells tells classes; send its texts to /predict" in answer.json()["error"]["message"]
