"""The text of a run: the same in memory and on disk, from one corpus or several."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from mlx_transformer.data import training_text
from mlx_transformer.data.corpus import PairFiles, ParallelText
from mlx_transformer.data.stored_text import StoredText
from mlx_transformer.data.training_text import TrainingText, load_training, read_pairs
from mlx_transformer.system.errors import UserError

SOURCE = [f"one {i * i} two {'three ' * (i % 5)}" if i % 9 else " " for i in range(400)]
TARGET = [f"eins {i} zwei {'drei ' * (i % 4)}" for i in range(400)]


@pytest.fixture
def plain(tmp_path) -> PairFiles:
    for name, lines in (("s", SOURCE), ("t", TARGET)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return PairFiles(source=str(tmp_path / "s"), target=str(tmp_path / "t"))


@pytest.fixture
def others(tmp_path) -> list[PairFiles]:
    rows = [json.dumps({"translation": {"en": f"four {i}", "fr": f"quatre {i}"}}) for i in range(150)]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (tmp_path / "p.tsv").write_text("".join(f"five {i}\tcinco {i % 7}\n" for i in range(90)), encoding="utf-8")
    json_pairs = PairFiles(pairs=str(tmp_path / "p.jsonl.gz"), languages="en-fr", tag="<2fr> ")
    return [json_pairs, PairFiles(pairs=str(tmp_path / "p.tsv"), tag="<2es> ")]


def contents(text: TrainingText) -> list[tuple[str, str]]:
    parts = text.text.parts()
    return [pair for source, target in parts for pair in zip(source, target, strict=True)]


@pytest.mark.fast("False-True", "True-False")
@pytest.mark.parametrize("set_aside", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_on_disk_all_is_as_in_memory(plain, others, tmp_path, set_aside, several):
    corpora = [plain, *others] if several else [plain]
    weights = [1.0, 2.0, 0.5] if several else None
    made = [
        load_training(corpora, weights, seed=5, set_aside=set_aside, cache=cache)
        for cache in (None, tmp_path / "cache", tmp_path / "cache")
    ]
    memory, valid, dropped = made[0]
    assert dropped == 45
    assert len(memory) == (595 if several else 355) - (len(valid) if valid else 0) == sum(memory.sizes)
    for text, aside, left_out in made[1:]:
        assert isinstance(text.text, StoredText)
        assert (aside, left_out) == (valid, dropped)
        assert (text.sizes, text.digests, len(text)) == (memory.sizes, memory.digests, len(memory))
        assert contents(text) == contents(memory)
        assert sorted(text.lines([0, 1])) == sorted(memory.lines([0, 1]))
        assert list(text.lines([1])) == list(memory.lines([1])) == [line for _, line in contents(memory)]
        assert list(text.lines([0, 1], 20)) == list(memory.lines([0, 1], 20))
        for count in (None, 50):
            tokenizer = memory.tokenizer(300, count)
            assert text.tokenizer(300, count).to_json() == tokenizer.to_json()
        stored, ours = (each.examples(tokenizer, 64) for each in (text, memory))
        np.testing.assert_array_equal(stored.source_lengths, ours.source_lengths)
        everything = np.arange(len(stored))
        for side, other in zip(stored.rows(everything, 1), ours.rows(everything, 1), strict=True):
            assert [row.tolist() for row in side] == [row.tolist() for row in other]


def test_a_second_start_reads_no_text(plain, tmp_path, monkeypatch):
    def start() -> tuple:
        text, valid, _ = load_training([plain], None, seed=1, set_aside=True, cache=tmp_path / "cache")
        examples = text.examples(text.tokenizer(300, 30), 64)
        return valid, text.digests, examples.rows(np.arange(9), 0)[0][8].tolist()

    def never(*_: object):
        raise AssertionError("read again")

    first = start()
    monkeypatch.setattr(PairFiles, "usable_parts", never)  # beyond the first pairs, which are read again
    assert start() == first


def test_large_text_stays_on_disk_unless_bpe_dropout_needs_it(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(training_text, "default_folder", lambda: tmp_path / "user")
    monkeypatch.setattr(training_text, "LARGE", plain.size())
    assert isinstance(load_training([plain], None, seed=1, set_aside=True)[0].text, ParallelText)
    monkeypatch.setattr(training_text, "LARGE", plain.size() - 1)
    assert isinstance(load_training([plain], None, seed=1, set_aside=True)[0].text, StoredText)
    assert (tmp_path / "user").is_dir()
    dropped = load_training([plain], None, seed=1, set_aside=True, bpe_dropout=0.1)[0]
    assert isinstance(dropped.text, ParallelText)
    assert dropped.examples(dropped.tokenizer(300, None), 64).source_lengths.sum() > 1.4 * sum(
        map(len, dropped.tokenizer(300, None).encode_batch(dropped.text.source))
    )


def test_some_lines_are_of_so_many_pairs(plain):
    text = load_training([plain], None, seed=1, set_aside=False)[0]
    lines = list(text.lines([0, 1], 30))
    assert len(lines) == 60
    assert set(zip(lines[::2], lines[1::2], strict=True)) <= set(contents(text))
    other = load_training([plain], None, seed=2, set_aside=False)[0]
    assert list(other.lines([0, 1], 30)) != lines
    assert sorted(text.lines([0, 1], 10**6)) == sorted(text.lines([0, 1]))
    assert list(text.lines([1], 30)) == lines[1::2]


@pytest.mark.parametrize("cache", [False, True])
def test_one_usable_pair_is_not_enough_to_set_aside(tmp_path, cache):
    path = tmp_path / "p.tsv"
    path.write_text("a\tb\n\tc\n", encoding="utf-8")
    where = Path(tmp_path / "cache") if cache else None
    with pytest.raises(UserError, match=r"p\.tsv: 1 usable pairs; training needs more, or give validation files"):
        load_training([PairFiles(pairs=str(path))], None, seed=1, set_aside=True, cache=where)


def test_validation_keeps_every_pair(others, plain):
    assert len(read_pairs(plain)) == 400
    text = read_pairs(others[0])
    assert (text.source[3], text.target[3], len(text)) == ("<2fr> four 3", "quatre 3", 150)
