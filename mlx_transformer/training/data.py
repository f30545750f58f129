"""The text of a run: a recipe's training and validation text, its tokenizer and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.unigram import train_unigram
from mlx_transformer.data import built_in
from mlx_transformer.data.batches import SortedBatches, TokenBatches
from mlx_transformer.data.corpus import ParallelText, kept_pairs
from mlx_transformer.data.documents import Documents, read_documents
from mlx_transformer.data.epochs import BatchesByEpoch, legacy_random
from mlx_transformer.data.pair_files import PairFiles
from mlx_transformer.data.training_text import TrainingText, load_training, read_pairs
from mlx_transformer.device import choices
from mlx_transformer.system.errors import UserError

from .objectives import Cutting
from .options import CorpusOptions, DataOptions
from .recipe import Recipe


@dataclass(frozen=True)
class RunData:
    train: TrainingText | Documents
    valid: ParallelText | Documents
    held_out: ParallelText | None
    """The test phrases of the built-in corpus; None for files."""
    dropped: int
    """The number of training pairs left out because a side was empty, or of empty documents."""

    @property
    def record(self) -> dict[str, Any]:
        """The counts and SHA-256 digests, for run.json."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: {noun(part): len(part), **part.digests} for name, part in parts.items()}


def load_data(recipe: Recipe) -> RunData:
    """Build the corpus or read the files of a recipe.

    Without validation files, one pair in a hundred (at most 1000) is set aside for validation, chosen by the seed.
    """
    options, seed = recipe.data, recipe.training.seed
    if recipe.objective.reads == "documents":
        return _documents(options, seed)
    dropout, cache = options.bpe_dropout, None if options.cache is None else Path(options.cache)
    if options.corpus is not None:
        corpus = built_in.build(options.corpus, options.train_pairs, seed)
        train = TrainingText(corpus.train, [len(corpus.train)], None, dropout, seed)
        return RunData(train, corpus.valid, corpus.held_out, 0)
    corpora = [_files(each) for each in options.corpora] or [_files(options)]
    weights = [each.weight for each in options.corpora if each.weight is not None] or None
    valid = None
    if options.valid_source is not None or options.valid_pairs is not None:
        valid = read_pairs(_files(options, "valid_"))
    train, aside, dropped = load_training(
        corpora, weights, seed=seed, set_aside=valid is None, bpe_dropout=dropout, cache=cache
    )
    valid = aside if valid is None else valid
    assert valid is not None
    return RunData(train, valid, None, dropped)


def _files(options: DataOptions | CorpusOptions, prefix: str = "") -> PairFiles:
    places = {name: getattr(options, f"{prefix}{name}") for name in ("source", "target", "pairs")}
    tag = options.tag if isinstance(options, CorpusOptions) else ""
    return PairFiles(**places, languages=options.languages, tag=tag)


def _documents(options: DataOptions, seed: int) -> RunData:
    if options.corpus is not None:
        return RunData(*built_in.documents(options.corpus, seed), None, 0)
    text, dropped = read_documents(str(options.text), options.documents)
    if options.valid_text is not None:
        return RunData(text, read_documents(options.valid_text, options.documents)[0], None, dropped)
    for_training = kept_pairs(len(text), seed, str(options.text), "documents")
    train, valid = (text.select(np.flatnonzero(chosen).tolist()) for chosen in (for_training, ~for_training))
    return RunData(train, valid, None, dropped)


def train_tokenizer(data: RunData, recipe: Recipe) -> Tokenizer:
    """Learn one joint vocabulary of both languages (section 5.1), one of each, or one of all documents; or load the
    one that the recipe names."""
    options, text = recipe.data, data.train
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    if isinstance(text, TrainingText):
        learn = train_unigram if options.vocab_model == "unigram" else Tokenizer.train
        return text.tokenizer(options.vocab_size, options.vocab_lines, options.separate_vocabularies, learn)
    if options.vocab_lines is not None:
        order = legacy_random(recipe.training.seed, 2)
        text = text.select(sorted(order.permutation(len(text))[: options.vocab_lines].tolist()))
    return Tokenizer.train(text.lines, options.vocab_size, mask=recipe.objective.masks)


def noun(text: TrainingText | ParallelText | Documents) -> str:
    """Say what the text consists of."""
    return "documents" if isinstance(text, Documents) else "pairs"


class EncodedText:
    """Text as ids, from which batches are cut as often as asked.

    Batches have a token budget and hold what the recipe's objective learns; those of pairs have few shapes or tight
    ones, as the device likes them. `name` is the text's in errors.
    """

    def __init__(
        self,
        text: TrainingText | ParallelText | Documents,
        tokenizer: Tokenizer,
        recipe: Recipe,
        name: str = "training text",
    ):
        self.tokenizer, self.name = tokenizer, name
        self._ids = recipe.objective.encoded(text, tokenizer, recipe.data)

    def batches(self, recipe: Recipe, seed: int, grow: bool = False) -> BatchesByEpoch[Any]:
        """Cut the text into batches.

        `UserError` when the text has no pair that fits `max_length`, or one that doesn't fit the recipe's batch (with
        `grow` the batch is made to fit).
        """
        common = {"batch_tokens": recipe.data.batch_tokens, "grow": grow, "seed": seed}
        common |= {"pad_id": self.tokenizer.pad_id, "bos_id": self.tokenizer.bos_id}
        lengths = {"max_length": recipe.data.max_length, "min_length": choices().shortest}
        make_pairs = partial(TokenBatches if choices().few_shapes else SortedBatches, **common, **lengths)
        try:
            return recipe.objective.batches(self._ids, Cutting(self.tokenizer, recipe.data, make_pairs, common))
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error
