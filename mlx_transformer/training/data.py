"""The text of a run: training and validation pairs of a recipe, the tokenizer, and the batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_transformer.data import cldr
from mlx_transformer.data.batches import TokenBatches
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.data.pair_files import PairFiles
from mlx_transformer.data.sorted_batches import SortedBatches
from mlx_transformer.data.training_text import TrainingText, examples_of, load_training, read_pairs
from mlx_transformer.device import choices
from mlx_transformer.spec.errors import UserError
from mlx_transformer.spec.tokenizer import Tokenizer

from .options import CorpusOptions, DataOptions
from .recipe import Recipe


@dataclass(frozen=True)
class RunData:
    train: TrainingText
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
    dropout, cache = options.bpe_dropout, None if options.cache is None else Path(options.cache)
    if options.corpus is not None:
        corpus = cldr.build(options.corpus, train_pairs=options.train_pairs, seed=seed)
        train = TrainingText(corpus.train, [len(corpus.train)], None, dropout, seed)
        return RunData(train, corpus.valid, corpus.held_out, 0)
    corpora = [_files(each) for each in options.corpora] or [_files(options)]
    weights = [each.weight for each in options.corpora if each.weight is not None] or None
    valid = None
    if options.valid_source is not None or options.valid_pairs is not None:
        valid = read_pairs(
            PairFiles(
                source=options.valid_source,
                target=options.valid_target,
                pairs=options.valid_pairs,
                languages=options.languages,
            )
        )
    train, aside, dropped = load_training(
        corpora, weights, seed=seed, set_aside=valid is None, bpe_dropout=dropout, cache=cache
    )
    valid = aside if valid is None else valid
    assert valid is not None
    return RunData(train, valid, None, dropped)


def _files(options: DataOptions | CorpusOptions) -> PairFiles:
    tag = options.tag if isinstance(options, CorpusOptions) else ""
    return PairFiles(
        source=options.source, target=options.target, pairs=options.pairs, languages=options.languages, tag=tag
    )


def train_tokenizer(data: RunData, options: DataOptions) -> Tokenizer:
    """One joint vocabulary over both languages (section 5.1), or the one that is given."""
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    return data.train.tokenizer(options.vocab_size, options.vocab_lines)


def make_batches(
    text: ParallelText | TrainingText,
    tokenizer: Tokenizer,
    recipe: Recipe,
    seed: int,
    name: str = "training text",
    grow: bool = False,
) -> TokenBatches:
    """Batches by token budget: few shapes or tight ones, as the device likes them.

    `UserError`, which says `name`, when the text has no pair that fits `max_length`, or one that doesn't fit the
    recipe's batch (with `grow` the batch is made to fit).
    """
    make = TokenBatches if choices().few_shapes else SortedBatches
    try:
        return make(
            examples_of(text, tokenizer, recipe.data.max_length),
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
