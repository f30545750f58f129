"""The options of the verbs on text, for all runtimes; those of a search are in `options.py`.

The keyword arguments of models' verbs, for type checkers and editors; never imported at run time.

Most are the fields of a dataclass that checks them; `tests/repository/test_arguments.py` compares names and types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from mlx_transformer.core.heads import Kind, Pooling
from mlx_transformer.core.inputs import Ids
from mlx_transformer.decoding.options import PenaltyForm
from mlx_transformer.decoding.search import DoneShare, SharedSearch
from mlx_transformer.system.errors import Name, Text, UserError
from mlx_transformer.system.fields import Bounds, Checked

from .alignment import CrossWeights

Overlong = Literal["error", "truncate", "split", "skip"]
"""What to do with a line of more tokens than the model has positions: raise an error that names it; translate only its
first tokens; translate pieces, cut at sentence ends if possible, and join them with spaces; or leave it empty."""
OverlongPair = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How lines are read and their translations written (`files.translate_stream`)."""

    overlong: Overlong = "split"
    """The treatment of a line longer than the model takes: translate its pieces, its beginning, nothing, or end."""
    scores: bool = False
    """Write each translation's score after it, separated by a tab: log p by the length penalty."""
    json: bool = False
    """Write each line as JSON, with source, translations and scores."""
    alignment: bool = False
    """Write after each translation which source word each of its words was made of: 0-0 1-2."""
    stream: bool = False
    """Write text as it is decided, line by line."""
    resume: bool = False
    """Continue what was interrupted on its way to OUT."""
    force: bool = False
    """Replace an earlier file of translations."""
    source_language: str | None = None
    """The text's language, by its code in a model of several: eng_Latn."""
    target_language: str | None = None
    """The language that it is translated into, likewise."""
    task_prefix: str | None = None
    """Text before every line, as T5 wants it: 'translate English to German: '."""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Checked):
    """How texts become vectors, where that differs from what the model's folder says."""

    kind: Kind = "dense"
    """The kind of vector that is made of a text: one vector (dense); a weight for each of its token ids (sparse); a
    vector of each token (multi). The last two need a model that was trained for them, such as bge-m3."""
    prompt: str | None = None
    """The prompt before each text; unset: the model's own."""
    prompt_name: str | None = None
    """The name of one of the model's prompts, such as query; unset: its default one, if it has one."""
    dimensions: Annotated[int, Bounds(at_least=1, at_most=2**20)] | None = None
    """Numbers of a vector, the first ones; unset: all. For models that were trained to be cut (Matryoshka)."""
    pooling: Pooling | None = None
    """The way in which the tokens' vectors become one; unset: as the model's folder states."""
    normalize: bool | None = None
    """Whether vectors have length 1; unset: what the model's folder says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompt_name is not None:
            raise UserError(Text("prompt and {prompt_name}: give one of them"))
        for name in ("dimensions", "pooling", "normalize"):
            if self.kind != "dense" and getattr(self, name) is not None:
                raise UserError(
                    "{}: is of a text's one vector ({}); leave it out for {kind}",
                    Name(name),
                    Name("kind", "dense"),
                    kind=self.kind,
                )


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(Checked):
    """The settings of classes of texts."""

    all: bool = False
    """Write every class with its probability, the likeliest first, not the likeliest alone."""
    several: bool | None = None
    """Whether a text may be in several classes, each with a probability of its own; unset: what the model's config
    says."""


@dataclass(frozen=True, kw_only=True)
class RerankOptions(Checked):
    """Which documents are named."""

    top_n: Annotated[int, Bounds(at_least=1, at_most=2**31 - 1)] | None = None
    """The best so many documents; unset: all of them."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Checked):
    """The limits of an answer."""

    max_answer_tokens: Annotated[int, Bounds(at_least=1, at_most=2**20)] = 15
    """Tokens of the longest answer."""


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
    seed: int
    repetition_penalty: float
    no_repeat_ngram: int
    heuristic_stop: bool
    forced_first: Sequence[int]
    forced_end: bool
    suppressed: Sequence[int]
    suppressed_first: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    end_ids: Sequence[int]
    start_id: int | None
    batch_tokens: int


class LanguageArguments(SearchArguments, total=False):
    """Also, for a model of several languages, its codes."""

    source_language: str | None
    target_language: str | None


class IdArguments(LanguageArguments, total=False):
    """Also for verbs on ids; see `generation.search.search`."""

    candidates: Ids | None
    done: DoneShare | None
    share: SharedSearch
    inputs_embeds: Any
    token_type_ids: Any


class StreamArguments(LanguageArguments, total=False):
    """For `stream_ids`."""

    row: int
    candidates: Sequence[int] | None


class TextArguments(LanguageArguments, total=False):
    """Also for `translate`; see `generation.translate.Translator.n_best`."""

    task_prefix: str | None
    first_line: int
    on_overlong: Callable[[int], None] | None
    done: DoneShare | None
    share: SharedSearch


class BestArguments(TextArguments, total=False):
    """Also for `n_best`."""

    overlong: Overlong
    scored: bool
    aligned: bool | CrossWeights


class StreamedTextArguments(LanguageArguments, total=False):
    """Also for `stream`; see `generation.stream.stream`."""

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
    """Also for `embed`."""

    done: Callable[[float], None]


class AnswerArguments(TypedDict, total=False):
    """The fields of `AnswerOptions`."""

    max_answer_tokens: int
