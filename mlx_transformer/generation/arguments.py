"""Keyword arguments of the verbs, as TypedDicts.

They are for type checkers and editors; nothing imports them at run time. Most repeat the fields of a
dataclass; `tests/repository/test_arguments.py` compares names and types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from mlx_transformer.core.heads import Kind, Pooling
from mlx_transformer.core.inputs import Ids
from mlx_transformer.decoding.options import PenaltyForm
from mlx_transformer.decoding.search import DoneShare, SharedSearch

from .alignment import CrossWeights
from .text_options import Overlong


class SearchArguments(TypedDict, total=False):
    """The fields of `Options`."""

    beam: int
    length_penalty: float
    penalty_form: PenaltyForm
    max_new_tokens: int | None
    max_length_factor: float
    n_best: int
    min_new_tokens: int
    early_stopping: bool
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    heuristic_stop: bool
    forced_first: Sequence[int]
    forced_end: bool
    suppressed: Sequence[int]
    suppressed_first: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    end_ids: Sequence[int]
    start_id: int | None
    speculate: int
    batch_tokens: int


class LanguageArguments(SearchArguments, total=False):
    """Language codes of a multilingual model, e.g. source_language="eng_Latn"."""

    source_language: str | None
    target_language: str | None


class IdArguments(LanguageArguments, total=False):
    """More for verbs on token ids; see `decoding.search.search`."""

    candidates: Ids | None
    done: DoneShare | None
    share: SharedSearch
    inputs_embeds: Any
    token_type_ids: Any


class StreamArguments(LanguageArguments, total=False):
    """More for `stream_ids`."""

    row: int
    candidates: Sequence[int] | None


class TextArguments(LanguageArguments, total=False):
    """More for `translate`; see `generation.translate.Translator.n_best`."""

    task_prefix: str | None
    first_line: int
    on_overlong: Callable[[int], None] | None
    done: DoneShare | None
    share: SharedSearch


class BestArguments(TextArguments, total=False):
    """More for `n_best`."""

    overlong: Overlong
    scored: bool
    aligned: bool | CrossWeights


class ChatArguments(IdArguments, total=False):
    """The fields of `ChatOptions`, and more for `chat`."""

    template: str | None
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    date: str | None
    variables: Mapping[str, Any]
    continued: bool


class StreamedTextArguments(LanguageArguments, total=False):
    """More for `stream`; see `generation.stream.stream`."""

    task_prefix: str | None
    overlong: Overlong
    line_number: int
    on_overlong: Callable[[int], None] | None


class EmbedArguments(TypedDict, total=False):
    """The fields of `EmbedOptions` except `kind`."""

    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    pooling: Pooling | None
    normalize: bool | None


class EmbedderArguments(EmbedArguments, total=False):
    """All fields of `EmbedOptions`."""

    kind: Kind


class VectorArguments(EmbedArguments, total=False):
    """More for `embed`."""

    done: Callable[[float], None]


class AnswerArguments(TypedDict, total=False):
    """The fields of `AnswerOptions`."""

    max_answer_tokens: int
