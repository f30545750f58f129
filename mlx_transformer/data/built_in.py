"""The built-in corpora by name, e.g. `cldr:en-de`, `sentences:en-de`, or one language as plain text, `sentences:en`."""

from __future__ import annotations

from mlx_transformer.system.errors import UserError

from . import cldr, sentences
from .corpus import BuiltInCorpus
from .documents import Documents

NAMES = (*cldr.NAMES, *sentences.LANGUAGES)


def check(name: str) -> None:
    """Raise UserError if no built-in corpus has this name."""
    if name not in NAMES:
        raise UserError(
            f"corpus {name!r} is not built in: choose one of {', '.join(NAMES)}, or give files of your own "
            "(source and target, pairs or text)"
        )


def is_of_sentences(name: str) -> bool:
    return name.startswith("sentences:")


def languages(name: str) -> list[str]:
    """The language codes in a corpus's name: "cldr:en-de" -> ["en", "de"], "sentences:en" -> ["en"]."""
    return name.partition(":")[2].split("-")


def build(name: str, train_pairs: int = 60_000, seed: int = 1) -> BuiltInCorpus:
    """Build a corpus of pairs. train_pairs: the number of training pairs of a cldr corpus.

    Raises UserError for an unknown name, and for more pairs than there are.
    """
    check(name)
    return sentences.build(seed) if is_of_sentences(name) else cldr.build(name, train_pairs, seed)


def documents(name: str, seed: int = 1) -> tuple[Documents, Documents]:
    """Return (training, validation) documents, e.g. of "sentences:en". Raises UserError for an unknown name."""
    check(name)
    side, corpus = sentences.LANGUAGES[name][0], sentences.build(seed)
    train, valid = ((text.source, text.target)[side] for text in (corpus.train, corpus.valid))
    return Documents(train, [""] * len(train)), Documents(valid, [""] * len(valid))
