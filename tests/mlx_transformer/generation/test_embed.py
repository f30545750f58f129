"""Vectors of texts, the same in both runtimes, in whatever company; and those of files."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_models import alone, write_text_model

from export import OnnxTransformer
from mlx_transformer import Transformer
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.inputs import ONE_AT_A_TIME, Sources
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.generation import line_files
from mlx_transformer.generation.embed import BATCH_TOKENS, MULTIPLE, Embedder, _batches
from mlx_transformer.generation.files import embed_lines
from mlx_transformer.generation.text_options import EmbedOptions
from mlx_transformer.system.errors import UserError

ENCODER = {"architecture": "encoder", "decoder_layers": 0, "max_positions": 40}
MADE = TextEmbedding(
    pooling=["mean", "max"], normalize=True, max_length=24, prompts={"query": "one: "}, default_prompt=None
)
WORDS = "one two three. four five six! größer 東京".split()
TEXTS = [" ".join(WORDS[: n % 9]) for n in range(30)] + ["", " ", "one two three. " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_text_model(tmp_path_factory.mktemp("embed"), **ENCODER)
    for name in ("model", "onnx"):
        (folder / name / EMBEDDING).write_text(MADE.json())
    return folder


@pytest.fixture(scope="module", params=["model", "onnx"])
def model(request, folder):
    return Transformer.load(folder / "model") if request.param == "model" else OnnxTransformer(folder / "onnx")


def test_every_vector_is_the_one_alone(model):
    together = model.embed(TEXTS)
    assert together.shape == (len(TEXTS), 2 * model.config.d_model)
    assert together.dtype == np.float32
    alone = np.stack([model.embed(text) for text in TEXTS])
    # MLX sums in another order where a product has more rows.
    most = 0 if isinstance(model, OnnxTransformer) else 1e-6
    np.testing.assert_allclose(together, alone, rtol=0, atol=most)
    np.testing.assert_allclose(model.embed(TEXTS[::-1])[::-1], together, rtol=0, atol=most)
    assert model.embed([]).shape == (0, 2 * model.config.d_model)


@pytest.mark.parametrize("token_types", [0, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 37, 39, 40])
def test_a_row_by_itself_is_padded_as_one_of_many(token_types, length):
    config = replace(alone("untied", "encoder"), max_positions=40, token_types=token_types, pad_id=1)
    embedder = Embedder(config, None, MADE, lambda ids, mask: None)
    for row in (list(range(length)), np.arange(length), tuple(range(length))):
        arrays, mask = Sources.of(config, ids=[row]).padded(MULTIPLE, config.max_positions)
        own_arrays, own_mask = embedder._alone([row])
        assert own_arrays.keys() == arrays.keys()
        for own, one in [(own_mask, mask), *((own_arrays[name], arrays[name]) for name in arrays)]:
            assert own.dtype == one.dtype
            np.testing.assert_array_equal(own, one)


def test_mlx_computes_one_pass_after_the_other(folder):
    """Its own threads share them; with two calls at a time, last bits could change."""
    model = Transformer.load(folder / "model")
    assert model.passes is ONE_AT_A_TIME
    by, encode = set(), model.token_vectors
    model.token_vectors = lambda *of: (by.add(threading.get_ident()), encode(*of))[1]
    model.embed(TEXTS)
    assert by == {threading.get_ident()}


def test_both_runtimes_give_the_same(folder):
    mlx, onnx = Transformer.load(folder / "model"), OnnxTransformer(folder / "onnx")
    np.testing.assert_allclose(mlx.embed(TEXTS), onnx.embed(TEXTS), atol=2e-6)


def test_it_is_the_encoder_s_output_pooled(model):
    text = "one two three. four"
    ids = model.tokenizer.encode(text)
    rows = np.array(model.encode([ids]))[0].astype(np.float64)
    expected = np.concatenate([rows.mean(axis=0), rows.max(axis=0)])
    np.testing.assert_allclose(model.embed(text), expected / np.linalg.norm(expected), atol=1e-6)
    plain = model.embed(text, pooling="last", normalize=False)
    np.testing.assert_allclose(plain, rows[-1], atol=1e-6)


def test_prompts(model):
    np.testing.assert_array_equal(model.embed("two", prompt="one: "), model.embed("one: two"))
    np.testing.assert_array_equal(model.embed("two", prompt_name="query"), model.embed("one: two"))
    assert not np.array_equal(model.embed("two"), model.embed("one: two"))


def test_fewer_dimensions(model):
    whole, cut = model.embed(TEXTS), model.embed(TEXTS, dimensions=5)
    np.testing.assert_allclose(cut, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)


def test_of_a_text_that_is_too_long_the_beginning_is_read(model):
    long, numbers = "one two three. " * 9, []
    embedder = model.embedder()
    (row,) = embedder.rows([long], first_line=7, on_overlong=numbers.append)
    whole = model.tokenizer.encode(long)
    assert (row, numbers) == ([*whole[:23], whole[-1]], [7])
    np.testing.assert_array_equal(model.embed(long), embedder.vectors([row])[0])


def test_rows_of_one_padded_length_go_together():
    lengths = np.array([1, 2, 9, 4, 5, 40, 39])
    parts = [sorted(lengths[part].tolist()) for part in _batches(lengths, 40)]
    assert parts == [[39, 40], [9], [5], [1, 2, 4]]
    many = _batches(np.full(BATCH_TOKENS, 8), 40)
    assert {len(part) for part in many} == {BATCH_TOKENS // 8}
    assert sorted(np.concatenate(many).tolist()) == list(range(BATCH_TOKENS))
    assert {len(part) for part in _batches(np.full(BATCH_TOKENS, 8), 40, at_once=4)} == {BATCH_TOKENS // 4 // 8}


def test_text_is_lower_cased_and_stripped_where_the_folder_says_so(folder):
    model = Transformer.load(folder / "model")
    model.text_embedding = replace(MADE, lower_case=True)
    np.testing.assert_array_equal(model.embed("  ONE Two\n"), model.embed("one two"))


def test_a_prompt_that_does_not_count(folder):
    model = Transformer.load(folder / "model")
    model.text_embedding = replace(MADE, pooling=["mean"], normalize=False, prompt_counts=False)
    found = model.embed("two", prompt="one: ")
    rows = np.array(model.encode([model.tokenizer.encode("one: two")]))[0]
    skipped = len(model.tokenizer.encode("one:")) - 1
    np.testing.assert_allclose(found, rows[skipped:].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 65}, "dimensions=65: the model's vectors have 64"),
        ({"dimensions": 0}, "dimensions=0 must be a whole number of at least 1"),
        ({"pooling": "median"}, "pooling='median' is not one of cls, max"),
        ({"prompt_name": "title"}, "prompt_name='title' is none of the model's prompts: it has query"),
        ({"prompt": "a", "prompt_name": "query"}, "prompt and prompt_name: give one of them"),
    ],
)
def test_wrong_options(model, options, message):
    with pytest.raises(UserError, match=message):
        model.embed("one", **options)


def test_a_model_that_says_nothing_of_vectors(tmp_path):
    folder = write_text_model(tmp_path, **ENCODER)
    model = Transformer.load(folder / "model")
    with pytest.raises(UserError, match="doesn't say how a text's vector is made: give pooling=mean"):
        model.embed("one")
    assert model.embed("one", pooling="mean").shape == (32,)
    model.tokenizer = None
    with pytest.raises(UserError, match=r"has no tokenizer\.json, so it takes only ids"):
        model.embed("one", pooling="mean")


def test_another_architecture(tmp_path):
    with pytest.raises(UserError, match="a text's vector needs an encoder"):
        Transformer.load(write_text_model(tmp_path) / "model").embed("one", pooling="mean")


def test_rows_of_ids(model):
    embedder = model.embedder()
    rows = [model.tokenizer.encode(text) for text in TEXTS[:20]]
    np.testing.assert_array_equal(embedder.vectors(rows, of_text=False), model.embed(TEXTS[:20]))
    with pytest.raises(UserError, match="rows: 41 tokens, the model takes at most 40"):
        embedder.vectors([[4] * 41])
    for rows, message in (
        ([[999]], "row 0, position 0: id 999 is outside the vocabulary"),
        ([[-1]], "row 0, position 0: id -1 is outside the vocabulary"),
        ([[]], "rows row 0 is empty"),
        ([[1.5]], "rows row 0: ids must be whole numbers"),
        ({1}, "rows: expected a list of lists of ids"),
    ):
        with pytest.raises(UserError, match=message):
            embedder.vectors(rows)


def test_a_saved_model_keeps_how_vectors_are_made(folder, tmp_path):
    model = Transformer.load(folder / "model")
    again = Transformer.load(model.save(tmp_path / "again"))
    np.testing.assert_array_equal(again.embed(TEXTS), model.embed(TEXTS))


def write_vectors(model, input=None, output=None, options=None, **how):
    line_files.write_lines(embed_lines(model, options or EmbedOptions(), output), input, output, **how)


def text_file(folder: Path) -> Path:
    path = folder / "lines"
    path.write_text("".join(f"{text.strip()}\n" for text in TEXTS), encoding="utf-8")
    return path


def test_a_file_becomes_json_lines_or_an_array(folder, tmp_path, capsys):
    model, lines = OnnxTransformer(folder / "onnx"), text_file(tmp_path)
    write_vectors(model, lines, tmp_path / "out.jsonl", EmbedOptions(dimensions=6))
    write_vectors(model, lines, tmp_path / "out.npy", EmbedOptions(dimensions=6))
    expected = model.embed([text.strip() for text in TEXTS], dimensions=6)
    read = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [each["text"] for each in read] == [text.strip() for text in TEXTS]
    np.testing.assert_array_equal(np.array([each["embedding"] for each in read], np.float32), expected)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    told = f"{lines}: 1 of 33 lines, the first of them line 33: longer than 24 tokens, cut there"
    assert told in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", ["out.jsonl", "out.npy"])
def test_what_was_interrupted_is_continued_with_the_same_bytes(folder, tmp_path, name, monkeypatch):
    monkeypatch.setattr(line_files, "PART_LINES", 7)
    model, lines, out = OnnxTransformer(folder / "onnx"), text_file(tmp_path), tmp_path / name
    write_vectors(model, lines, out)
    whole = out.read_bytes()
    out.unlink()
    calls = []

    def dying(self, rows, *others, **named):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return vectors(self, rows, *others, **named)

    vectors = Embedder.vectors
    monkeypatch.setattr(Embedder, "vectors", dying)
    with pytest.raises(KeyboardInterrupt, match="14 lines are done: go on with --resume"):
        write_vectors(model, lines, out)
    assert not out.exists()
    with pytest.raises(UserError, match="holds what an interrupted run has done; go on with --resume"):
        write_vectors(model, lines, out)
    with pytest.raises(UserError, match="dimensions=None before, now 3"):
        write_vectors(model, lines, out, EmbedOptions(dimensions=3), resume=True)
    write_vectors(model, lines, out, resume=True)
    assert out.read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"lines", name}
    assert calls[:3] == [7, 7, 7]
    assert sum(calls) == 7 + 33


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ["a"], "input": Path("x")}, "text is given twice"),
        ({"text": ["a"], "resume": True}, "resume=True continues a file: it needs input and output"),
        ({"input": Path("missing"), "output": Path("x.npy")}, r"^missing: cannot be read \(no such file\)"),
        ({"output": Path("x.csv")}, r"^x.csv: embed writes no .csv; give a name that ends in .jsonl, .* or .npy$"),
        ({"output": Path("x.npz"), "text": ["a"]}, "^x.npz: embed writes no .npz"),
        (
            {"output": Path("x.npy")},
            "x.npy: an array's header has its number of rows: give a file as input, or write JSON",
        ),
    ],
)
def test_what_cannot_be(folder, arguments, message):
    with pytest.raises(UserError, match=message):
        write_vectors(OnnxTransformer(folder / "onnx"), **arguments)


def test_lines_that_are_given_become_an_array_too(folder, tmp_path):
    model = OnnxTransformer(folder / "onnx")
    for name in ("o.npy", "o.NPY"):
        write_vectors(model, None, tmp_path / name, text=["one", "two three."])
        np.testing.assert_array_equal(np.load(tmp_path / name), model.embed(["one", "two three."]))


def test_standard_input_becomes_lines_on_standard_output(folder, capsysbinary, monkeypatch, tmp_path):
    with open(text_file(tmp_path), "rb") as file:
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": file}))
        write_vectors(OnnxTransformer(folder / "onnx"))
    assert len(capsysbinary.readouterr().out.splitlines()) == len(TEXTS)
