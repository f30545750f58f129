"""The text of a run: training and validation pairs of a recipe, the tokenizer, and the batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_transformer.data import cldr
from mlx_transformer.data.batches import TokenBatches
from mlx_transformer.data.corpus import ParallelText, read_parallel
from mlx_transformer.data.sorted_batches import SortedBatches
from mlx_transformer.device import choices
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

from .recipe import Recipe


@dataclass(frozen=True)
class RunData:
    train: ParallelText
    valid: ParallelText
    held_out: ParallelText | None
    """Test phrases of the built-in corpus; None for files."""
    dropped: int
    """Training pairs left out because a side was empty."""

    @property
    def record(self) -> dict[str, Any]:
        """Counts and SHA-256 digests, for run.json."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: {"pairs": len(part), **part.digests} for name, part in parts.items()}


def load_data(recipe: Recipe) -> RunData:
    """Build the corpus or read the files of a recipe.

    Without validation files, one pair in a hundred (at most 1000) is set aside for validation, chosen by the seed.
    """
    options, seed = recipe.data, recipe.training.seed
    if options.corpus is not None:
        corpus = cldr.build(options.corpus, train_pairs=options.train_pairs, seed=seed)
        return RunData(corpus.train, corpus.valid, corpus.held_out, 0)
    text, dropped = read_parallel(str(options.source), str(options.target)).without_empty()
    if options.valid_source is not None:
        return RunData(text, read_parallel(options.valid_source, str(options.valid_target)), None, dropped)
    if len(text) < 2:
        raise UserError(f"{options.source}: {len(text)} usable pairs; training needs more, or give validation files")
    order = np.random.default_rng(seed).permutation(len(text)).tolist()
    count = max(1, min(1000, len(text) // 100))
    return RunData(text.select(sorted(order[count:])), text.select(sorted(order[:count])), None, dropped)


def train_tokenizer(data: RunData, vocab_size: int) -> Tokenizer:
    """One joint vocabulary over both languages (section 5.1)."""
    return Tokenizer.train((line for side in (data.train.source, data.train.target) for line in side), vocab_size)


def make_batches(
    text: ParallelText, tokenizer: Tokenizer, recipe: Recipe, seed: int, name: str = "training text", grow: bool = False
) -> TokenBatches:
    """Batches by token budget: few shapes or tight ones, as the device likes them.

    `UserError`, which says `name`, when the text has no pair that fits `max_length`, or one that doesn't fit the
    recipe's batch (with `grow` the batch is made to fit).
    """
    make = TokenBatches if choices().few_shapes else SortedBatches
    try:
        return make(
            tokenizer.encode_batch(text.source),
            tokenizer.encode_batch(text.target),
            batch_tokens=recipe.data.batch_tokens,
            grow=grow,
            max_length=recipe.data.max_length,
            min_length=choices().shortest,
            seed=seed,
            pad_id=tokenizer.pad_id,
            bos_id=tokenizer.bos_id,
        )
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
