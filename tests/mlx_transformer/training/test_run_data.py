"""Runs on every kind of text: the same weights whether it is in memory or in the cache, and exact resume."""

from __future__ import annotations

import json

import pytest
from choices import both_choices, gpu_in_slow
from combined import slow
from tiny_run import MODEL, reading, recipe, write_pairs

from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.data import EncodedText, load_data
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices


def changed(folder, data: dict, **training) -> Recipe:
    """The tiny recipe with other keys of [data]; None takes one away."""
    tables = recipe(folder, **training).to_dict()
    chosen = {key: value for key, value in {**tables["data"], **data}.items() if value is not None}
    return Recipe.from_dict({"data": chosen, "model": MODEL, "training": {"steps": 7, **tables["training"]}})


def train(folder, out: str, data: dict, resume: bool = False, **training):
    return Trainer(changed(folder, data, **training), folder / out, resume).run()


def weights(folder, out: str) -> bytes:
    return (folder / out / "model" / "model.safetensors").read_bytes()


def write_tsv(folder, seed: int, count: int = 90) -> str:
    source, target = (path.read_text(encoding="utf-8").split() for path in write_pairs(folder, count, seed))
    path = folder / f"{seed}.tsv"
    path.write_text("".join(f"{s}\t{t}\n" for s, t in zip(source, target, strict=True)), encoding="utf-8")
    return str(path)


def write_words(folder, count: int = 120) -> None:
    """Lines of letters in place of digits, of which BPE makes no larger tokens."""
    for path in write_pairs(folder, count):
        path.write_text(
            path.read_text(encoding="utf-8").translate(str.maketrans("0123456789", "abcdefghij")), encoding="utf-8"
        )


def mixed(folder) -> dict:
    """One corpus of files, and one of half as many pairs that counts twice as much."""
    first = [str(path) for path in write_pairs(folder)]
    second = {"pairs": write_tsv(folder, 3, 60), "weight": 2.0, "tag": "<x> "}
    tables = [{"source": first[0], "target": first[1], "weight": 1.0}, second]
    return {"source": None, "target": None, "corpora": tables, "vocab_size": 270}


@gpu_in_slow
@pytest.mark.usefixtures("on_cpu")
def test_a_run_with_the_cache_is_bit_identical_and_goes_on_without_it(tmp_path):
    train(tmp_path, "memory", {}, steps=7)
    train(tmp_path, "cache", {"cache": str(tmp_path / "kept")}, steps=7)
    assert weights(tmp_path, "cache") == weights(tmp_path, "memory")
    assert list((tmp_path / "kept").glob("tokens-*"))
    train(tmp_path, "parts", {"cache": str(tmp_path / "kept")}, steps=3)
    train(tmp_path, "parts", {}, resume=True, steps=5)
    train(tmp_path, "parts", {"cache": str(tmp_path / "moved")}, resume=True, steps=7)
    assert weights(tmp_path, "parts") == weights(tmp_path, "memory")
    records = [
        json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))["data"] for name in ("memory", "parts")
    ]
    assert records[0] == records[1]


@pytest.mark.fast("own")
@pytest.mark.usefixtures("on_cpu")
def test_a_mixture_resumes_bit_for_bit_over_the_end_of_an_epoch(tmp_path):
    data = mixed(tmp_path)
    train(tmp_path, "straight", data, steps=28)
    train(tmp_path, "parts", {**data, "cache": str(tmp_path / "kept")}, steps=4)
    result = train(tmp_path, "parts", data, resume=True, steps=28)
    assert result.state.epoch > 1
    assert weights(tmp_path, "parts") == weights(tmp_path, "straight")
    other = [{**table, "weight": 1.0} for table in data["corpora"]]
    with pytest.raises(UserError, match=r"recipe\.data\.corpora\.1\.weight was 2.0, now 1.0"):
        train(tmp_path, "parts", {**data, "corpora": other}, resume=True, steps=29)


