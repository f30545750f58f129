"""The built-in phrases of the CLDR: exact, disjoint, the same as ever; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mlx_transformer.data import built_in
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.recipe import Recipe, load_recipe

QUICKSTART = {
    "train": ("61f343513bdf154c", "665d851548ad439f"),
    "valid": ("d3c290c0e9545cba", "ea72728fc6b25196"),
    "held_out": ("26faaf2d0b8d2642", "6e1eba25e49472ed"),
}
"""The first digits of SHA-256 of the quickstart's text, from which RESULTS.md has its scores: source, target."""


DREW = "2.18.0"
"""The version of babel that drew the phrases."""


@pytest.fixture(scope="module", params=built_in.CLDR)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def corpus(name):
    return built_in.build(name)


def test_sizes_and_kinds(corpus):
    kinds = list(dict.fromkeys(corpus.held_out.kinds))
    assert corpus.held_out.kinds == kinds * 100  # taking turns: any part has all kinds
    assert corpus.valid.kinds == kinds * 50
    assert (len(corpus.train), len(kinds)) == (60_000, 10)
    shares = Counter(corpus.train.kinds)
    assert set(shares) == set(kinds)
    assert min(shares.values()) > 3000


def test_sets_share_neither_source_nor_target_and_a_source_has_one_target(corpus):
    sets = (corpus.train, corpus.valid, corpus.held_out)
    sources = [source for text in sets for source in text.source]
    assert len(set(sources)) == len(sources)
    for i, text in enumerate(sets):
        assert all(line.strip() for line in (*text.source, *text.target))
        assert not set(text.target) & {line for other in sets[i + 1 :] for line in other.target}


def test_every_name_in_a_test_phrase_stands_alone_in_training(corpus):
    known = set(corpus.train.source)
    phrases = zip(corpus.held_out.source, corpus.held_out.kinds, strict=True)
    used_in = [source for source, kind in phrases if kind == "language" and source.endswith(")")]
    assert len(used_in) > 10
    assert all(set(source[:-1].split(" (", 1)) <= known for source in used_in)


def test_the_quickstarts_text_is_what_it_was():
    recipe = load_recipe("quickstart", {})
    corpus = built_in.build(recipe.data.corpus, recipe.data.train_pairs, recipe.training.seed)
    found = {name: getattr(corpus, name).digests for name in QUICKSTART}
    assert {name: (text["source"][:16], text["target"][:16]) for name, text in found.items()} == QUICKSTART
    assert corpus == built_in.build("cldr:en-de")


def test_the_seed_orders_and_chooses_the_pairs_to_train_on():
    whole, few, others = built_in.build(), built_in.build(train_pairs=500), built_in.build(train_pairs=500, seed=2)
    assert few.train == whole.train.select(list(range(500)))
    assert (others.valid, others.held_out) == (few.valid, few.held_out) == (whole.valid, whole.held_out)
    assert len(others.train) == 500
    assert set(others.train.source) != set(few.train.source)
    assert set(others.train.source) < set(whole.train.source)


def test_phrases_that_are_drawn_anew_are_the_stored_ones(name, corpus):
    babel = pytest.importorskip("babel")
    if babel.__version__ != DREW:
        pytest.skip(f"babel {DREW} drew the phrases, here is {babel.__version__}")
    script = [sys.executable, Path(__file__).with_name("make_cldr.py"), name.removeprefix("cldr:"), "--first", "20"]
    done = subprocess.run(script, capture_output=True, check=True)
    drawn = [tuple(line.split("\t")) for line in done.stdout.decode().splitlines()]
    texts = (corpus.train, corpus.valid, corpus.held_out)
    stored = {row for text in texts for row in zip(text.kinds, text.source, text.target, strict=True)}
    assert [row for row in drawn if row not in stored] == []
    assert min(Counter(kind for kind, _, _ in drawn).values()) > 10


@pytest.mark.parametrize(
    "name", ["cldr:en-xx", "cldr:en", "cldr:de_AT-en", "cldr:", "cldr:../x", "en-de", "sentences:fr"]
)
def test_a_corpus_that_there_is_not_is_refused_with_those_there_are(name):
    with pytest.raises(UserError) as built:
        built_in.build(name)
    with pytest.raises(UserError) as asked:
        Recipe.from_dict({"data": {"corpus": name}, "training": {"steps": 1}})
    for error in (built, asked):
        assert "\n" not in str(error.value)
        assert all(fact in str(error.value) for fact in (repr(name), *built_in.NAMES, "source and target"))


@pytest.mark.parametrize("count", [0, 60_001])
def test_more_pairs_than_there_are_are_refused(count):
    with pytest.raises(UserError, match=f"train_pairs = {count} .*1 to 60000.*cldr:en-de"):
        built_in.build("cldr:en-de", count)
