"""Text policies: empty lines, lines that are too long, bytes that are no text, one line out for each line in."""

from __future__ import annotations

import pytest
from upper_case import TOKENIZER, UpperCase

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError


def test_lines_stay_aligned():
    lines = ["one", "", "two\u2028three", "   ", "four"]
    assert UpperCase().translate(lines) == ["ONE", "", "TWO\u2028THREE", "", "FOUR"]
    assert UpperCase().translate([]) == []
    assert UpperCase().translate([""]) == [""]


def test_one_line_gives_one_translation():
    assert UpperCase().translate("one") == "ONE"
    assert UpperCase().translate("") == ""
    assert [t.text for t in UpperCase().n_best("one", n_best=2)] == ["ONE", "ONE!"]


def test_n_best_texts_and_scores():
    (translations,) = UpperCase().n_best(["one"], n_best=3)
    assert [(t.text, t.score) for t in translations] == [("ONE", -1.0), ("ONE!", -2.0), ("ONE!!", -3.0)]


def test_a_long_line_is_an_error_that_names_it():
    with pytest.raises(UserError, match="line 12: 31 tokens, the model takes at most 10"):
        UpperCase(10).n_best(["one", "x" * 30], first_line=11)


def test_a_long_line_is_truncated_on_request():
    assert UpperCase(10).translate(["a b c d e f g h i j", "b"], overlong="truncate")[1] == "B"
    (short,) = UpperCase(10).translate(["xyz" * 20], overlong="truncate")
    assert short == "XYZXYZXYZ"


@pytest.mark.parametrize(
    "line", ["xay. xbz! Qcy? ddd. eee", "a b c d e f g h i j k l m n o p", "qwzqwzqwzqwzqwzqwzqwzqwz", "ä。ö。" * 9]
)
def test_a_long_line_is_split_on_request(line):
    calls = []
    (out, other) = UpperCase(12, calls).translate([line, "one"], overlong="split")
    assert out.replace(" ", "") == line.upper().replace(" ", "")
    assert other == "ONE"
    assert len(calls) == 1
    assert len(calls[0]) > 2


def test_a_split_prefers_sentence_ends():
    calls = []
    UpperCase(18, calls).translate(["aaa bbb ccc ddd. eee fff"], overlong="split")
    assert [TOKENIZER.decode(row) for row in calls[0]] == ["aaa bbb ccc ddd.", "eee fff"]


def test_ten_thousand_tokens_are_split_quickly():
    (out,) = UpperCase(50).translate(["xyz. " * 3000], overlong="split")
    assert out.count("XYZ") == 3000


def test_refusals():
    for wrong in (3, None, b"one"):
        with pytest.raises(UserError, match=f"expected text, or a list of lines, not {type(wrong).__name__}"):
            UpperCase().translate(wrong)
    with pytest.raises(UserError, match="line 2: must be text, not int"):
        UpperCase().translate(["one", 2])
    with pytest.raises(UserError, match="n_best=2: translate returns only the best output; n_best returns several"):
        UpperCase().translate("one", beam=2, n_best=2)
    with pytest.raises(UserError, match="overlong='cut' is not one of error, truncate, split, skip"):
        UpperCase().translate(["one"], overlong="cut")
    with pytest.raises(UserError, match="tokenizer of 280 tokens, but the model has 270"):
        _ = UpperCase(vocab_size=270).translator
    with pytest.raises(UserError, match="ids of pad, bos and eos differ"):
        _ = UpperCase(eos_id=5).translator
    with pytest.raises(UserError, match="needs an encoder-decoder"):
        _ = UpperCase(architecture="decoder", encoder_layers=0, tie_embeddings="none").translator
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Translator(TransformerConfig(vocab_size=280), None, lambda rows: [], "folder")


def test_a_long_line_is_skipped_on_request():
    told = []
    found = UpperCase(10).n_best(["x" * 30, "one"], overlong="skip", first_line=5, on_overlong=told.append)
    assert [line[0].text for line in found] == ["", "ONE"]
    assert told == [5]
