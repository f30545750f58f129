"""The objectives: what a model learns, from which text and which batches, and how it is scored on validation text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import Architecture, TransformerConfig
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.data.batches import TaughtBatches, TokenBatches
from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.data.corrupted import DenoisingBatches, MaskedBatches
from mlx_transformer.data.documents import Documents, PackedBatches
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.data.labelled import Labelled, LabelledBatches, LabelledRows, encoded
from mlx_transformer.data.matches import MatchBatches, Matches
from mlx_transformer.data.ragged import Examples
from mlx_transformer.data.training_text import TrainingText
from mlx_transformer.device import tuning
from mlx_transformer.generation.embed import prepared
from mlx_transformer.generation.evaluate import score
from mlx_transformer.generation.likelihood import perplexity_of
from mlx_transformer.runtime.decoding import evaluating
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .encoder_step import ContrastiveStep, HeadStep, VectorStep
from .options import DataOptions
from .step import TrainStep

MakePairs = Callable[..., TokenBatches]
"""Makes batches of examples or of two lists of ids, as the recipe and the device like them."""
SAMPLES = 3
"""The translations of a validation that are shown."""
RunText = TrainingText | ParallelText | Documents | Matches | Labelled
"""The text of a run, in the forms that its objectives read."""


@dataclass(frozen=True)
class Reading:
    """How text becomes ids."""

    tokenizer: Tokenizer
    options: DataOptions
    config: TransformerConfig
    embedding: TextEmbedding | None = None
    """How a text's vector is made, where that is learned."""
    teach: Callable[[Sequence[str]], NDArray[np.float32]] | None = None
    """The class that makes the vectors that are learned."""

    @property
    def most(self) -> int:
        """The tokens of a text that are read."""
        limits = [self.options.max_length, self.config.max_positions]
        limits += [] if self.embedding is None or self.embedding.max_length is None else [self.embedding.max_length]
        return min(limits)


@dataclass(frozen=True)
class Cutting(Reading):
    """How text is cut into batches."""

    make: MakePairs = TokenBatches
    """How pairs become batches."""
    common: dict[str, Any] = field(default_factory=dict)
    """The arguments of all batches."""


@dataclass(frozen=True)
class Objective:
    architecture: Architecture
    reads: Literal["pairs", "documents", "matches", "labelled"]
    masks: bool
    """Whether its vocabulary has <mask>."""
    encoded: Callable[[Any, Reading], Any]
    """(text, how it is read) -> the text as ids, which takes its time, once."""
    batches: Callable[[Any, Cutting], BatchesByEpoch[Any]]
    """(ids from `encoded`, how they are cut) -> batches."""
    step: type[TrainStep] = TrainStep
    """The class that learns from them."""
    keys: tuple[str, ...] = ()
    """The options of training that are arguments of the step."""
    unit: str = "target tokens"
    """The unit over which a step's loss is the mean."""

    @property
    def embeds(self) -> bool:
        """Whether it learns vectors of texts."""
        return self.step in (ContrastiveStep, VectorStep)


def _pairs(text: TrainingText | ParallelText, how: Reading) -> Examples:
    text = text if isinstance(text, TrainingText) else TrainingText(text, [len(text)])
    return text.examples(how.tokenizer, how.options.max_length)


def _prompted(text: Documents, how: Reading) -> tuple[list[list[int]], list[list[int]]]:
    """Encode documents, and their prompts without an end."""
    tokenizer = how.tokenizer
    return tokenizer.encode_batch(text.texts), [ids[:-1] for ids in tokenizer.encode_batch(text.prompts)]


def _language_model(text: tuple[list[list[int]], list[list[int]]], cut: Cutting) -> PackedBatches:
    return PackedBatches(*text, row_length=max(cut.options.max_length, tuning().shortest), **cut.common)


def _documents(text: Documents, how: Reading) -> tuple[list[list[int]], list[list[int]] | None]:
    """Cut documents into pieces, and number the word of each of their tokens where words are hidden as a whole."""
    tokenizer, options = how.tokenizer, how.options
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


