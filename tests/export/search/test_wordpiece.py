"""Text in, vector out: a graph gives the ids of the tokenizer for every line, and the vectors of the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from combined import SLOW, thinned
from golden_tokens import golden
from hard_text import hard_lines
from numpy.typing import NDArray
from word_pieces import MOST, tokenizer, write_bert, write_encoder

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.graph.builder import GraphBuilder
from export.interface import GRAPHS, TEXT_VECTORS, Request
from export.runtime.sessions import Session
from export.search import open_file
from export.search.runtime import EXTENSIONS
from export.search.wordpiece import WordPieceOps
from export.serve.opening import warmed
from mlx_transformer import cli
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

NASTY = [
    "",
    " ",
    "[CLS] a [SEP] [MASK]",
    "a\0b\x7f\ufffd",
    "\u3000\u2009\u200b",
    "日本語の、テスト。",
    "Ünaffáble İstanbul ΣΊΣΥΦΟΣ straße ŉ",
    "e\u0301\u0327 \u0327\u0301e",
    "각 각 \u1100\u1161\u11a8",
    "don't $5.00! a--b ... ##s #",
    "\U0010ffff\ue000\u0378\U000e0001",
    "x" * 100,
    "x" * 101,
    "ab " * 99,
    "🎉🎉 wow 👍🏽",
]


def encoder_of(text: str, most: int = MOST, prompt: str = "") -> Callable[[list[str]], list[list[int]]]:
    """Texts -> rows of ids, by the graph."""
    g = GraphBuilder("encode")
    found = WordPieceOps(text, most, prompt).encode(g.op, g.builder.input("text", ir.DataType.STRING, ["lines"]))
    for name, value in zip(("ids", "mask"), found, strict=True):
        value.shape, value.type = ir.Shape([None, None]), ir.TensorType(ir.DataType.INT64)
        g.builder.add_output(value, name)
    options = ort.SessionOptions()
    if find_spec(EXTENSIONS):
        options.register_custom_ops_library(import_module(EXTENSIONS).get_library_path())
    data = ir.to_proto(g.model()).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> list[list[int]]:
        ids, mask = (np.asarray(found) for found in session.run(None, {"text": np.array(texts, object)}))
        assert not ids[mask == 0].any()  # padding, which is 0
        return [row[real == 1].tolist() for row, real in zip(ids, mask, strict=True)]

    return encode


def expected(text: str, lines: list[str], most: int = MOST) -> list[list[int]]:
    rows = Tokenizer(text).encode_batch(lines)
    return [row if len(row) <= most else [*row[: most - 1], row[-1]] for row in rows]


FORMS: dict[str, dict[str, Any]] = {
    "uncased": {},
    "cased": {"do_lower_case": False},
    "cased, without accents": {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    "uncased, with accents": {"strip_accents": False},
}


@pytest.mark.parametrize(("form", "step"), [("uncased", 240), *(pytest.param(form, 9, marks=SLOW) for form in FORMS)])
def test_ids_are_the_tokenizer_s_in_every_line(form: str, step: int, tmp_path: Path) -> None:
    """step: of the lines that are hard, each so many-th."""
    text = tokenizer(tmp_path, **FORMS[form])
    encode, lines = encoder_of(text), [*NASTY, *(line for kind in hard_lines().values() for line in kind[::step])]
    for i in range(0, len(lines), 64):
        assert encode(lines[i : i + 64]) == expected(text, lines[i : i + 64])
    for line in NASTY:  # alone
        assert encode([line]) == expected(text, [line])
    assert encoder_of(text, MOST, "query: ")(lines[:50]) == expected(text, [f"query: {line}" for line in lines[:50]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def file(checkpoint: Path) -> Path:
    return export_search(checkpoint, checkpoint.parent / "model.onnx", text=True)


def vectors(file: Path, lines: list[str]) -> NDArray[np.float32]:
    """By ONNX Runtime as anybody has it."""
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["sentence_embedding"], {"text": np.array(lines, object)})[0])


def test_vectors_are_the_folder_s(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    ours = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx"), threads=1).embed(NASTY)
    np.testing.assert_allclose(vectors(file, NASTY), ours, rtol=0, atol=1e-6)
    opened = open_file(file)
    np.testing.assert_allclose(opened.embed(NASTY), ours, rtol=0, atol=1e-6)
    short = opened.embed(NASTY[3], dimensions=8)
    assert short.shape == (8,)
    assert np.linalg.norm(short) == pytest.approx(1)


def test_two_threads_compute_two_parts_side_by_side(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, aside, run_async = [f"{line} {i}" for i in range(3) for line in NASTY * 9], [], Session.run_async
    monkeypatch.setattr(Session, "run_async", lambda self, *of: (aside.append(of[1]), run_async(self, *of))[1])
    done: list[float] = []
    both = open_file(file, threads=2).embed(lines, done=done.append)
    assert aside
    assert len(done) > 2
    assert (done == sorted(done), done[-1]) == (True, 1)
    aside.clear()
    np.testing.assert_allclose(open_file(file, threads=1).embed(lines), both, rtol=0, atol=1e-6)
    assert not aside


def test_the_graph_takes_and_returns_what_is_declared(checkpoint: Path, file: Path) -> None:
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    ports = GRAPHS[TEXT_VECTORS](Request(config=open_file(file).config, embedding=TextEmbedding()))
    assert [entry.name for entry in session.get_inputs()] == list(ports.input_names.values())
    assert [entry.name for entry in session.get_outputs()] == list(ports.output_names.values())


def test_on_the_command_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not cli.main(["embed", str(file), "a film", "日本"])
    shown = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(shown, vectors(file, ["a film", "日本"]), rtol=0, atol=1e-6)
    assert not cli.main(["info", str(file)])
    assert "vectors of texts in one ONNX file" in capsys.readouterr().out
    long = tmp_path / "long"
    long.write_text("a\n" + "ab " * 99 + "\n")
    assert not cli.main(["embed", str(file), "--input", str(long), "-o", str(tmp_path / "v.npy")])
    assert "line 2" in capsys.readouterr().err
    assert np.load(tmp_path / "v.npy").shape == (2, 32)


def test_fewer_dimensions(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    cut = export_search(checkpoint, tmp_path / "cut.onnx", text=True, dimensions=16)
    found = vectors(cut, NASTY)
    np.testing.assert_allclose(found, open_file(file).embed(NASTY, dimensions=16), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(open_file(cut).embed(NASTY).shape, found.shape)


def test_what_a_file_can_t_do_is_said(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    opened = open_file(file)
    for options in ({"pooling": "cls"}, {"normalize": False}, {"prompt_name": "query"}):
        with pytest.raises(UserError, match="pooling, length and prompt are in the file"):
            opened.embed("a", **options)
    with pytest.raises(UserError, match="takes text, not ids"):
        opened.embedder().vectors([[2, 3]])
    with pytest.raises(UserError, match="gives vectors of texts, no translations: it is for embed"):
        SearchModel(file)
    with pytest.raises(UserError, match="takes only text, but the server batches ids"):
        warmed(opened)
    with pytest.raises(UserError, match="text 1 holds a lone surrogate"):
        opened.embed("\ud800")


def test_what_isn_t_written(checkpoint: Path, tmp_path: Path) -> None:
    def refused(reason: str, text: str | None = None, embedding: TextEmbedding | None = None) -> None:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        write_bert(tmp_path / "model", text, embedding)
        with pytest.raises(UserError, match=reason):
            export_search(tmp_path / "model", tmp_path / "a.onnx", text=True)
        assert not (tmp_path / "a.onnx").exists()

    text, plain = (checkpoint / "tokenizer.json").read_text(encoding="utf-8"), TextEmbedding()
    refused("has no tokenizer.json", None, plain)
    refused("has no embedding.json, which says how a text's vector is made", text)
    refused("lower-cases text beforehand", text, TextEmbedding(lower_case=True))
    prompted = dict(prompts={"query": "q: "}, default_prompt="query", prompt_counts=False)
    refused("leaves the tokens of its prompt out: a file that takes text can't", text, TextEmbedding(**prompted))
    ours = Tokenizer.train(["a b"], 300).to_json()
    refused("needs BertNormalizer, BertPreTokenizer, WordPiece, and this one has None, Sequence, BPE", ours, plain)


@pytest.mark.fast("v5/bert")
@pytest.mark.parametrize("name", thinned(["v4/bert", "v5/distilbert", "v5/bert"], 2))
def test_tokens_that_a_maker_added(name):
    pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    facts, text, _ = golden(name)
    assert encoder_of(text, most=500)(facts["texts"]) == facts["ids"]
