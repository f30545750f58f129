"""The objectives: what a model learns, from which text and which batches, and how it is scored on validation text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from mlx_transformer.core.config import Architecture
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.data.batches import TokenBatches
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.data.corrupted import DenoisingBatches, MaskedBatches
from mlx_transformer.data.documents import Documents
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.data.examples import Examples
from mlx_transformer.data.packed import PackedBatches
from mlx_transformer.data.training_text import TrainingText
from mlx_transformer.device import choices
from mlx_transformer.generation.likelihood import perplexity_of
from mlx_transformer.generation.scoring import score
from mlx_transformer.runtime.decoding import evaluating
from mlx_transformer.system.errors import UserError

from .options import DataOptions
from .step import TrainStep

MakePairs = Callable[..., TokenBatches]
"""Makes batches of examples or of two lists of ids, as the recipe and the device like them."""
SAMPLES = 3
"""The translations of a validation that are shown."""


@dataclass(frozen=True)
class Cutting:
    """How text is cut into batches."""

    tokenizer: Tokenizer
    options: DataOptions
    make: MakePairs
    """How pairs become batches."""
    common: dict[str, Any]
    """The arguments of all batches."""


@dataclass(frozen=True)
class Objective:
    architecture: Architecture
    reads: Literal["pairs", "documents"]
    masks: bool
    """Whether its vocabulary has <mask>."""
    encoded: Callable[[Any, Tokenizer, DataOptions], Any]
    """(text, tokenizer, options) -> the text as ids, which takes its time, once."""
    batches: Callable[[Any, Cutting], BatchesByEpoch[Any]]
    """(ids from `encoded`, how they are cut) -> batches."""


def _pairs(text: TrainingText | ParallelText, tokenizer: Tokenizer, options: DataOptions) -> Examples:
    text = text if isinstance(text, TrainingText) else TrainingText(text, [len(text)])
    return text.examples(tokenizer, options.max_length)


def _prompted(text: Documents, tokenizer: Tokenizer, options: DataOptions) -> tuple[list[list[int]], list[list[int]]]:
    """Encode documents, and their prompts without an end."""
    return tokenizer.encode_batch(text.texts), [ids[:-1] for ids in tokenizer.encode_batch(text.prompts)]


def _language_model(text: tuple[list[list[int]], list[list[int]]], cut: Cutting) -> PackedBatches:
    return PackedBatches(*text, row_length=max(cut.options.max_length, choices().shortest), **cut.common)


def _documents(
    text: Documents, tokenizer: Tokenizer, options: DataOptions
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Cut documents into pieces, and number the word of each of their tokens where words are hidden as a whole."""
    pieces = list(_pieces(tokenizer.encode_batch(text.texts), options.max_length, tokenizer.eos_id))
    if not options.whole_words:
        return pieces, None
    return pieces, list(_pieces(tokenizer.encode_words(text.texts), options.max_length, options.max_length))


def _masked(text: tuple[list[list[int]], list[list[int]] | None], cut: Cutting) -> MaskedBatches:
    pieces, words = text
    hidden = _mask_id(cut.tokenizer)
    ordinary = sorted(set(range(cut.tokenizer.vocab_size)) - cut.tokenizer.special_ids)
    return MaskedBatches(cut.make(pieces, pieces), hidden, ordinary, cut.options.mask_share or 0.15, words)


def _denoising(text: tuple[list[list[int]], None], cut: Cutting) -> DenoisingBatches:
    (pieces, _), o = text, cut.options
    return DenoisingBatches(cut.make(pieces, pieces), _mask_id(cut.tokenizer), o.mask_share or 0.3, o.mask_span)


OBJECTIVES: dict[str, Objective] = {
    "translation": Objective("encoder-decoder", "pairs", False, _pairs, lambda pairs, cut: cut.make(pairs)),
    "language-model": Objective("decoder", "documents", False, _prompted, _language_model),
    "masked-language-model": Objective("encoder", "documents", True, _documents, _masked),
    "denoising": Objective("encoder-decoder", "documents", True, _documents, _denoising),
}


def _pieces(texts: Sequence[Sequence[int]], length: int, last: int) -> Iterator[list[int]]:
    """Cut texts into pieces of at most `length` tokens, each with `last` at its end."""
    for ids in texts:
        for start in range(0, max(1, len(ids) - 1), length - 1):
            yield [*ids[start : min(start + length, len(ids)) - 1], last]


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise UserError("the vocabulary has no <mask>: begin without a given one, or with one that was trained so")
    return tokenizer.mask_id


def validation_scores(
    step: TrainStep,
    batches: BatchesByEpoch,
    text: ParallelText | Documents,
    sentences: int,
    stopped: Callable[[], bool],
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Return (scores, samples) of the model on text that it doesn't learn; both are empty once `stopped()` is true.

    loss: mean in nats a target token, as trained (label smoothing included); perplexity: e to the same without
    smoothing. For pairs greedy translations of the first `sentences` are scored too; the first few are the samples.
    """
    samples: list[dict[str, str]] = []
    total = plain = 0.0
    tokens = 0
    with evaluating(step.model):
        for batch in batches.batches(0):
            if stopped():
                return {}, []
            loss, nll = step.losses(batch)
            total, plain, tokens = total + float(np.array(loss)), plain + float(np.array(nll)), tokens + batch.tokens
        values = {"loss": total / max(1, tokens)}
        values["perplexity"] = perplexity_of(plain / max(1, tokens))
        count = min(sentences, len(text))
        if count and isinstance(text, ParallelText):
            translated = step.model.translate(text.source[:count], overlong="truncate")
            scores = score(translated, text.target[:count])
            values |= {name: scores[name] for name in ("bleu", "chrf", "exact_match")}
            few = zip(text.source, translated, text.target, strict=False)
            samples = [{"source": s, "output": t, "reference": r} for s, t, r in islice(few, min(SAMPLES, count))]
    return values, samples
