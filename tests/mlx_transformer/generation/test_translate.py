"""Text policies: empty lines, lines that are too long, bytes that are no text, one line out for each line in."""

from __future__ import annotations

import pytest
from upper_case import TOKENIZER, translator

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError


def test_lines_stay_aligned():
    lines = ["one", "", "two\u2028three", "   ", "four"]
    assert translator().translate(lines) == ["ONE", "", "TWO\u2028THREE", "", "FOUR"]
    assert translator().translate([]) == []
    assert translator().translate([""]) == [""]


def test_n_best_texts_and_scores():
    (translations,) = translator().n_best(["one"], n_best=3)
    assert [(t.text, t.score) for t in translations] == [("ONE", -1.0), ("ONE!", -2.0), ("ONE!!", -3.0)]


def test_a_long_line_is_an_error_that_names_it():
    with pytest.raises(UserError, match="line 12: 31 tokens, the model takes at most 10"):
        translator(10).n_best(["one", "x" * 30], first_line=11)


def test_a_long_line_is_truncated_on_request():
    assert translator(10).translate(["a b c d e f g h i j", "b"], overlong="truncate")[1] == "B"
    (short,) = translator(10).translate(["xyz" * 20], overlong="truncate")
    assert short == "XYZXYZXYZ"


@pytest.mark.parametrize(
    "line", ["xay. xbz! Qcy? ddd. eee", "a b c d e f g h i j k l m n o p", "qwzqwzqwzqwzqwzqwzqwzqwz", "ä。ö。" * 9]
)
def test_a_long_line_is_split_on_request(line):
    calls = []
    (out, other) = translator(12, calls).translate([line, "one"], overlong="split")
    assert out.replace(" ", "") == line.upper().replace(" ", "")
    assert other == "ONE"
    assert len(calls) == 1
    assert len(calls[0]) > 2


def test_a_split_prefers_sentence_ends():
    calls = []
    translator(18, calls).translate(["aaa bbb ccc ddd. eee fff"], overlong="split")
    assert [TOKENIZER.decode(row) for row in calls[0]] == ["aaa bbb ccc ddd.", "eee fff"]


def test_ten_thousand_tokens_are_split_quickly():
    (out,) = translator(50).translate(["xyz. " * 3000], overlong="split")
    assert out.count("XYZ") == 3000


def test_refusals():
    with pytest.raises(UserError, match="list of lines"):
        translator().translate("one")
    with pytest.raises(UserError, match="overlong='cut' is not one of error, truncate, split, skip"):
        translator().translate(["one"], overlong="cut")
    with pytest.raises(UserError, match="tokenizer of 280 tokens, but the model has 270"):
        translator(vocab_size=270)
    with pytest.raises(UserError, match="ids of pad, bos and eos differ"):
        translator(eos_id=5)
    with pytest.raises(UserError, match="needs an encoder-decoder"):
        translator(architecture="decoder", encoder_layers=0, tie_embeddings="none")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Translator(TransformerConfig(vocab_size=280), None, lambda rows: [], "folder")


def test_a_long_line_is_skipped_on_request():
    told = []
    found = translator(10).n_best(["x" * 30, "one"], overlong="skip", first_line=5, on_overlong=told.append)
    assert [line[0].text for line in found] == ["", "ONE"]
    assert told == [5]
