"""Load a recipe's training and validation text, train its tokenizer, and cut the text into batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.data import built_in
from mlx_transformer.data.batches import SortedBatches, TokenBatches
from mlx_transformer.data.corpus import PairFiles, ParallelText, training_mask
from mlx_transformer.data.documents import Documents, read_documents
from mlx_transformer.data.epochs import BatchesByEpoch, legacy_random
from mlx_transformer.data.labelled import Labelled, read_labelled
from mlx_transformer.data.matches import read_matches
from mlx_transformer.data.training_text import TrainingText, load_training, read_pairs
from mlx_transformer.device import tuning
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.text.unigram import train_unigram

from .objectives import Cutting, Reading, RunText
from .options import CorpusOptions, DataOptions
from .recipe import Recipe


@dataclass(frozen=True)
class RunData:
    train: RunText
    valid: RunText
    held_out: ParallelText | None
    """Test pairs of a built-in parallel corpus; None for files."""
    dropped: int
    """Training pairs left out because a side was empty, or empty documents left out."""

    @property
    def record(self) -> dict[str, Any]:
        """Counts and SHA-256 digests for run.json."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: {noun(part): len(part), **part.digests} for name, part in parts.items()}


def load_data(recipe: Recipe) -> RunData:
    """Build the recipe's built-in corpus, or read its files.

    Without validation files, the seed chooses one pair or text in a hundred (at most 1000) for validation.
    """
    options, seed = recipe.data, recipe.training.seed
    if recipe.objective.reads != "pairs":
        return _plain(recipe, seed)
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
    train, held_out, dropped = load_training(
        corpora, weights, seed=seed, set_aside=valid is None, bpe_dropout=dropout, cache=cache
    )
    valid = held_out if valid is None else valid
    assert valid is not None
    return RunData(train, valid, None, dropped)


def _files(options: DataOptions | CorpusOptions, prefix: str = "") -> PairFiles:
    places = {name: getattr(options, f"{prefix}{name}") for name in ("source", "target", "pairs")}
    tag = options.tag if isinstance(options, CorpusOptions) else ""
    return PairFiles(**places, languages=options.languages, tag=tag)


def _plain(recipe: Recipe, seed: int) -> RunData:
    """Load documents, labelled text or contrastive pairs, which are all held in memory."""
    options = recipe.data
    if options.corpus is not None:
        return RunData(*built_in.documents(options.corpus, seed), None, 0)
    files: dict[str, tuple[Any, Any, Any, str]] = {
        "documents": (
            partial(read_documents, documents=options.documents, chats=recipe.training.objective == "language-model"),
            options.text,
            options.valid_text,
            "documents",
        ),
        "labelled": (read_labelled, options.labelled, options.valid_labelled, "texts"),
        "matches": (read_matches, _files(options), _files(options, "valid_"), "pairs"),
    }
    read, where, valid, kind = files[recipe.objective.reads]
    text, dropped = read(where)
    if valid is not None and valid != PairFiles(languages=options.languages):
        return RunData(text, read(valid)[0], None, dropped)
    name = where.name if isinstance(where, PairFiles) else str(where)
    for_training = training_mask(len(text), seed, name, kind)
    train, held_out = (text.select(np.flatnonzero(chosen).tolist()) for chosen in (for_training, ~for_training))
    return RunData(train, held_out, None, dropped)


def train_tokenizer(data: RunData, recipe: Recipe) -> Tokenizer:
    """Train the vocabulary: one for both languages (section 5.1), one for each, or one for all documents. If the recipe
    names a `tokenizer`, load that instead."""
    options, text = recipe.data, data.train
    if options.tokenizer is not None:
        return Tokenizer.load(options.tokenizer)
    if isinstance(text, TrainingText):
        learn = train_unigram if options.vocab_model == "unigram" else Tokenizer.train
        return text.tokenizer(options.vocab_size, options.vocab_lines, options.separate_vocabularies, learn)
    assert not isinstance(text, ParallelText)
    if options.vocab_lines is not None:
        order = legacy_random(recipe.training.seed, 2)
        text = text.select(sorted(order.permutation(len(text))[: options.vocab_lines].tolist()))
    return Tokenizer.train(text.lines, options.vocab_size, mask=recipe.objective.masks)


def noun(text: RunText) -> str:
    """Name the unit of the text: "documents", "texts" or "pairs"."""
    return {Documents: "documents", Labelled: "texts"}.get(type(text), "pairs")


class EncodedText:
    """Text encoded as token ids once, from which `batches` cuts batches for the recipe's objective.

    On a device that compiles for each shape, batches of pairs have few shapes; elsewhere they have little padding.
    `name`: the text's name in errors, e.g. "validation text".
    """

    def __init__(
        self,
        text: RunText,
        how: Reading,
        recipe: Recipe,
        name: str = "training text",
    ):
        self.how, self.name = how, name
        try:
            self._ids = recipe.objective.encoded(text, how)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    def batches(self, recipe: Recipe, seed: int, grow: bool = False) -> BatchesByEpoch[Any]:
        """Cut the text into batches.

        Raises UserError if no pair fits `max_length`, or if `batch_tokens` is too small for the longest rows; with
        `grow` the batch grows to fit them.
        """
        common = {"batch_tokens": recipe.data.batch_tokens, "grow": grow, "seed": seed}
        common |= {"pad_id": self.how.tokenizer.pad_id, "bos_id": self.how.tokenizer.bos_id}
        lengths = {"max_length": recipe.data.max_length, "min_length": tuning().shortest}
        make_pairs = partial(TokenBatches if tuning().few_shapes else SortedBatches, **common, **lengths)
        cut = Cutting(**{**vars(self.how), "options": recipe.data}, make=make_pairs, common=common)
        try:
            return recipe.objective.batches(self._ids, cut)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error
