"""The options of translating, scoring, embedding, classifying, reranking and answering, for both runtimes.

Search options are in `decoding/options.py`. This file is apart from `arguments.py` because the command line's help
reads it, and it must import no NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mlx_transformer.core.heads import Kind, Pooling
from mlx_transformer.system.errors import Name, Text, UserError
from mlx_transformer.system.fields import Bounds, Checked

Overlong = Literal["error", "truncate", "split", "skip"]
"""What to do with a line that has more tokens than the model has positions.

error: raise an error that names the line. truncate: translate only its first tokens. split: translate it in pieces, cut
at sentence ends if possible, and join them with spaces. skip: leave it empty.
"""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How `translate` reads lines and writes translations (`files.translate_stream`)."""

    overlong: Overlong = "split"
    """What to do with a line longer than the model takes: translate it in pieces (split) or only its beginning
    (truncate), leave its translation empty (skip), or stop (error)."""
    scores: bool = False
    """Write a tab and the score after each translation: its log-probability divided by the length penalty."""
    json: bool = False
    """Write each line as JSON, with source, translations and scores."""
    alignment: bool = False
    """Write a tab and the word alignment after each translation, as source-target pairs, e.g. 0-0 2-1."""
    stream: bool = False
    """Write each translation while it is being decoded; greedy search or sampling, without a beam."""
    resume: bool = False
    """Continue an interrupted run into the same OUT; input, options and model must be the same."""
    force: bool = False
    """Replace an earlier file of translations."""
    source_language: str | None = None
    """Language of the text, for a multilingual model: one of its codes, e.g. eng_Latn."""
    target_language: str | None = None
    """Language to translate into, for a multilingual model, e.g. deu_Latn."""
    task_prefix: str | None = None
    """Text to put before every line, e.g. T5's 'translate English to German: '; unset: the model's own, if any."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """How `score` reads pairs of lines and writes their log-probabilities (`files.score_lines`)."""

    json: bool = False
    """Write each pair as JSON, with its tokens."""
    overlong: Literal["error", "skip"] = "error"
    """What to do with a pair longer than the model takes: end with an error, or leave its line empty."""
    source_language: str | None = None
    """Language of --source, for a multilingual model: one of its codes, e.g. eng_Latn."""
    target_language: str | None = None
    """Language of --reference, e.g. deu_Latn."""
    force: bool = False
    """Replace an earlier file of this command."""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Checked):
    """How texts become vectors; an unset option is as the model's folder says."""

    kind: Kind = "dense"
    """Kind of vector: one per text (dense), a weight per token id (sparse), or one per token (multi). Sparse and multi
    need a model trained for them, e.g. bge-m3."""
    prompt: str | None = None
    """Text to put before each text, e.g. 'query: '; unset: the model's own."""
    prompt_name: str | None = None
    """Name of one of the model's prompts, e.g. query; unset: its default prompt, if any."""
    dimensions: Annotated[int, Bounds(at_least=1, at_most=2**20)] | None = None
    """Keep only this many first numbers of each vector, for models trained for it (Matryoshka); unset: all."""
    pooling: Pooling | None = None
    """How to combine the tokens' vectors into the text's; unset: as the model's folder says."""
    normalize: bool | None = None
    """Scale vectors to length 1; unset: as the model's folder says."""

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
    """What `classify` writes."""

    all: bool = False
    """Write every class with its probability, the likeliest first, instead of only the likeliest."""
    several: bool | None = None
    """A text may be in several classes, each with its own probability (sigmoid, not softmax); unset: as the model's
    config says."""


@dataclass(frozen=True, kw_only=True)
class RerankOptions(Checked):
    """What `rerank` writes."""

    top_n: Annotated[int, Bounds(at_least=1, at_most=2**31 - 1)] | None = None
    """Write only the best N documents; unset: all."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Checked):
    """Limits of an answer."""

    max_answer_tokens: Annotated[int, Bounds(at_least=1, at_most=2**20)] = 15
    """Longest answer, in tokens."""
