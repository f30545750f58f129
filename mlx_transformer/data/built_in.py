"""The built-in corpora by name, e.g. `cldr:en-de`, `sentences:en-de`, or one language as plain text, `sentences:en`.

Those of `cldr` are phrases of Unicode CLDR, e.g. dates, times, numbers, units, currencies, lists and names of
territories and languages. The source determines the target, so exact match is a meaningful score.
tests/mlx_transformer/data/make_cldr.py wrote the files in `cldr_phrases`. They have rows of kind, source and target, in
three sets (training, validation, test) separated by an empty line.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

from mlx_transformer.system.errors import UserError

from . import sentences
from .corpus import BuiltInCorpus
from .documents import Documents

FOLDER, SUFFIX = Path(__file__).parent / "cldr_phrases", ".tsv.gz"
CLDR = tuple(sorted(f"cldr:{path.name.removesuffix(SUFFIX)}" for path in FOLDER.glob(f"*{SUFFIX}")))
NAMES = (*CLDR, *sentences.LANGUAGES)


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


def build(name: str = "cldr:en-de", train_pairs: int = 60_000, seed: int = 1) -> BuiltInCorpus:
    """Build a corpus of pairs. The seed orders the training pairs, and chooses `train_pairs` of a cldr corpus.

    Raises UserError for an unknown name, and for more pairs than there are.
    """
    check(name)
    if is_of_sentences(name):
        return sentences.build(seed)
    text = gzip.decompress((FOLDER / f"{name.removeprefix('cldr:')}{SUFFIX}").read_bytes()).decode()
    train, valid, held_out = (
        [line.split("\t") for line in part.split("\n")] for part in text.strip("\n").split("\n\n")
    )
    if not 1 <= train_pairs <= len(train):
        raise UserError(f"train_pairs = {train_pairs} must be 1 to {len(train)}, the training pairs of corpus {name}")
    Random(f"{seed}:order").shuffle(train)
    return BuiltInCorpus.of(train[:train_pairs], valid, held_out)


def documents(name: str, seed: int = 1) -> tuple[Documents, Documents]:
    """Return (training, validation) documents, e.g. of "sentences:en". Raises UserError for an unknown name."""
    check(name)
    side, corpus = sentences.LANGUAGES[name][0], sentences.build(seed)
    train, valid = ((text.source, text.target)[side] for text in (corpus.train, corpus.valid))
    return Documents(train, [""] * len(train)), Documents(valid, [""] * len(valid))
