"""The built-in corpus of phrases of the Unicode CLDR: dates, times, intervals, numbers, units, currencies, lists, names
of territories and languages. The source determines the target, so exact match is a meaningful score.

tests/mlx_transformer/data/make_cldr.py drew the files of `cldr_phrases`: rows of kind, source and target, in three sets
(training, validation, test) with an empty line between them.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

from mlx_transformer.system.errors import UserError

from .corpus import BuiltInCorpus

FOLDER, SUFFIX = Path(__file__).parent / "cldr_phrases", ".tsv.gz"
NAMES = tuple(sorted(f"cldr:{path.name.removesuffix(SUFFIX)}" for path in FOLDER.glob(f"*{SUFFIX}")))


def build(name: str = "cldr:en-de", train_pairs: int = 60_000, seed: int = 1) -> BuiltInCorpus:
    """Read one of NAMES. The seed orders the training pairs, and chooses them if fewer than all are asked for."""
    text = gzip.decompress((FOLDER / f"{name.removeprefix('cldr:')}{SUFFIX}").read_bytes()).decode()
    train, valid, held_out = (
        [line.split("\t") for line in part.split("\n")] for part in text.strip("\n").split("\n\n")
    )
    if not 1 <= train_pairs <= len(train):
        raise UserError(f"train_pairs = {train_pairs} must be 1 to {len(train)}, the training pairs of corpus {name}")
    Random(f"{seed}:order").shuffle(train)
    return BuiltInCorpus.of(train[:train_pairs], valid, held_out)
