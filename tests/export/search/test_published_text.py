"""Strings in, strings out, with the vocabularies of published models: the graph gives the ids that the runtimes give,
and their text."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from published_folders import KINDS, checkpoint
from published_text import lines

from export.graph.builder import GraphBuilder
from export.search import SearchModel, export_search
from export.search.pieces import PieceOps
from export.search.text import ByteLevelOps, is_byte_level
from mlx_transformer import Transformer
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


def test_ids_and_text_are_those_of_the_runtimes(model):
    tokenizer, config = Tokenizer.load(model), Transformer.load(model).config
    ops = (ByteLevelOps if is_byte_level(tokenizer.to_json()) else PieceOps)(tokenizer.to_json(), config)
    graph = GraphBuilder("text")
    text = graph.builder.input("text", ir.DataType.STRING, ["lines"])
    written = graph.input("ids", "written", "n", "t", dtype="int64")
    nothing = graph.builder.input("blank", ir.DataType.BOOL, ["written"])
    ids, kept = ops.encode(graph.op, text)
    integer = ir.DataType.INT64
    session = run(
        graph,
        {
            "source": (ids, integer, 2),
            "mask": (kept, integer, 2),
            "decoded": (ops.decode(graph.op, written, nothing), ir.DataType.STRING, 2),
        },
    )
    texts = [*lines()[::7], *OF_CODES, "<2de> Germany", "中", "中 中文", ""]
    texts = [text for text in texts if "\0" not in text]
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (60, 2, 12))
    feeds = {"ids": ids, "blank": np.zeros(len(ids), bool)}
    source, mask, decoded = session.run(None, {"text": np.array(texts, object), **feeds})
    expected = tokenizer.source.encode_batch(texts)
    assert [row[kept == 1].tolist() for row, kept in zip(source, mask, strict=True)] == expected
    assert (source[mask == 0] == tokenizer.pad_id).all()
    by_hand = [[tokenizer.decode(row.tolist()).replace("\0", "") for row in rows] for rows in ids]
    assert decoded.tolist() == by_hand
    (single,) = session.run(["source"], {"text": np.array(texts[5:6], object), **feeds})
    assert single[0][: len(expected[5])].tolist() == expected[5]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A model of many languages, and its file."""
    folder = tmp_path_factory.mktemp("languages")
    ours = checkpoint("nllb of BPE", folder)
    return Transformer.load(ours), SearchModel(export_search(ours, folder / "one.onnx", text=True), threads=1)


@pytest.mark.parametrize(
    "codes", [{}, {"source_language": "deu_Latn", "target_language": "zho_Hans"}], ids=["", "codes"]
)
def test_translations_and_languages(translator, codes):
    mlx, file = translator
    texts = ["Germany", "", "  ", "two children", "中文 日本", "x" * 30]
    options = dict(max_new_tokens=7, beam=2, **codes)
    assert file.takes_text
    assert file.translate(texts, **options) == mlx.translate(texts, **options)


def test_long_lines_are_told_by_their_tokens(translator):
    mlx, file = translator
    line = "Germany and France and Spain and Italy and Poland and Greece and Japan. " * 3
    with pytest.raises(UserError, match=r"line 2: \d+ tokens, the model takes at most 63"):
        file.translate(["x", line])
    assert file.translate([line], overlong="split", max_new_tokens=5) == mlx.translate(
        [line], overlong="split", max_new_tokens=5
    )


def test_pieces_that_operators_cut_otherwise_are_refused(tmp_path):
    """A letter in a piece of the source's model that is no piece by itself: what is unknown can't be told from it."""
    model = checkpoint("marian", tmp_path)
    config = Transformer.load(model).config
    values = json.loads(Tokenizer.load(model).to_json())
    entry = next(pair for pair in values["model"]["vocab"] if pair[0].startswith("▁") and len(pair[0]) > 3)
    entry[0] = f"{entry[0]}\ue000"
    with pytest.raises(UserError, match="operators can't look up what its model doesn't know"):
        PieceOps(json.dumps(values), config)
