"""The corpora that are built in, by their names: `cldr:SOURCE-TARGET`, and `sentences:en-de` or one side of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import sentences
from .documents import Documents

if TYPE_CHECKING:
    from .cldr import CldrCorpus


def is_of_sentences(name: str) -> bool:
    return name.startswith("sentences:")


def languages(name: str) -> list[str]:
    """Return the codes in the name: two, or one of a text to learn a language from."""
    return name.partition(":")[2].split("-")


def build(name: str, train_pairs: int = 60_000, seed: int = 1) -> CldrCorpus | sentences.SentenceCorpus:
    """Build pairs. `train_pairs`: how many, where they are composed without end. `UserError` for an unknown name."""
    if is_of_sentences(name):
        sentences.sides(name)
        return sentences.build(seed)
    from . import cldr  # not at the top: it needs babel

    return cldr.build(name, train_pairs=train_pairs, seed=seed)


def documents(name: str, seed: int = 1) -> tuple[Documents, Documents]:
    """Build the text of one language, for training and for validation. `UserError` for a name of two."""
    side, corpus = sentences.sides(name)[0], sentences.build(seed)
    train, valid = ((text.source, text.target)[side] for text in (corpus.train, corpus.valid))
    return Documents(train, [""] * len(train)), Documents(valid, [""] * len(valid))
