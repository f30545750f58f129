"""One corpus on disk, some pairs at a time: all of them, in order, and files that don't fit each other."""

from __future__ import annotations

import gzip

import pytest

from mlx_transformer.data import line_files
from mlx_transformer.data.corpus import PairFiles, read_parallel
from mlx_transformer.system.errors import UserError


def files(folder, source: list[str], target: list[str], ending: str = "") -> PairFiles:
    for name, lines in (("s", source), ("t", target)):
        data = "".join(f"{line}\n" for line in lines).encode()
        (folder / f"{name}{ending}").write_bytes(gzip.compress(data) if ending else data)
    return PairFiles(source=str(folder / f"s{ending}"), target=str(folder / f"t{ending}"))


def all_pairs(corpus: PairFiles) -> list[tuple[str, str]]:
    return [pair for part in corpus.parts() for pair in zip(*part, strict=True)]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("block", [1, 7, 50, 1 << 20])
def test_two_files_stay_in_step_whatever_their_blocks_are(tmp_path, monkeypatch, ending, block):
    monkeypatch.setattr(line_files, "BLOCK", block)
    source = ["x" * (i % 5) for i in range(100)]
    target = [f"{'y' * (i % 11)}{i}" for i in range(100)]
    assert all_pairs(files(tmp_path, source, target, ending)) == list(zip(source, target, strict=True))


def test_pairs_without_text_are_counted_and_tags_put_before_the_others(tmp_path):
    corpus = files(tmp_path, ["a", " ", "", "\t", "b"], ["A", "B", "C", "D", "\u3000"])
    tagged = PairFiles(source=corpus.source, target=corpus.target, tag="<2de> ")
    source, target, dropped = zip(*tagged.usable_parts(), strict=True)
    assert ([s for part in source for s in part], [t for part in target for t in part]) == (["<2de> a"], ["A"])
    assert sum(dropped) == 4
    assert all_pairs(tagged) == all_pairs(corpus)  # of parts, the tag is no part


@pytest.mark.parametrize("block", [5, 1 << 20])
def test_unequal_counts_are_told_as_of_files_read_whole(tmp_path, monkeypatch, block):
    source = ["x" * (5 + i * i % 90) for i in range(60)]
    corpus = files(tmp_path, source, [line * 2 for line in source[:20] + source[21:]])
    with pytest.raises(UserError) as whole:
        read_parallel(str(corpus.source), str(corpus.target))
    monkeypatch.setattr(line_files, "BLOCK", block)
    with pytest.raises(UserError, match=r"60 lines, .* has 59; .* First suspect: line 2[01] ") as caught:
        all_pairs(corpus)
    assert str(caught.value) == str(whole.value)


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"s and .*t: no pairs in it; give files"):
        all_pairs(files(tmp_path, [], []))
    (tmp_path / "p.tsv").touch()
    with pytest.raises(UserError, match=r"p\.tsv: no pairs in it"):
        all_pairs(PairFiles(pairs=str(tmp_path / "p.tsv")))


def test_size_is_about_that_of_the_text(tmp_path):
    lines = ["some words"] * 100
    assert files(tmp_path, lines, lines).size() == 2 * 1100
    packed = files(tmp_path, lines, lines, ".gz")
    assert packed.size() == 4 * sum(path.stat().st_size for path in packed.files)
    assert PairFiles(source="/dev/null", target="/dev/null").size() == 0
