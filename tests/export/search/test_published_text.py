"""Strings in, strings out, with the vocabularies of published models: the graph gives the ids that the runtimes give,
and their text."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from combined import thinned
from golden_tokens import FOLDERS, golden, has_decoder
from published_folders import KINDS, checkpoint
from published_text import lines

from export.graph.builder import GraphBuilder
from export.search import SearchModel, export_search
from export.search.pieces import PieceOps
from export.search.text import ByteLevelOps, is_byte_level
from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

extensions = pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")

OF_CODES = [">>deu<< one", ">>fra<<two", ">>deu<<", ">>eng<< three", "a >>deu<< b", ">>deu<<>>fra<< x", ">> <", ">>x"]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return checkpoint(request.param, tmp_path_factory.mktemp("published"))


def run(graph: GraphBuilder, outputs: dict[str, tuple[ir.Value, ir.DataType, int]]) -> ort.InferenceSession:
    for name, (value, dtype, rank) in outputs.items():
        value.shape, value.type = ir.Shape([None] * rank), ir.TensorType(dtype)
        graph.builder.add_output(value, name)
    options = ort.SessionOptions()
    options.register_custom_ops_library(extensions.get_library_path())
    data = ir.to_proto(graph.model()).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def of_text(tokenizer: Tokenizer, config: TransformerConfig) -> ort.InferenceSession:
    ops = (ByteLevelOps if is_byte_level(tokenizer.to_json()) else PieceOps)(tokenizer.to_json(), config)
    graph = GraphBuilder("text")
    text = graph.builder.input("text", ir.DataType.STRING, ["lines"])
    written = graph.input("ids", "written", "n", "t", dtype="int64")
    nothing = graph.builder.input("blank", ir.DataType.BOOL, ["written"])
    ids, kept = ops.encode(graph.op, text)
    integer = ir.DataType.INT64
    return run(
        graph,
        {
            "source": (ids, integer, 2),
            "mask": (kept, integer, 2),
            "decoded": (ops.decode(graph.op, written, nothing), ir.DataType.STRING, 2),
        },
    )


@pytest.mark.fast("t5", "nllb of BPE", "marian", "bart")
def test_ids_and_text_are_those_of_the_runtimes(model):
    tokenizer, config = Tokenizer.load(model), Transformer.load(model).config
    session = of_text(tokenizer, config)
    texts = [
        *lines()[::240],
        *OF_CODES,
        "a <extra_id_3>  b<mask>",
        "<mask><extra_id_0>x",
        "<2de> Germany",
        "中",
        "中 中文",
        "",
    ]
    texts = [text for text in texts if "\0" not in text]
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (25, 2, 12))
    feeds = {"ids": ids, "blank": np.zeros(len(ids), bool)}
    source, mask, decoded = session.run(None, {"text": np.array(texts, object), **feeds})
    expected = tokenizer.source.encode_batch(texts)
    assert [row[kept == 1].tolist() for row, kept in zip(source, mask, strict=True)] == expected
    assert (source[mask == 0] == tokenizer.pad_id).all()
    by_hand = [[tokenizer.decode(row.tolist()).replace("\0", "") for row in rows] for rows in ids]
    assert decoded.tolist() == by_hand
    (single,) = session.run(["source"], {"text": np.array(texts[5:6], object), **feeds})
    assert single[0][: len(expected[5])].tolist() == expected[5]


@pytest.mark.parametrize("name", thinned(filter(has_decoder, FOLDERS), 3))
def test_tokens_that_a_maker_added(name):
    facts, text, config = golden(name)
    tokenizer = Tokenizer(text)
    session = of_text(tokenizer, config)
    texts = [
        *facts["texts"],
        "</s> a <pad>",
        "<mask> x<mask>",
        "a <extra_id_3> b",
        "[E1][E1] {NAME}",
        "a\t[E1]\u3000b <hole>\xa0",
        *("a\x85", "\x85a", "a\x85b", "a\u2028", "a \x85\u2028", "a\x85 {NAME} a\x85", "a \x85 b", "\x85[E1]"),
        *("a ", "a  ", " a  b ", "[E1] ", "a {NAME} ", " {NAME}  [E1] <hole>", "a  {NAME}  b", "\u3000[E1]\u3000a"),
    ]
    feeds = {"ids": np.zeros((1, 1, 1), np.int64), "blank": np.zeros(1, bool)}
    source, mask = session.run(["source", "mask"], {"text": np.array(texts, object), **feeds})
    expected = tokenizer.source.encode_batch(texts)
    assert [row[kept == 1].tolist() for row, kept in zip(source, mask, strict=True)] == expected
    for row in facts["ids"][::9]:
        feeds = {"ids": np.array([[row]]), "blank": np.zeros(1, bool)}
        (decoded,) = session.run(["decoded"], {"text": np.array(["a"], object), **feeds})
        assert decoded.tolist() == [[tokenizer.decode(row)]]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A model of many languages, and its file."""
    folder = tmp_path_factory.mktemp("languages")
    ours = checkpoint("nllb of BPE", folder)
    return Transformer.load(ours), SearchModel(export_search(ours, folder / "one.onnx", text=True), threads=1)


CODES = {"source_language": "deu_Latn", "target_language": "zho_Hans"}


def test_translations_and_languages(translator):
    mlx, file = translator
    texts = ["Germany", "", "  ", "two children", "中文 日本", "x" * 30]
    options = dict(max_new_tokens=7, beam=2, **CODES)
    assert file.takes_text
    assert file.translate(texts, **options) == mlx.translate(texts, **options)
    for model in translator:
        with pytest.raises(UserError, match="source_language and target_language: the model has 2 languages"):
            model.translate(texts)


def test_long_lines_are_told_by_their_tokens(translator):
    mlx, file = translator
    line = "Germany and France and Spain and Italy and Poland and Greece and Japan. " * 3
    with pytest.raises(UserError, match=r"line 2: \d+ tokens, the model takes at most 63"):
        file.translate(["x", line], **CODES)
    few = dict(overlong="split", max_new_tokens=5, **CODES)
    assert file.translate([line], **few) == mlx.translate([line], **few)


def test_pieces_that_operators_cut_otherwise_are_refused(tmp_path):
    """A letter in a piece of the source's model that is no piece by itself: what is unknown can't be told from it."""
    model = checkpoint("marian", tmp_path)
    config = Transformer.load(model).config
    values = json.loads(Tokenizer.load(model).to_json())
    entry = next(pair for pair in values["model"]["vocab"] if pair[0].startswith("▁") and len(pair[0]) > 3)
    entry[0] = f"{entry[0]}\ue000"
    with pytest.raises(UserError, match="no operator looks up these tokens that its model lacks"):
        PieceOps(json.dumps(values), config)
