"""The corpora that are built in, by their names: `cldr:en-de` and others, `sentences:en-de` or one side of it."""

from __future__ import annotations

from mlx_transformer.system.errors import UserError

from . import cldr, sentences
from .corpus import BuiltInCorpus
from .documents import Documents

NAMES = (*cldr.NAMES, *sentences.LANGUAGES)


def check(name: str) -> None:
    """Raise `UserError` for a corpus that there isn't."""
    if name not in NAMES:
        raise UserError(
            f"corpus {name!r} is not built in: choose one of {', '.join(NAMES)}, or give files of your own "
            "(source and target, pairs or text)"
        )


def is_of_sentences(name: str) -> bool:
    return name.startswith("sentences:")


def languages(name: str) -> list[str]:
    """Return the codes in the name: two, or one of a text to learn a language from."""
    return name.partition(":")[2].split("-")


def build(name: str, train_pairs: int = 60_000, seed: int = 1) -> BuiltInCorpus:
    """Return pairs; `train_pairs` is the number of those to train on, of a corpus cldr. `UserError` for an unknown name
    and for more pairs than there are."""
    check(name)
    return sentences.build(seed) if is_of_sentences(name) else cldr.build(name, train_pairs, seed)


def documents(name: str, seed: int = 1) -> tuple[Documents, Documents]:
    """Return the text of one language, for training and for validation. `UserError` for an unknown name."""
    check(name)
    side, corpus = sentences.LANGUAGES[name][0], sentences.build(seed)
    train, valid = ((text.source, text.target)[side] for text in (corpus.train, corpus.valid))
    return Documents(train, [""] * len(train)), Documents(valid, [""] * len(valid))
