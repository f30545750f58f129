"""Strings in, strings out: the tokenizer inside the graph gives the ids of ours, and the text that ours gives back."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from ending_models import POST_NORM, SIZES, made
from tokenizers import Regex, pre_tokenizers

from export.__main__ import main as build
from export.graph.builder import GraphBuilder
from export.package.quality import LIMITS, Limits
from export.search import SearchModel, export_search
from export.search.metadata import TOKENIZER
from export.search.text import PIECES, BytePairOps, is_blank, split, words_pattern
from mlx_transformer import cli
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.data import built_in
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import SPLIT_PATTERN, Tokenizer

extensions = pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")

SIZE = 700
NASTY = [
    "</s> <pad> x",
    "<s></s>",
    "naïve cafe\u0301 日本語 مرحبا",
    "a\nb\tc\r\n",
    "  lead  trail  ",
    " ",
    "",
    "\u3000\u2009",
    "x" * 70,
    "é" * 33 + "\u0301",
    "!" * 65,
    " " * 33 + "a",
    " " * 65 + "!!",
    "🎉🎉 wow 👍🏽 👩‍👩‍👧",
    "a\u00a0b\u3000c\u202fd\u2009–\u2009e",
    "\x01\x02\x7f\x85\x1c",
    "don't can't I'll 's 'S",
    "١٢٣ ½ ² 12345",
    "\ufeffx\u200b\ufffd",
    "\U0010fffd\ue000",
]


@pytest.fixture(scope="module")
def corpus():
    return built_in.build("cldr:en-de", train_pairs=1500, seed=4)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Tokenizer.train([*corpus.train.source, *corpus.train.target, *NASTY], SIZE)


def opened(g, **outputs):
    for name, (value, dtype, rank) in outputs.items():
        value.shape, value.type = ir.Shape([None] * rank), ir.TensorType(dtype)
        g.builder.add_output(value, name)
    options = ort.SessionOptions()
    options.register_custom_ops_library(extensions.get_library_path())
    return ort.InferenceSession(ir.to_proto(g.model()).SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def encode(tokenizer):
    return encoder_of(tokenizer)


def encoder_of(tokenizer):
    """Texts -> ids, mask and which are blank, by the graph."""
    g = GraphBuilder("encode")
    ops = BytePairOps(tokenizer.to_json(), TransformerConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size}))
    text = g.builder.input("text", ir.DataType.STRING, ["lines"])
    ids, mask = ops.encode(g.op, text)
    integer, boolean = ir.DataType.INT64, ir.DataType.BOOL
    session = opened(g, ids=(ids, integer, 2), mask=(mask, integer, 2), blank=(is_blank(g.op, text), boolean, 1))
    return lambda texts: session.run(None, {"text": np.array(texts, object)})


@pytest.fixture(scope="module")
def decode(tokenizer):
    g = GraphBuilder("decode")
    ops = BytePairOps(tokenizer.to_json(), TransformerConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size + 3}))
    blank = g.builder.input("blank", ir.DataType.BOOL, ["lines"])
    text = ops.decode(g.op, g.input("ids", "lines", "n", "t", dtype="int64"), blank)
    session = opened(g, text=(text, ir.DataType.STRING, 2))
    return lambda ids: session.run(None, {"ids": ids, "blank": np.zeros(len(ids), bool)})[0]


def same_ids(encode, tokenizer, texts):
    ids, mask, blank = encode(texts)
    for i, row in enumerate(tokenizer.encode_batch(texts)):
        assert mask[i].tolist() == [1] * len(row) + [0] * (ids.shape[1] - len(row)), texts[i]
        assert ids[i].tolist() == row + [0] * (ids.shape[1] - len(row)), texts[i]
        assert blank[i] == (not texts[i].strip()), texts[i]


def test_ids_of_real_lines(encode, tokenizer, corpus):
    same_ids(encode, tokenizer, [*corpus.held_out.source[:300], *corpus.held_out.target[:300]])


def test_ids_of_hard_lines(encode, tokenizer):
    same_ids(encode, tokenizer, NASTY)
    for text in NASTY:  # a batch of one, of nothing
        same_ids(encode, tokenizer, [text])


def test_ids_of_every_token_s_text(encode, tokenizer):
    texts = [tokenizer.decode([id]) for id in range(4, tokenizer.vocab_size)]
    same_ids(encode, tokenizer, [text for text in texts if "\0" not in text])


POINTS = [point for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
"""All of Unicode's but the surrogates, and NUL, which strings in a graph can't hold."""


@pytest.fixture(scope="module")
def cut():
    """Texts -> their pieces, in one list."""
    g = GraphBuilder("split")
    words, _ = split(g.op, g.builder.input("text", ir.DataType.STRING, ["lines"]), "words", words_pattern())
    pieces, _ = split(g.op, words, "pieces", PIECES)
    session = opened(g, pieces=(pieces, ir.DataType.STRING, 1))
    return lambda texts: session.run(None, {"text": np.array(texts, object)})[0].tolist()


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_categories_of_code_points(cut, every):
    """Each after a letter and after a sign, so that its category shows: the pieces are those of `tokenizers`."""
    points = POINTS[::every]
    reference = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    texts = ["".join(f"a{chr(p)}!{chr(p)}" for p in points[i : i + 64]) for i in range(0, len(points), 64)]
    assert sum(map(len, texts)) == 4 * len(points)
    for i in range(0, len(texts), 500):
        expected = [piece for line in texts[i : i + 500] for piece, _ in reference.pre_tokenize_str(line)]
        assert cut(texts[i : i + 500]) == expected


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_ids_of_code_points(encode, tokenizer, every):
    points = POINTS[::every]
    texts = ["".join(map(chr, points[i : i + 32])) for i in range(0, len(points), 32)]
    assert sum(map(len, texts)) == len(points)
    for i in range(0, len(texts), 2000):
        same_ids(encode, tokenizer, texts[i : i + 2000])


@pytest.mark.parametrize("letter", ["\u0870", "\u08ca"], ids=ascii)
def test_characters_of_younger_unicode(letter):
    """A letter and a mark that came after Unicode 13, in a vocabulary that has learnt them."""
    texts = [f"a{letter}b !{letter}{letter} {letter}x{letter}1"] * 20
    tokenizer = Tokenizer.train(texts, 290)
    encoder = encoder_of(tokenizer)
    same_ids(encoder, tokenizer, texts[:1])


def test_text_of_any_ids(decode, tokenizer):
    """Random ids, so bytes that are no UTF-8 too: as many replacement characters, in the same places."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tokenizer.vocab_size, (200, 3, 12))
    ids[:100] = rng.integers(4, 260, (100, 3, 12))  # bytes
    high = rng.choice([*range(4 + 0x80, 4 + 0x100)], (60, 3, 12))
    ids[:60] = high
    decoded = decode(ids)
    for texts, rows in zip(decoded, ids, strict=True):
        # Strings of onnxruntime-extensions hold no NUL.
        assert list(texts) == [tokenizer.decode(row.tolist()).replace("\0", "") for row in rows]
    unknown = np.full((1, 1, 4), tokenizer.vocab_size)
    assert decode(unknown).tolist() == [[""]]
    assert decode(np.zeros((2, 2, 0), np.int64)).tolist() == [["", ""], ["", ""]]


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    model, checkpoint = made(folder, **POST_NORM, vocab_size=tokenizer.vocab_size, max_positions=200)
    (checkpoint / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    return model, checkpoint


@pytest.mark.fast("{}")
@pytest.mark.parametrize("options", [{}, {"beam": 4, "n_best": 3, "max_new_tokens": 20}], ids=str)
def test_translations(model, tokenizer, corpus, tmp_path, options):
    mlx, checkpoint = model
    graph = SearchModel(export_search(checkpoint, tmp_path / "text.onnx", text=True), threads=1)
    lines = [*corpus.held_out.source[:20], "", "  ", *(line for line in NASTY if "\0" not in line)]
    expected = Translator(mlx.config, tokenizer, mlx.search).n_best(lines, **options)
    translations = graph.n_best(lines, **options)
    for row, other, line in zip(translations, expected, lines, strict=True):
        texts = [translation.text for translation in other][: len(row)]
        assert [translation.text for translation in row][: len(other)] == [text.replace("\0", "") for text in texts], (
            line
        )
        np.testing.assert_allclose(row[0].score, other[0].score, rtol=1e-4, atol=1e-4)
    single = {name: value for name, value in options.items() if name != "n_best"}
    assert graph.translate(lines, **single) == [row[0].text for row in translations]


@pytest.mark.fast("text")
@pytest.mark.parametrize("text", [True, False], ids=["text", "ids"])
def test_long_lines_as_on_the_host(model, tokenizer, tmp_path, text):
    mlx, checkpoint = model
    graph = SearchModel(export_search(checkpoint, tmp_path / "one.onnx", text=text), threads=1)
    host = Translator(mlx.config, tokenizer, mlx.search)
    lines = ["one two", "3 Feb. 1999 " * 40, "", "größe" * 90, "x"]
    for overlong in ("split", "truncate", "skip"):
        told, expected = [], []
        options = {"overlong": overlong, "first_line": 7, "max_new_tokens": 9}
        found = graph.n_best(lines, on_overlong=told.append, **options)
        others = host.n_best(lines, on_overlong=expected.append, **options)
        assert [[t.text for t in row] for row in found] == [[t.text for t in row] for row in others]
        assert told == expected == [8, 10]
    with pytest.raises(UserError, match="line 8: "):
        graph.check_lines(lines, "error", 7)


def test_errors(model, tokenizer, tmp_path, monkeypatch):
    _, checkpoint = model
    graph = SearchModel(export_search(checkpoint, tmp_path / "text.onnx", text=True), threads=1)
    with pytest.raises(UserError, match="line 2: holds a NUL character"):
        graph.translate(["a", "b\0c"])
    with pytest.raises(UserError, match="takes text, not ids: call translate"):
        graph.generate([[4, 2]])
    with pytest.raises(UserError, match=r"line 2: .* the model takes at most"):
        graph.translate(["a", "1 " * 150])
    with pytest.raises(UserError, match="expected text, or a list of lines, not int"):
        graph.translate(3)
    assert graph.translate("a") == graph.translate(["a"])[0]
    assert graph.translate(line for line in ["a", "b"]) == graph.translate(["a", "b"])
    del graph.metadata[TOKENIZER]  # a file of an earlier version
    with pytest.raises(UserError, match="a sentence may be too long"):
        graph.translate(["1 " * 150])
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    monkeypatch.setattr("export.search.runtime.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[text\]'"):
        SearchModel(tmp_path / "text.onnx")


@pytest.mark.slow
def test_a_lower_precision_is_judged(model, corpus, tmp_path, monkeypatch):
    """As a package is; here by a limit that none can reach."""
    monkeypatch.setitem(LIMITS, "int4", Limits(1.1, 0.5, 2.0, 0.2))
    _, checkpoint = model
    (tmp_path / "source").write_text("\n".join(corpus.held_out.source[:8]) + "\n", encoding="utf-8")
    out, gate = tmp_path / "lower.onnx", {"precision": "int4", "gate_source": tmp_path / "source"}
    with pytest.raises(UserError, match=r"lower\.onnx: not written: int4: .*the limit is 110%"):
        export_search(checkpoint, out, **gate)
    assert not out.exists()
    assert export_search(checkpoint, out, accept_loss=True, **gate).exists()


@pytest.mark.fast("cli")
@pytest.mark.parametrize("main", [cli.main, lambda arguments: build(["build", *arguments[1:]])], ids=["cli", "export"])
def test_on_the_command_line(model, tmp_path, capsys, main):
    _, checkpoint = model
    out = tmp_path / "text.onnx"
    main(["export", str(checkpoint), str(out), "--embed-tokenizer", "--target", "cpu"])
    assert f"{out}: 0." in capsys.readouterr().out
    assert SearchModel(out).takes_text
    main(["export", str(checkpoint), str(out), "--search", "--force"])
    assert not SearchModel(out).takes_text


def test_a_tokenizer_of_another_make_is_refused(tokenizer):
    config = TransformerConfig(**{**SIZES, **POST_NORM, "vocab_size": tokenizer.vocab_size})
    specification = json.loads(tokenizer.to_json())
    specification["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(UserError, match="needs a tokenizer from `train` or `import`"):
        BytePairOps(json.dumps(specification), config)
