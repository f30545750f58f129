"""Text policies: empty lines, lines that are too long, bytes that are no text, one line out for each line in."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from mlx_transformer.generation.options import Hypothesis
from mlx_transformer.generation.translate import Translator, translate_stream
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["one two three. four five six! " * 3], vocab_size=280)


def translator(max_positions=64, calls=None, **config):
    """Translates by upper-casing; its n-th best output has n exclamation marks."""

    def search(rows, n_best=1, **options):
        if calls is not None:
            calls.append(rows)
        assert all(len(row) <= max_positions and row[-1] == 2 for row in rows)
        texts = [TOKENIZER.decode(row).upper() for row in rows]
        return [[Hypothesis(TOKENIZER.encode(t + "!" * n)[:-1], -1.0 - n) for n in range(n_best)] for t in texts]

    sizes = {"vocab_size": 280, "max_positions": max_positions, "d_model": 8, "heads": 1}
    return Translator(TransformerConfig(**{**sizes, **config}), TOKENIZER, search)


def test_lines_stay_aligned():
    lines = ["one", "", "two\u2028three", "   ", "four"]
    assert translator().translate(lines) == ["ONE", "", "TWO\u2028THREE", "", "FOUR"]
    assert translator().translate([]) == []
    assert translator().translate([""]) == [""]


def test_n_best_texts_and_scores():
    (found,) = translator().n_best(["one"], n_best=3)
    assert [(t.text, t.score) for t in found] == [("ONE", -1.0), ("ONE!", -2.0), ("ONE!!", -3.0)]


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
    with pytest.raises(UserError, match="overlong='cut' is not one of error, truncate, split"):
        translator().translate(["one"], overlong="cut")
    with pytest.raises(UserError, match="tokenizer of 280 tokens, but the model has 270"):
        translator(vocab_size=270)
    with pytest.raises(UserError, match="ids of pad, bos and eos differ"):
        translator(eos_id=5)
    with pytest.raises(UserError, match="needs an encoder-decoder"):
        translator(architecture="decoder", encoder_layers=0, tie_embeddings="none")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Translator(TransformerConfig(vocab_size=280), None, lambda rows: [], "folder")


def test_a_file_keeps_its_lines(tmp_path, capsys):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\x85\xffthree\nfour\rfive")
    translate_stream(translator(), source, target)
    assert target.read_bytes() == "ONE\n\nTWO\ufffd\ufffdTHREE\nFOUR\rFIVE\n".encode()
    assert "line 3: not UTF-8" in capsys.readouterr().err
    translate_stream(translator(), source, target, n_best=2)
    assert target.read_bytes().split(b"\n")[0] == b"ONE\tONE!"
    with pytest.raises(UserError, match="is the input as well"):
        translate_stream(translator(), source, source)
    with pytest.raises(UserError, match="cannot be read"):
        translate_stream(translator(), tmp_path / "none", target)
    with pytest.raises(UserError, match="cannot be written"):
        translate_stream(translator(), source, tmp_path / "none" / "out")


def test_standard_streams_and_newlines_in_outputs(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n")))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
    model = translator()
    model.search = lambda rows, **options: [[Hypothesis(TOKENIZER.encode("a\nb")[:-1], 0.0)] for _ in rows]
    translate_stream(model, None, None)
    assert out.getvalue() == b"a b\na b\n"


def test_a_long_stream_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_transformer.generation.translate.STREAM_LINES", 3)
    calls, source = [], tmp_path / "in"
    source.write_text("one\n" * 7 + "xyz" * 40 + "\n")
    with pytest.raises(UserError, match="line 8: "):
        translate_stream(translator(calls=calls), source, tmp_path / "out")
    assert [len(rows) for rows in calls] == [3, 3]
    assert (tmp_path / "out").read_text() == "ONE\n" * 6
