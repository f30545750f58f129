"""The built-in corpora of Unicode CLDR phrases: e.g. dates, times, numbers, units, currencies, lists and names of
territories and languages. The source determines the target, so exact match is a meaningful score.

tests/mlx_transformer/data/make_cldr.py wrote the files in `cldr_phrases`. They have rows of kind, source and target, in
three sets (training, validation, test) separated by an empty line.
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
    """Build a corpus of NAMES. The seed orders the training pairs, and chooses `train_pairs` of them.

    Raises UserError if the corpus has fewer than `train_pairs`.
    """
    text = gzip.decompress((FOLDER / f"{name.removeprefix('cldr:')}{SUFFIX}").read_bytes()).decode()
    train, valid, held_out = (
        [line.split("\t") for line in part.split("\n")] for part in text.strip("\n").split("\n\n")
    )
    if not 1 <= train_pairs <= len(train):
        raise UserError(f"train_pairs = {train_pairs} must be 1 to {len(train)}, the training pairs of corpus {name}")
    Random(f"{seed}:order").shuffle(train)
    return BuiltInCorpus.of(train[:train_pairs], valid, held_out)
