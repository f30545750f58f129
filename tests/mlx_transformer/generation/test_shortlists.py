"""Shortlists that are counted by a model's own attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import caller, refused
from small_models import write_text_model

from mlx_transformer import Transformer
from mlx_transformer.core.shortlist import open_shortlist, read_shortlist
from mlx_transformer.generation.alignment import Counts

call = pytest.fixture(caller)


def test_counts_order_the_candidates_of_each_source_token() -> None:
    counts, more = Counts(10), Counts(10)
    eye = np.eye(3)
    for target in ([7, 4], [7, 5], [6, 4], [9, 4]):
        counts.add([3, 5, 2], target, eye[:2])
    more.add([5, 2], [8, 8, 8, 8], np.array([[0.1, 0.9]] * 4))  # the source's end has nothing aligned with it
    more.add([2], [8], np.array([[1.0]]))
    counts.join(more)
    shortlist = counts.shortlist(6, first=3, best=2)
    assert shortlist.offsets.tolist() == [0, 0, 0, 0, 2, 2, 4]
    assert shortlist.ids.tolist() == [6, 7, 4, 8]  # of 6 and 9, as frequent, the lower id; ascending
    assert counts.shortlist(6, first=3, best=9).ids.tolist() == [6, 7, 9, 4, 5, 8]


def test_a_command_builds_one_that_translate_and_export_take(call, tmp_path: Path) -> None:
    place = write_text_model(tmp_path)

    def run(*arguments: object) -> str:
        status, out, error = call(*arguments)
        assert status == 0, error
        return out

    source, reference, lex = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "lex.bin"
    source.write_text("one two\nthree four five\n" + "six " * 80 + "\n")
    reference.write_text("größer\n東京 five two\nsix\n")
    arguments = ["--source", source, "--reference", reference, "--best", 3, "--first", 4]
    out = run("shortlist", place / "model", lex, *arguments)
    assert "from 2 pairs; 1 pairs longer than the model takes left out" in out
    model = Transformer.load(place / "model")
    assert model.tokenizer is not None
    lists = read_shortlist(lex)
    written = {*model.tokenizer.encode("größer")[:-1], *model.tokenizer.encode("東京 five two")[:-1]}
    assert {*lists.ids.tolist()} <= written
    assert (lists.first, lists.best) == (4, 3)
    line = "one two three"
    plain, listed = (run("translate", place / "model", line, *more) for more in ([], ["--shortlist", lex]))
    assert listed != plain
    model.shortlist = open_shortlist(lex, model.config)
    assert model.translate(line) == listed.rstrip("\n")
    for target in ("portable", "cpu"):
        out = tmp_path / target
        run("export", place / "model", out, "--target", target, "--shortlist", lex)
        assert run("translate", out, line) == listed
        assert run("translate", out, line, "--shortlist", "none") == plain
    run("export", place / "model", tmp_path / "none", "--shortlist", "none")
    assert run("translate", tmp_path / "none", line) == plain
    refused(call("shortlist", place / "model", lex, *arguments), "lex.bin: holds another shortlist")
    refused(
        call("shortlist", place / "model", tmp_path / "b", *arguments, "--first", 999), "--first 999 must be from 1"
    )


@pytest.mark.parametrize("content", [b"", b"\xf5\x17" * 40])
def test_a_wrong_file_is_one_line(content: bytes, call, tmp_path: Path) -> None:
    place, lex = write_text_model(tmp_path), tmp_path / "lex.bin"
    lex.write_bytes(content)
    refused(call("translate", place / "model", "one", "--shortlist", lex), "lex.bin: no shortlist of Marian's")
    refused(call("export", place / "model", tmp_path / "out", "--shortlist", lex), "lex.bin: no shortlist of Marian's")
    assert not (tmp_path / "out").exists()
