"""The text of a run: training and validation text of a recipe, the tokenizer, and the batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mlx_transformer.data import cldr
from mlx_transformer.data.batches import TokenBatches
from mlx_transformer.data.corpus import ParallelText, read_parallel
from mlx_transformer.data.documents import Documents, read_documents
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.data.sorted_batches import SortedBatches
from mlx_transformer.device import choices
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

from .recipe import Recipe

Text = ParallelText | Documents
T = TypeVar("T", ParallelText, Documents)


@dataclass(frozen=True)
class RunData:
    train: Text
    valid: Text
    held_out: ParallelText | None
    """Test phrases of the built-in corpus; None for files."""
    dropped: int
    """Training pairs left out because a side was empty, or empty documents."""

    @property
    def record(self) -> dict[str, Any]:
        """Counts and SHA-256 digests, for run.json."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: {noun(part): len(part), **part.digests} for name, part in parts.items()}


def load_data(recipe: Recipe) -> RunData:
    """Build the corpus or read the files of a recipe.

    Without validation files, one pair in a hundred (at most 1000) is set aside for validation, chosen by the seed.
    """
    options, seed = recipe.data, recipe.training.seed
    if options.corpus is not None:
        corpus = cldr.build(options.corpus, train_pairs=options.train_pairs, seed=seed)
        return RunData(corpus.train, corpus.valid, corpus.held_out, 0)
    if recipe.objective.reads == "documents":
        return _documents(recipe)
    text, dropped = read_parallel(str(options.source), str(options.target)).without_empty()
    if options.valid_source is not None:
        return RunData(text, read_parallel(options.valid_source, str(options.valid_target)), None, dropped)
    train, valid = _set_aside(text, str(options.source), seed)
    return RunData(train, valid, None, dropped)


def _documents(recipe: Recipe) -> RunData:
    options, seed = recipe.data, recipe.training.seed
    text, dropped = read_documents(str(options.text), options.documents)
    if options.valid_text is not None:
        return RunData(text, read_documents(options.valid_text, options.documents)[0], None, dropped)
    train, valid = _set_aside(text, str(options.text), seed)
    return RunData(train, valid, None, dropped)


def _set_aside(text: T, where: str, seed: int) -> tuple[T, T]:
    """(the rest, one in a hundred, at most 1000), chosen by the seed."""
    if len(text) < 2:
        raise UserError(f"{where}: {len(text)} usable {noun(text)}; training needs more, or give validation files")
    order = np.random.default_rng(seed).permutation(len(text)).tolist()
    count = max(1, min(1000, len(text) // 100))
    return text.select(sorted(order[count:])), text.select(sorted(order[:count]))


def train_tokenizer(data: RunData, vocab_size: int, mask: bool = False) -> Tokenizer:
    """One joint vocabulary over both languages (section 5.1), or of all documents; `mask`: with <mask>."""
    return Tokenizer.train(data.train.lines, vocab_size, mask=mask)


def noun(text: Text) -> str:
    return "pairs" if isinstance(text, ParallelText) else "documents"


def make_batches(
    text: Text, tokenizer: Tokenizer, recipe: Recipe, seed: int, name: str = "training text", grow: bool = False
) -> BatchesByEpoch[Any]:
    """Batches by token budget, of what the recipe's objective learns; of pairs few shapes or tight ones, as the device
    likes them.

    `UserError`, which says `name`, when the text has no pair that fits `max_length`, or one that doesn't fit the
    recipe's batch (with `grow` the batch is made to fit).
    """
    common = {"batch_tokens": recipe.data.batch_tokens, "grow": grow, "seed": seed}
    common |= {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
    lengths = {"max_length": recipe.data.max_length, "min_length": choices().shortest}
    of_pairs = partial(TokenBatches if choices().few_shapes else SortedBatches, **common, **lengths)
    try:
        return recipe.objective.batches(text, tokenizer, recipe.data, of_pairs, common)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