def _matches(text: Matches, how: Reading) -> list[list[list[int]]]:
    """Encode sources, targets and negatives behind their prompts."""
    prompts = [how.options.source_prompt or "", how.options.target_prompt or "", how.options.target_prompt or ""]
    return [
        _texts([prompt + text for text in column], how) for column, prompt in zip(text.columns, prompts, strict=False)
    ]


def _texts(texts: Sequence[str], how: Reading) -> list[list[int]]:
    """Encode texts as the model's settings say; the end of one that is too long is left out."""
    assert how.embedding is not None
    rows = how.tokenizer.encode_batch([prepared(text, how.embedding) for text in texts])
    return [ids if len(ids) <= how.most else [*ids[: how.most - 1], ids[-1]] for ids in rows]


def _contrastive(columns: list[list[list[int]]], cut: Cutting) -> MatchBatches:
    return MatchBatches(columns, cut.options.batch_pairs, cut.common["seed"])


def _labelled(text: Labelled, how: Reading) -> LabelledRows:
    return encoded(text, how.tokenizer, how.config.head, how.most)


def _classified(rows: LabelledRows, cut: Cutting) -> LabelledBatches:
    ids = [row.ids for row in rows.rows]
    return LabelledBatches(cut.make(ids, ids), rows, cut.config.head, bool(cut.config.token_types))


def _taught(text: Documents, how: Reading) -> tuple[list[list[int]], NDArray[np.float32]]:
    assert how.teach is not None
    return _texts(text.texts, how), how.teach(text.texts)


def _distilled(text: tuple[list[list[int]], NDArray[np.float32]], cut: Cutting) -> TaughtBatches:
    ids, vectors = text
    return TaughtBatches(cut.make(ids, ids), vectors)


OBJECTIVES: dict[str, Objective] = {
    "translation": Objective("encoder-decoder", "pairs", False, _pairs, lambda pairs, cut: cut.make(pairs)),
    "language-model": Objective("decoder", "documents", False, _prompted, _language_model),
    "masked-language-model": Objective("encoder", "documents", True, _documents, _masked),
    "denoising": Objective("encoder-decoder", "documents", True, _documents, _denoising),
    "contrastive": Objective(
        *("encoder", "matches", False, _matches, _contrastive, ContrastiveStep),
        keys=("temperature", "symmetric", "chunk"),
        unit="pairs",
    ),
    "classification": Objective("encoder", "labelled", False, _labelled, _classified, HeadStep, unit="labels"),
    "distillation": Objective("encoder", "documents", False, _taught, _distilled, VectorStep, unit="texts"),
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
    text: RunText,
    sentences: int,
    stopped: Callable[[], bool],
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Return (scores, samples) of the model on text that it doesn't learn; both are empty once `stopped()` is true.

    loss: mean in nats a target token, as trained (label smoothing included); perplexity: e to the same without
    smoothing. In place of perplexity others have their step's second number: accuracy, the share of labels that are
    right or of sources whose target is the nearest of their batch; cosine, the mean with the teacher's vectors. For
    translations greedy ones of the first `sentences` are scored too; the first few are the samples.
    """
    samples: list[dict[str, str]] = []
    total = second = 0.0
    tokens = 0
    with evaluating(step.model):
        for batch in batches.batches(0):
            if stopped():
                return {}, []
            loss, more = step.losses(batch)
            total, second, tokens = total + float(np.array(loss)), second + float(np.array(more)), tokens + batch.tokens
        mean = second / max(1, tokens)
        values = {"loss": total / max(1, tokens)}
        values[step.second] = perplexity_of(mean) if step.second == "perplexity" else mean
        count = min(sentences, len(text))
        if count and isinstance(text, ParallelText):
            translated = step.model.translate(text.source[:count], overlong="truncate")
            scores = score(translated, text.target[:count])
            values |= {name: scores[name] for name in ("bleu", "chrf", "exact_match")}
            few = zip(text.source, translated, text.target, strict=False)
            samples = [{"source": s, "output": t, "reference": r} for s, t, r in islice(few, min(SAMPLES, count))]
    return values, samples
