"""The built-in corpus of sentences: its patterns, its parts, and what of it can't be asked for."""

import hashlib
from collections import Counter

import pytest

from mlx_transformer.data import built_in
from mlx_transformer.data.built_in import HELD_OUT, NOTES, PATTERNS, UNSEEN, VALID
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.data import load_data
from mlx_transformer.training.recipe import Recipe


@pytest.fixture(scope="module")
def corpus():
    return built_in.build("sentences:en-de")


@pytest.fixture(scope="module")
def phrases():
    """{English: German} of every pattern, in full."""
    return {kind: dict(pattern()) for kind, (pattern, _) in PATTERNS.items()}


def test_sizes_and_kinds(corpus):
    counts = Counter(kind for part in (corpus.train, corpus.valid, corpus.held_out) for kind in part.kinds)
    assert counts == {kind: count for kind, (_, count) in PATTERNS.items()}
    assert (len(corpus.train), len(corpus.valid), len(corpus.held_out)) == (6472, VALID, HELD_OUT)
    assert set(corpus.held_out.kinds) == set(PATTERNS)


def test_parts_share_no_sentence_and_a_source_has_one_target(corpus, phrases):
    sources = corpus.train.source + corpus.valid.source + corpus.held_out.source
    assert len(set(sources)) == len(sources)
    translations: dict[str, str] = {}
    for each in phrases.values():
        assert all(translations.setdefault(source, target) == target for source, target in each.items())


def test_sentences_of_the_notes_are_trained_on_but_one(corpus, phrases):
    made = {source: target for each in phrases.values() for source, target in each.items()}
    assert {source: made[source] for source in NOTES} == NOTES
    assert set(NOTES) - set(corpus.train.source) == {UNSEEN}
    assert UNSEEN not in corpus.valid.source + corpus.held_out.source


def test_the_same_seed_the_same_bytes(corpus):
    assert built_in.build("sentences:en-de") == corpus
    assert built_in.build("sentences:en-de", seed=2).train.digests != corpus.train.digests
    text = "\n".join([*corpus.train.source, *corpus.train.target])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "1b07d910ee1cc139"


GERMAN = {
    "Bear kills deer": "Bär tötet Hirsch",
    "The wolf fears the bear": "Der Wolf fürchtet den Bären",
    "The cow didn't cross the river because it was too deep": "Die Kuh überquerte den Fluss nicht, weil er zu tief war",
    "The cow didn't cross the river because it was too old": "Die Kuh überquerte den Fluss nicht, weil sie zu alt war",
    "The boy slept on the lake bank": "Der Junge schlief am Ufer des Sees",
    "The girl lay on the village bank": "Das Mädchen lag in der Bank des Dorfes",
    "From the moat bank": "Vom Ufer des Grabens",
    "To the company bank": "Zur Bank der Firma",
    "Near the bank": "Nahe der Bank",
    "OUR HORSE IS A SMALL HORSE": "UNSER PFERD IST EIN KLEINES PFERD",
    "THEIR DOG IS A BIG DOG": "IHR HUND IST EIN GROSSER HUND",
    "The box stood on the lion": "Die Kiste stand auf dem Löwen",
    "The Romans called Anna": "Die Römer riefen Anna",
    "Loki feared the giants": "Loki fürchtete die Riesen",
    "Our boiled potato was too cold": "Unsere gekochte Kartoffel war zu kalt",
    "Her smoked fish was very cheap": "Ihr geräucherter Fisch war sehr billig",
    "Singing Wolves": "Singende Wölfe",
}


def test_gender_case_number_and_order_are_german(phrases):
    made = {source: target for each in phrases.values() for source, target in each.items()}
    assert {source: made.get(source) for source in GERMAN} == GERMAN


def test_one_language_is_a_text(corpus):
    train, valid = built_in.documents("sentences:de")
    assert (train.texts, valid.texts) == (corpus.train.target, corpus.valid.target)
    recipe = Recipe.from_dict(
        {"data": {"corpus": "sentences:en"}, "training": {"objective": "language-model", "steps": 1}}
    )
    assert load_data(recipe).train.texts == corpus.train.source


@pytest.mark.parametrize(
    ("data", "objective", "message"),
    [
        (
            {"corpus": "sentences:en-fr"},
            "translation",
            "'sentences:en-fr' is not built in.* sentences:en-de, sentences:en, sentences:de, ",
        ),
        ({"corpus": "sentences:en"}, "translation", "has one language: translation learns two"),
        ({"corpus": "sentences:en-de"}, "language-model", "data.corpus is for translation"),
        ({"corpus": "sentences:en", "text": "x"}, "language-model", "leave out text and valid_text"),
        ({"corpus": "sentences:en-de", "train_pairs": 9}, "translation", "leave out train_pairs"),
    ],
)
def test_what_cannot_be_asked_for(data, objective, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_dict({"data": data, "training": {"objective": objective, "steps": 1}})
