"""The text of a run, and the scores of translations."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from tiny_run import reading, recipe, write_pairs

from mlx_transformer.data.batches import SortedBatches, TokenBatches
from mlx_transformer.device import deciding_as
from mlx_transformer.generation.evaluate import score
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.data import EncodedText, load_data, train_tokenizer
from mlx_transformer.training.recipe import Recipe

pytestmark = pytest.mark.gpu_path


def test_validation_is_set_aside_by_the_seed(tmp_path):
    source, _ = write_pairs(tmp_path, 500)
    lines = source.read_text(encoding="utf-8").split("\n")[:-1]
    data = load_data(recipe(tmp_path))
    assert (len(data.train), len(data.valid), data.held_out, data.dropped) == (495, 5, None, 0)
    assert sorted(data.train.text.source + data.valid.source) == sorted(lines)
    assert data.valid.source == load_data(recipe(tmp_path)).valid.source
    assert data.valid.source != load_data(recipe(tmp_path, seed=2)).valid.source
    assert data.record["train"]["pairs"] == 495
    assert data.record["valid"].keys() == {"pairs", "source", "target"}


def test_files_for_validation_are_taken_whole(tmp_path):
    source, target = write_pairs(tmp_path, 50)
    valid = write_pairs(tmp_path, 7, seed=1)
    files = {"source": str(source), "target": str(target)}
    files |= {"valid_source": str(valid[0]), "valid_target": str(valid[1])}
    data = load_data(Recipe.from_dict({"data": files, "training": {"steps": 1}}))
    assert (len(data.train), len(data.valid)) == (50, 7)
    assert load_data(Recipe.from_dict({"data": files, "training": {"steps": 1}})).record == data.record


def test_one_pair_is_not_enough(tmp_path):
    for path in write_pairs(tmp_path, 3):
        path.write_text("1\n\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="1 usable pairs; training needs more"):
        load_data(recipe(tmp_path))


def test_the_built_in_corpus_brings_all_parts():
    options = {"corpus": "cldr:en-de", "train_pairs": 300}
    data = load_data(Recipe.from_dict({"data": options, "training": {"steps": 1, "seed": 5}}))
    assert data.held_out is not None
    assert len(data.train) >= 300
    assert not set(zip(data.train.text.source, data.train.text.target, strict=True)) & set(
        zip(data.held_out.source, data.held_out.target, strict=True)
    )


def test_batches_of_a_cpu_are_tight_and_those_of_a_gpu_few_shapes(tmp_path):
    write_pairs(tmp_path, 200)
    chosen = recipe(tmp_path)
    data = load_data(chosen)
    tokenizer = train_tokenizer(data, replace(chosen, data=replace(chosen.data, vocab_size=300)))
    with deciding_as("cpu"):
        tight = EncodedText(data.train, reading(tokenizer, chosen), chosen).batches(chosen, seed=1)
    assert isinstance(tight, SortedBatches)
    with deciding_as("gpu"):
        few = EncodedText(data.train, reading(tokenizer, chosen), chosen).batches(chosen, seed=1)
    assert type(few) is TokenBatches
    assert min(batch.target_out.shape[1] for batch in few.batches(0)) >= 16
    assert tight.shapes != few.shapes


def test_scores():
    references = ["The cat sat on the mat.", "Es ist 12:30 Uhr.", "one"]
    perfect = score(references, references)
    assert (perfect["bleu"], perfect["chrf"], perfect["exact_match"], perfect["lines"]) == (100, 100, 100, 3)
    assert "ter" not in perfect
    edited = score(["The cat sat on a mat.", *references[1:]], references, ter=True)
    assert edited["ter"] == pytest.approx(100 / 11, abs=0.01)  # one word of eleven
    assert edited["ter_signature"].startswith("nrefs:1|case:lc|tok:tercom")
    assert perfect["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    lower = score(["the cat sat on the mat.", *references[1:]], references)
    assert lower["exact_match"] == 66.67
    assert lower["bleu"] < 100
    assert score(["", "", ""], references)["bleu"] == 0
    with pytest.raises(UserError, match="2 translations but 3 references"):
        score(["a", "b"], references)
    with pytest.raises(UserError, match="no lines to score"):
        score([], [])


def test_known_scores():
    """BLEU by hand: 5 of 6, 3 of 5, 2 of 4, 1 of 3 n-grams match, no brevity penalty."""
    logging.getLogger("sacrebleu").setLevel(logging.ERROR)
    scores = score(["a b c d x f"], ["a b c d e f"])
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25, abs=0.01)