def test_shares_of_a_run_are_its_weights(tmp_path):
    chosen = changed(tmp_path, mixed(tmp_path))
    data = load_data(chosen)
    tokenizer = data.train.tokenizer(270, None)
    batches = EncodedText(data.train, reading(tokenizer, chosen), chosen).batches(chosen, seed=1)
    tag = tokenizer.encode("<")[0]
    for epoch in (0, 3):
        first = [row[0] for batch in batches.batches(epoch) for row in batch.source.tolist() if row[0]]
        tagged = sum(tokenizer.decode([id]).startswith("<") for id in first)
        assert len(first) == len(data.train) == 179
        assert tagged == round(179 * 2 / 3)
    assert tag


def test_tables_whose_text_has_moved_may_go_on(tmp_path):
    data = mixed(tmp_path)
    train(tmp_path, "run", data, steps=2)
    moved = tmp_path / "moved.tsv"
    (tmp_path / "3.tsv").rename(moved)
    tables = [data["corpora"][0], {**data["corpora"][1], "pairs": str(moved)}]
    assert train(tmp_path, "run", {**data, "corpora": tables}, resume=True, steps=3).state.step == 3


@slow
@pytest.mark.usefixtures("on_cpu")
def test_bpe_dropout_resumes_bit_for_bit(tmp_path):
    write_words(tmp_path)
    data = {"bpe_dropout": 0.3, "vocab_size": 300}
    train(tmp_path, "straight", data, steps=8)
    train(tmp_path, "parts", data, steps=3)
    train(tmp_path, "parts", data, resume=True, steps=8)
    assert weights(tmp_path, "parts") == weights(tmp_path, "straight")
    train(tmp_path, "none", {"vocab_size": 300}, steps=8)
    assert weights(tmp_path, "none") != weights(tmp_path, "straight")


def test_validation_text_is_never_dropped(tmp_path):
    write_words(tmp_path)
    chosen = changed(tmp_path, {"bpe_dropout": 0.5, "vocab_size": 300})
    data = load_data(chosen)
    tokenizer = data.train.tokenizer(300, None)
    plain = sum(len(ids) for ids in tokenizer.encode_batch(data.valid.target))
    batches = EncodedText(data.valid, reading(tokenizer, chosen), chosen).batches(chosen, seed=0, grow=True)
    assert sum(batch.tokens for batch in batches.batches(0)) == plain
    train_plain = sum(len(ids) for ids in tokenizer.encode_batch(data.train.text.target))
    dropped = EncodedText(data.train, reading(tokenizer, chosen), chosen).batches(chosen, seed=1)
    counts = [sum(batch.tokens for batch in dropped.batches(epoch)) for epoch in (0, 0, 1)]
    assert counts[0] == counts[1] != counts[2]
    assert min(counts) > train_plain


def test_a_vocabulary_that_is_there(tmp_path):
    made = Tokenizer.train(["0123 4567 89"] * 9, 275)
    made.save(tmp_path / "tokenizer.json")
    train(tmp_path, "run", {"tokenizer": str(tmp_path), "vocab_size": None}, steps=2)
    assert Tokenizer.load(tmp_path / "run" / "model").fingerprint == made.fingerprint
    (tmp_path / "tokenizer.json").unlink()
    train(tmp_path, "run", {"tokenizer": str(tmp_path), "vocab_size": None}, resume=True, steps=3)
    with pytest.raises(UserError, match="no such tokenizer file"):
        train(tmp_path, "other", {"tokenizer": str(tmp_path), "vocab_size": None})


def test_the_vocabulary_of_some_lines(tmp_path):
    write_words(tmp_path, 2000)
    train(tmp_path, "all", {"vocab_size": 300}, steps=1)
    train(tmp_path, "some", {"vocab_size": 300, "vocab_lines": 40}, steps=1)
    found = [Tokenizer.load(tmp_path / name).fingerprint for name in ("all", "some")]
    assert found[0] != found[1]


def test_pairs_that_do_not_fit_are_named_with_their_line(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text("a\tb\nc\n", encoding="utf-8")
    files = {"source": None, "target": None}
    for cache in (None, str(tmp_path / "kept")):
        with pytest.raises(UserError, match=r"p\.tsv, line 2: 1 columns"):
            load_data(changed(tmp_path, {**files, "pairs": str(path), "cache": cache}))
    with pytest.raises(UserError, match=r"p\.tsv, line 2: 1 columns"):
        load_data(changed(tmp_path, {"valid_pairs": str(path)}))
