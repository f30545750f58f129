"""The training objectives (e.g. translation, masked-language-model): text, batches and step of each, and validation."""

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
from mlx_transformer.data.documents import ASSISTANT, DenoisingBatches, Documents, MaskedBatches, PackedBatches
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
from mlx_transformer.text.chat import ChatOptions, ChatTemplates, answers
from mlx_transformer.text.tokenizer import Tokenizer

from .encoder_step import ContrastiveStep, HeadStep, VectorStep
from .options import DataOptions
from .step import TrainStep

MakePairs = Callable[..., TokenBatches]
"""Cuts `Examples`, or source and target ids, into batches; `EncodedText.batches` chooses class and settings."""
SAMPLES = 3
"""Translations shown after a validation."""
RunText = TrainingText | ParallelText | Documents | Matches | Labelled
"""A run's text, in one of the forms that the objectives read."""


@dataclass(frozen=True)
class Reading:
    """How text becomes token ids."""

    tokenizer: Tokenizer
    options: DataOptions
    config: TransformerConfig
    embedding: TextEmbedding | None = None
    """How a text's vector is made, for objectives that learn vectors."""
    teach: Callable[[Sequence[str]], NDArray[np.float32]] | None = None
    """texts -> the teacher's vectors (N, W), for distillation."""
    chat: ChatTemplates | None = None
    """The templates of the checkpoint that a decoder starts from, if it has some."""

    @property
    def most(self) -> int:
        """Most tokens of a text; the rest is cut off."""
        limits = [self.options.max_length, self.config.max_positions]
        limits += [] if self.embedding is None or self.embedding.max_length is None else [self.embedding.max_length]
        return min(limits)


@dataclass(frozen=True)
class Cutting(Reading):
    """How text is cut into batches."""

    make: MakePairs = TokenBatches
    """Cuts pairs into batches."""
    common: dict[str, Any] = field(default_factory=dict)
    """Settings for batches of every kind, e.g. `seed` and `batch_tokens`."""


@dataclass(frozen=True)
class Objective:
    architecture: Architecture
    reads: Literal["pairs", "documents", "matches", "labelled"]
    masks: bool
    """Whether the vocabulary needs <mask>."""
    encoded: Callable[[Any, Reading], Any]
    """(text, reading) -> the text as ids. Slow, so it is called once."""
    batches: Callable[[Any, Cutting], BatchesByEpoch[Any]]
    """(result of `encoded`, cutting) -> batches."""
    step: type[TrainStep] = TrainStep
    """The training step for these batches."""
    keys: tuple[str, ...] = ()
    """Fields of `TrainingOptions` that the step takes as arguments."""
    unit: str = "target tokens"
    """The loss is the mean over these, e.g. "pairs"."""

    @property
    def embeds(self) -> bool:
        """Whether the objective learns text vectors."""
        return self.step in (ContrastiveStep, VectorStep)


def _pairs(text: TrainingText | ParallelText, how: Reading) -> Examples:
    text = text if isinstance(text, TrainingText) else TrainingText(text, [len(text)])
    return text.examples(how.tokenizer, how.options.max_length)


def _prompted(text: Documents, how: Reading) -> tuple[list[list[int]], list[list[bool]]]:
    """Encode documents behind their prompts and the start token, where texts of the vocabulary have one: (ids, which of
    them are learned). What a model with a chat template reads as prompt and completion is a conversation of two
    messages, as in mlx-lm."""
    rows: list[list[int]] = []
    learned: list[list[bool]] = []
    plain = how.tokenizer.prompts(text.prompts), how.tokenizer.documents(text.texts)
    for i, (before, ids) in enumerate(zip(*plain, strict=True)):
        entry = text.chats[i] if text.chats else None
        if entry is None and text.prompts[i] and how.chat is not None:
            pair = zip(("user", ASSISTANT), (text.prompts[i], text.texts[i]), strict=True)
            entry = {"messages": [{"role": role, "content": content} for role, content in pair]}
        if entry is None:
            before = before if text.prompts[i] else how.tokenizer.start
            row, own = [*before, *ids], [False] * len(before) + [True] * len(ids)
        elif how.chat is None:
            raise UserError("messages are written by a chat template: start from a checkpoint that has one")
        else:
            options = ChatOptions(tools=entry.get("tools"), date=how.options.chat_date)
            row, own = answers(how.chat, how.tokenizer, entry["messages"], options)
            if not any(own) and how.options.learned == "answers":
                raise UserError(
                    f"conversation {i + 1}: no answer is found, as the chat template begins one otherwise than it "
                    "writes one: set learned to all"
                )
        rows.append(row)
        learned.append([True] * len(row) if how.options.learned == "all" else own)
    return rows, learned


def _language_model(text: tuple[list[list[int]], list[list[bool]]], cut: Cutting) -> PackedBatches:
    return PackedBatches(*text, row_length=max(cut.options.max_length, tuning().shortest), **cut.common)


def _documents(text: Documents, how: Reading) -> tuple[list[list[int]], list[list[int]] | None]:
    """Cut documents into pieces of token ids; for `whole_words` also give each token its word's number."""
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
    """Encode sources, targets and negatives, each with its prompt in front."""
    prompts = [how.options.source_prompt or "", how.options.target_prompt or "", how.options.target_prompt or ""]
    return [
        _texts([prompt + text for text in column], how) for column, prompt in zip(text.columns, prompts, strict=False)
    ]


def _texts(texts: Sequence[str], how: Reading) -> list[list[int]]:
    """Encode texts for embedding; a text that is too long is cut, and keeps eos."""
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
    """Cut texts into pieces of at most `length` tokens, each ending with `last`."""
    for ids in texts:
        for start in range(0, max(1, len(ids) - 1), length - 1):
            yield [*ids[start : min(start + length, len(ids)) - 1], last]


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.mask_id is None:
        raise UserError("the vocabulary has no <mask>: leave out tokenizer, or give a vocabulary with <mask>")
    return tokenizer.mask_id


def validation_scores(
    step: TrainStep,
    batches: BatchesByEpoch,
    text: RunText,
    sentences: int,
    stopped: Callable[[], bool],
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Score the model on validation text: return (scores, samples), both empty once `stopped()` is true.

    loss: the mean per target token in nats, as trained, label smoothing included.
    perplexity: e to the same loss without smoothing.
    accuracy (classification, contrastive): the share of right labels, or of sources whose target is the nearest.
    cosine (distillation): the mean cosine with the teacher's vectors.
    bleu, chrf, exact_match (translation): scores of greedy translations of the first `sentences` lines; the first
    `SAMPLES` of these are the samples.
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
