"""What a model can learn: its shape, the text it needs, and how its text becomes batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_transformer.core.config import Architecture
from mlx_transformer.core.tokenizer import SPECIAL_TOKENS, Tokenizer
from mlx_transformer.data.batches import TokenBatches
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.data.corrupted import DenoisingBatches, MaskedBatches
from mlx_transformer.data.documents import Documents
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.data.examples import Examples
from mlx_transformer.data.packed import PackedBatches
from mlx_transformer.data.training_text import TrainingText, examples_of
from mlx_transformer.device import choices
from mlx_transformer.system.errors import UserError

from .options import DataOptions

MakePairs = Callable[..., TokenBatches]
"""Batches of examples or of two lists of ids, as the recipe and the device like them."""


@dataclass(frozen=True)
class Objective:
    architecture: Architecture
    reads: Literal["pairs", "documents"]
    masks: bool
    """Its vocabulary has <mask>."""
    encoded: Callable[[Any, Tokenizer, DataOptions], Any]
    """Text as ids, which takes its time, once."""
    batches: Callable[[Any, Tokenizer, DataOptions, MakePairs, dict[str, Any]], BatchesByEpoch[Any]]
    """(what `encoded` gives, tokenizer, options, how pairs become batches, arguments of all batches)"""


def _pairs(text: TrainingText | ParallelText, tokenizer: Tokenizer, options: DataOptions) -> Examples:
    return examples_of(text, tokenizer, options.max_length)


def _translation(
    pairs: Examples, tokenizer: Tokenizer, options: DataOptions, make: MakePairs, common: dict[str, Any]
) -> TokenBatches:
    return make(pairs)


def _prompted(text: Documents, tokenizer: Tokenizer, options: DataOptions) -> tuple[list[list[int]], list[list[int]]]:
    """Documents, and their prompts without an end."""
    return tokenizer.encode_batch(text.texts), [ids[:-1] for ids in tokenizer.encode_batch(text.prompts)]


def _language_model(
    text: tuple[list[list[int]], list[list[int]]],
    tokenizer: Tokenizer,
    options: DataOptions,
    make: MakePairs,
    common: dict[str, Any],
) -> PackedBatches:
    return PackedBatches(*text, row_length=max(options.max_length, choices().shortest), **common)


def _documents(
    text: Documents, tokenizer: Tokenizer, options: DataOptions
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Pieces of the documents, and the word of each of their tokens where words are hidden as a whole."""
    pieces = list(_pieces(tokenizer.encode_batch(text.texts), options.max_length, tokenizer.eos_id))
    if not options.whole_words:
        return pieces, None
    return pieces, list(_pieces(tokenizer.encode_words(text.texts), options.max_length, options.max_length))


def _masked(
    text: tuple[list[list[int]], list[list[int]] | None],
    tokenizer: Tokenizer,
    options: DataOptions,
    make: MakePairs,
    common: dict[str, Any],
) -> MaskedBatches:
    pieces, words = text
    hidden = _mask_id(tokenizer)
    ordinary = [id for id in range(len(SPECIAL_TOKENS), tokenizer.vocab_size) if id != hidden]
    return MaskedBatches(make(pieces, pieces), hidden, ordinary, options.mask_share or 0.15, words)


def _denoising(
    text: tuple[list[list[int]], None],
    tokenizer: Tokenizer,
    options: DataOptions,
    make: MakePairs,
    common: dict[str, Any],
) -> DenoisingBatches:
    pieces, _ = text
    return DenoisingBatches(make(pieces, pieces), _mask_id(tokenizer), options.mask_share or 0.3, options.mask_span)


OBJECTIVES: dict[str, Objective] = {
    "translation": Objective("encoder-decoder", "pairs", False, _pairs, _translation),
    "language-model": Objective("decoder", "documents", False, _prompted, _language_model),
    "masked-language-model": Objective("encoder", "documents", True, _documents, _masked),
    "denoising": Objective("encoder-decoder", "documents", True, _documents, _denoising),
}


def _pieces(texts: Sequence[Sequence[int]], length: int, last: int) -> Iterator[list[int]]:
    """Texts cut into pieces of at most `length` tokens, each with `last` at its end."""
    for ids in texts:
        for start in range(0, max(1, len(ids) - 1), length - 1):
            yield [*ids[start : min(start + length, len(ids)) - 1], last]


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise UserError("the vocabulary has no <mask>: begin without a given one, or with one that was trained so")
    return tokenizer.mask_id
