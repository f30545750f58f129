"""Words of tokens, links between words, and what becomes of them in lines, pieces and files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import caller, refused
from copying_model import write_copying_model

from export import OnnxTransformer, export_onnx, export_search
from export.validate.opening import cross_weights, open_model
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.alignment import (
    Alignment,
    align,
    alignment_layer,
    pharaoh,
    word_links,
    word_weights,
    words_of,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

LINES = ["one two three.", "", "four", "seven eight nine ten"]
LINKS = ["0-0 1-1 2-2", "", "0-0", "0-0 1-1 2-2 3-3"]
call = pytest.fixture(caller)


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    folder = write_copying_model(tmp_path_factory.mktemp("copying"))
    export_onnx(folder / "model", folder / "cpu", target="cpu", precision=["float32", "int8"], accept_loss=True)
    return folder


@pytest.mark.parametrize("text", ["one two  three. x", " one\ttwo ", "größer 東京, x", "", "  ", "a\u00a0b c"])
def test_words_are_those_that_spaces_separate(text):
    tokenizer = Tokenizer.train(["one two three. größer " * 3], vocab_size=285)
    ids = tokenizer.encode(text)
    words = words_of(tokenizer, ids)
    assert words[-1] is None  # the end token
    assert words_of(tokenizer, [tokenizer.vocab_size]) == [None]  # a row that published models have besides
    expected = [word for word in text.replace("\t", " ").split(" ") if word]
    found = [
        tokenizer.decode([id for id, word in zip(ids, words, strict=True) if word == i]) for i in range(len(expected))
    ]
    assert [word.strip() for word in found] == expected
    assert max((word for word in words if word is not None), default=-1) == len(expected) - 1


def test_weights_between_words():
    weights = np.array([[0.6, 0.1, 0.2, 0.1], [0.2, 0.1, 0.1, 0.6], [0.1, 0.3, 0.4, 0.2]])
    source, target = [0, 1, 1, None], [0, 0, 1]
    expected = [[(0.6 + 0.2) / 2, (0.3 + 0.2) / 2], [0.1, 0.7]]
    np.testing.assert_allclose(word_weights(weights, source, target), expected, rtol=1e-12)
    assert word_links(weights, source, target) == [(0, 0), (1, 1)]
    assert word_links(np.zeros((1, 1)), [None], [0]) == []
    assert pharaoh([(0, 0), (2, 1)]) == "0-0 2-1"


def test_pieces_of_a_line_count_on():
    both = Alignment([(0, 1), (1, 0)], 2, 2) + Alignment([(0, 0)], 1, 1)
    assert both == Alignment([(0, 1), (1, 0), (2, 2)], 3, 3)


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 1), (3, 2), (6, 4)])
def test_the_layer_that_aligns(layers, layer):
    assert alignment_layer(TransformerConfig(vocab_size=9, d_model=8, heads=1, decoder_layers=layers)) == layer


@pytest.mark.fast("onnx")
@pytest.mark.parametrize("name", ["model", "onnx", "cpu"])
def test_a_copy_is_aligned_along_the_diagonal(call, copying, name):
    arguments = ["translate", copying / name, "--alignment"]
    status, out, said = call(*arguments, stdin="".join(f"{line}\n" for line in LINES))
    assert (status, said) == (0, "")
    assert out == "".join(f"{line}\t{links}\n" for line, links in zip(LINES, LINKS, strict=True))
    status, out, said = call(*arguments, "--json", "--beam", 2, "--n-best", 2, stdin="".join(f"{x}\n" for x in LINES))
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["translations"][0]["alignment"] for row in rows] == [
        [[int(side) for side in link.split("-")] for link in links.split()] for links in LINKS
    ]
    assert all("alignment" in found for row in rows for found in row["translations"])


def test_lower_precisions_align_too(call, copying):
    status, out, _ = call("translate", copying / "cpu", "--precision", "int8", "--alignment", LINES[0])
    assert (status, out) == (0, f"{LINES[0]}\t{LINKS[0]}\n")


def test_columns_and_split_lines(call, copying):
    status, out, _ = call(
        "translate", copying / "onnx", "--alignment", "--scores", "--n-best", 2, "--beam", 2, "one two"
    )
    first, _, links, *others = out.rstrip("\n").split("\t")
    assert (status, first, links, len(others)) == (0, "one two", "0-0 1-1", 3)
    line = " ".join(["one two."] * 18)  # more than 48 tokens
    status, out, said = call("translate", copying / "onnx", "--alignment", line)
    assert (status, "translated in pieces" in said) == (0, True)
    assert out == f"{line}\t{' '.join(f'{i}-{i}' for i in range(36))}\n"


def test_a_file_is_aligned_and_continued_only_with_the_same_columns(call, copying, tmp_path):
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in LINES))
    files = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    assert call("translate", copying / "onnx", *files, "--alignment")[0] == 0
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines()[0] == f"{LINES[0]}\t{LINKS[0]}"


def test_batches_give_what_single_pairs_give(copying):
    translator = OnnxTransformer(copying / "onnx").translator
    sources = translator.tokenizer.encode_batch([line for line in LINES * 9 if line])
    targets = [row[:-1] for row in sources]
    together = cross_weights(open_model(copying / "onnx"))(sources, [*targets[:-1], []])
    assert together[-1].shape == (0, len(sources[-1]))
    alone = cross_weights(open_model(copying / "model"))
    for i in (0, 1, 2):
        [expected] = alone([sources[i]], [targets[i]])
        assert together[i].shape == (len(targets[i]), len(sources[i])) == expected.shape
        found = align(translator.tokenizer, together[i], sources[i], targets[i])
        assert found == align(translator.tokenizer, expected, sources[i], targets[i])


def test_refusals(call, copying, tmp_path):
    export_search(copying / "model", tmp_path / "one.onnx")
    refused(call("translate", tmp_path / "one.onnx", "--alignment", "one"), "returns no attention")
    refused(call("translate", copying / "onnx", "--alignment", "--stream", "one"), "without scores")
    translator = OnnxTransformer(copying / "onnx").translator
    with pytest.raises(UserError, match="weights of cross-attention"):
        translator.n_best(["one"], aligned=True)
