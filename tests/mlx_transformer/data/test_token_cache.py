"""The cache: what it gives is what there would be without it; what isn't whole or has changed is made anew."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
from waiting import PATIENCE

from mlx_transformer.data import stored_text as token_cache
from mlx_transformer.data.corpus import PairFiles
from mlx_transformer.data.stored_text import StoredText, TokenCache, encoded
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import default_folder
from mlx_transformer.text.tokenizer import Tokenizer

SOURCE = [f"some words {i * i}" if i % 7 else "" for i in range(300)]
TARGET = [f"einige Wörter {i} {'x' * (i % 30)}" for i in range(300)]
USABLE = [i for i, line in enumerate(SOURCE) if line]


@pytest.fixture
def corpus(tmp_path) -> PairFiles:
    for name, lines in (("s", SOURCE), ("t", TARGET)):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.utime(path, ns=(10**18, 10**18))  # long ago
    return PairFiles(source=str(tmp_path / "s"), target=str(tmp_path / "t"))


@pytest.mark.parametrize("name", ["p.tsv", "p.jsonl"])
def test_a_large_file_without_lines_is_refused_before_all_of_it_is_read(tmp_path, cache, name, monkeypatch):
    with open(tmp_path / name, "wb") as file:
        file.truncate(50 << 30)  # a hole, which takes no room on the disk
    monkeypatch.setattr(token_cache, "sha256", lambda _: pytest.fail("reads all of it"))
    with pytest.raises(UserError, match=f"{name}, line 1: more than 16 MB in one line; is it text?"):
        StoredText([PairFiles(pairs=str(tmp_path / name))], cache, seed=1, set_aside=True)


@pytest.fixture
def cache(tmp_path) -> TokenCache:
    return TokenCache(tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SOURCE + TARGET, 300)


def ids(sequences) -> list[list[int]]:
    return [sequences[i].tolist() for i in range(len(sequences))]


def token_folder(cache: TokenCache) -> Path:
    (folder,) = cache.folder.glob("tokens-*")
    return folder


def never(*_: object, **__: object):
    raise AssertionError("read again")


@pytest.mark.parametrize("vocabulary", [1 << 16, 10])
def test_tokens_are_those_of_text_in_memory(corpus, cache, tokenizer, monkeypatch, vocabulary):
    monkeypatch.setattr(token_cache, "WIDE", vocabulary)
    source, target = cache.tokens([corpus], tokenizer, [len(USABLE)])
    assert (
        ids(source)
        == tokenizer.encode_batch([SOURCE[i] for i in USABLE])
        == ids(encoded(tokenizer, [SOURCE[i] for i in USABLE]))
    )
    assert ids(target) == tokenizer.encode_batch([TARGET[i] for i in USABLE])
    assert ids(source.select(np.array([5, 2, 2]))) == [ids(source)[i] for i in (5, 2, 2)]
    width = 2 if vocabulary == 1 << 16 else 4
    assert (token_folder(cache) / "source.ids").stat().st_size == width * source.lengths.sum()
    monkeypatch.setattr(PairFiles, "parts", never)
    again, _ = TokenCache(cache.folder).tokens([corpus], tokenizer, [len(USABLE)])
    assert ids(again) == ids(source)


def test_several_corpora_are_one_after_another(corpus, cache, tokenizer):
    tagged = PairFiles(source=corpus.target, target=corpus.target, tag="<x> ")
    source, target = cache.tokens([corpus, tagged], tokenizer, [len(USABLE), 300])
    assert ids(source) == tokenizer.encode_batch([SOURCE[i] for i in USABLE] + [f"<x> {line}" for line in TARGET])
    assert ids(target) == tokenizer.encode_batch([TARGET[i] for i in USABLE] + TARGET)
    assert len(list(cache.folder.glob("tokens-*"))) == 2


def test_another_text_tokenizer_or_tag_has_other_tokens(corpus, cache, tokenizer):
    cache.tokens([corpus], tokenizer, [300])
    cache.tokens([corpus], Tokenizer.train(TARGET, 270), [300])
    cache.tokens([PairFiles(source=corpus.source, target=corpus.target, tag="a")], tokenizer, [300])
    Path(str(corpus.source)).write_text("".join(f"{line}!\n" for line in SOURCE), encoding="utf-8")
    source, _ = cache.tokens([corpus], tokenizer, [300])
    assert len(list(cache.folder.glob("tokens-*"))) == 4
    assert ids(source)[0] == tokenizer.encode("!")


@pytest.mark.parametrize("name", ["source.ids", "target.ids", "source.lengths", "target.lengths", "meta.json"])
def test_what_is_not_whole_is_made_anew(corpus, cache, tokenizer, name):
    expected = ids(cache.tokens([corpus], tokenizer, [300])[0])
    path = token_folder(cache) / name
    whole = path.read_bytes()
    for data in (whole[:-2], whole[: len(whole) // 2], b"", whole + b"\0\0\0\0", None):
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        again, _ = cache.tokens([corpus], tokenizer, [300])
        assert ids(again) == expected
        assert path.read_bytes() == whole


def test_a_file_cut_short_while_it_is_read_is_one_line(corpus, cache, tokenizer):
    source, _ = cache.tokens([corpus], tokenizer, [300])
    os.truncate(token_folder(cache) / "source.ids", 10)
    with pytest.raises(UserError, match=r"source.ids: has become shorter; remove .*tokens-.*, it is made anew"):
        source[len(source) - 1]


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_transformer.data import stored_text as token_cache
from mlx_transformer.data.corpus import PairFiles
from mlx_transformer.text.tokenizer import Tokenizer

encode, calls = Tokenizer.encode_batch, []
def counted(*arguments):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*arguments)
Tokenizer.encode_batch = counted
from mlx_transformer.data import line_files
line_files.BLOCK = 500
folder, vocabulary = map(Path, sys.argv[1:])
corpus = PairFiles(source=str(folder / "s"), target=str(folder / "t"))
token_cache.TokenCache(folder / "cache").tokens([corpus], Tokenizer.load(vocabulary), [300])
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_taken_for_whole(corpus, cache, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / "tokenizer.json")]
    assert forked.run(command, timeout=PATIENCE).returncode == -signal.SIGKILL
    assert not list(cache.folder.glob("tokens-*"))
    assert list(cache.folder.glob(".tokens-*"))  # it was killed in the middle
    source, _ = cache.tokens([corpus], tokenizer, [300])
    assert ids(source) == tokenizer.encode_batch([SOURCE[i] for i in USABLE])
    assert not list(cache.folder.glob(".tokens-*"))


def test_a_digest_is_read_again_only_where_the_file_may_have_changed(corpus, cache, tmp_path, monkeypatch):
    path = tmp_path / "s"
    first = cache.digest(path)
    monkeypatch.setattr(token_cache, "sha256", never)
    assert cache.digest(path) == first
    monkeypatch.undo()
    times = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"words", b"WORDS"))
    assert cache.digest(path) != first
    os.utime(path, ns=(times, times))
    shutil.copy(path, tmp_path / "copy")
    os.utime(tmp_path / "copy", ns=(times, times))
    changed = cache.digest(path)
    (tmp_path / "other").write_bytes(path.read_bytes())
    os.utime(tmp_path / "other", ns=(times, times))
    (tmp_path / "other").replace(path)  # same size and time, another file
    read = []
    monkeypatch.setattr(token_cache, "sha256", lambda file: read.append(file) or "again")
    assert cache.digest(path) == "again"
    assert (read, changed) == ([path], changed)
    with pytest.raises(UserError, match="none: cannot be read"):
        cache.digest(tmp_path / "none")


def test_a_digest_of_what_was_just_written_is_not_kept(cache, tmp_path):
    path, soon = tmp_path / "fresh", time.time() + 100
    path.write_text("a", encoding="utf-8")
    os.utime(path, (soon, soon))  # so that it was just written, however long this takes
    first = cache.digest(path)
    assert not list(cache.folder.glob("digests/*"))
    path.write_text("b", encoding="utf-8")
    os.utime(path, (soon, soon))
    assert cache.digest(path) != first


def test_facts_are_kept_by_all_that_they_depend_on(cache):
    made = []

    def make() -> list[int]:
        made.append(1)
        return [len(made)]

    assert cache.fact({"of": "a"}, make) == cache.fact({"of": "a"}, make) == [1]
    assert cache.fact({"of": "b"}, make) == [2]
    for path in cache.folder.glob("facts/*"):
        path.write_text('{"key": 1', encoding="utf-8")
    assert cache.fact({"of": "a"}, make) == [3]


def test_a_cache_that_cannot_be_written_is_one_line(corpus, tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.*: (the token cache )?could not be written"):
        TokenCache(tmp_path / "file").tokens([corpus], tokenizer, [300])


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "mlx-transformer"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == Path.home() / ".cache" / "mlx-transformer"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path.home() / "Library" / "Caches" / "mlx-transformer"
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="this user has no home: name a folder by cache"):
        default_folder()


def homeless():
    raise RuntimeError("Could not determine home directory.")
