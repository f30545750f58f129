"""The verbs of a model on ids and text, each written once for every runtime.

Imports are lazy: searching on ids does not load the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Ids, check_ids
from mlx_transformer.decoding.options import Hypothesis, check_single
from mlx_transformer.decoding.steps import Model

from .passes import ONE_AT_A_TIME, Passes
from .settings import (
    LANGUAGES,
    NO_SHORTLIST,
    SHORTLIST,
    TASK_PREFIX,
    Settings,
    around_source,
    resolved,
    with_source_language,
)

if TYPE_CHECKING:
    from typing import Unpack

    from mlx_transformer.core.heads import HeadKind
    from mlx_transformer.core.shortlist import Shortlist
    from mlx_transformer.core.text_embedding import TextEmbedding
    from mlx_transformer.text.tokenizer import Tokenizer

    from .arguments import (
        AnswerArguments,
        BestArguments,
        EmbedderArguments,
        IdArguments,
        StreamArguments,
        StreamedTextArguments,
        TextArguments,
        VectorArguments,
    )
    from .embed import Embedder, GraphVectors
    from .fill import Filling
    from .heads import Answer, EncoderHead, Ranked, Scored, Tagged, Text
    from .translate import Overlong, Translation, Translator

T = TypeVar("T")


class TextVerbs:
    """The verbs of a model. A runtime adds the config, the tokenizer and the way to decode.

    Ids are lists of lists. Text is one string or a list, and the result has the same form. options: the fields of
    `generation.options.Options`. Anything wrong with either is a `UserError`.
    """

    config: TransformerConfig
    where: str = "model"
    """The name of the model in messages."""
    has_steps: bool = True
    """Whether the model gives tokens one by one, and the probability of given ones; a search inside a graph doesn't."""
    takes_text: bool = False
    """Whether the tokenizer is in the graph, so that it takes no ids."""
    passes: Passes = ONE_AT_A_TIME
    """How an encoder's passes over several texts are computed."""

    @cached_property
    def generation(self) -> Settings:
        """How the model generates by default (`generation.json`): fields of `Options`; those of a call win."""
        return {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, read when it is first asked for; None if there is none."""
        raise NotImplementedError

    @property
    def place(self) -> Path | None:
        """The folder with the files that its settings name."""
        return None

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The shortlist: which ids the output for a sentence may contain; None: all. By default the one named in the
        model's settings; another may be set."""
        name = self.generation.get(SHORTLIST)
        if name is None or self.place is None:
            return None
        from mlx_transformer.core.shortlist import open_shortlist

        return open_shortlist(self.place / name, self.config)

    def use_shortlist(self, file: str | Path | None) -> None:
        """Use a shortlist file in Marian's format; "none": use none; None: keep the current one."""
        if str(file) == NO_SHORTLIST:
            self.shortlist = None
        elif file is not None:
            from mlx_transformer.core.shortlist import open_shortlist

            self.shortlist = open_shortlist(file, self.config)

    @property
    def shows_attention(self) -> bool:
        """Whether `search(ids, attention=True)` gives the attention of its hypotheses."""
        return False

    @property
    def depends_on_batch(self) -> bool:
        """Whether an input's result may depend on those computed with it, by more than rounding."""
        return False

    def decoding(self) -> AbstractContextManager[Model]:
        """Return a context that gives the model, ready for a search."""
        raise NotImplementedError

    def token_logits(self, ids: list[list[int]], **others: Any) -> Any:
        """Compute the logits (B, L, V) of rows (B, L) of one length, by a decoder or an encoder alone."""
        raise NotImplementedError

    def token_vectors(self, ids: NDArray, mask: NDArray) -> Any:
        """Compute the encoder's output (B, L, D) of rows (B, L) and their mask, 1 on tokens."""
        raise NotImplementedError

    @cached_property
    def text_embedding(self) -> TextEmbedding | None:
        """How a text's vector is made of the encoder's output, as the model's folder says; None if it doesn't."""
        return None

    @property
    def graph_vectors(self) -> GraphVectors | None:
        """The vectors that the model's graphs compute; None if they only compute the encoder's output."""
        return None

    def generate(
        self, ids: Ids | None = None, prefix: Ids | None = None, **options: Unpack[IdArguments]
    ) -> list[list[int]]:
        """Return new token ids of each input's best output.

        Arguments as for `generation.search.search`; for a model of several languages also `source_language` and
        `target_language`, codes of its own (`generation.json`).
        """
        from mlx_transformer.decoding.search import generate

        return self._searched(generate, ids, prefix, {**options})

    def search(
        self, ids: Ids | None = None, prefix: Ids | None = None, **options: Unpack[IdArguments]
    ) -> list[list[Hypothesis]]:
        """Return the `n_best` outputs of each input with their scores, best first; see `generation.search.search`."""
        from mlx_transformer.decoding.search import search

        return self._searched(search, ids, prefix, {**options})

    def log_probabilities(self, ids: Ids, targets: Ids, **options: Any) -> list[NDArray[np.float32]]:
        """Return log p of every token of each target; see `generation.likelihood.log_probabilities`."""
        from .likelihood import log_probabilities

        with self.decoding() as model:
            return log_probabilities(model, ids, targets, **options)

    @overload
    def score(self, lines: str, translations: str) -> float: ...
    @overload
    def score(self, lines: list[str], translations: list[str]) -> list[float]: ...
    def score(self, lines: str | list[str], translations: str | list[str]) -> float | list[float]:
        """Return log p of a line's translation, or of each of several: the sum over its tokens and the end token."""
        from .likelihood import score

        scores = score(self.translator.tokenizer, self.log_probabilities, lines, translations)
        return scores[0] if isinstance(lines, str) else scores

    def stream_ids(
        self, ids: Sequence[int], prefix: Sequence[int] = (), **options: Unpack[StreamArguments]
    ) -> Iterator[int]:
        """Yield the new token ids of one input, each as soon as it is decided; see `generation.stream.stream_ids`."""
        from .stream import stream_ids

        [ids], others = with_source_language(self.generation, [ids], {**options})
        chosen = {"candidates": self._candidates(ids), **self._streaming(others)}
        return self._streamed(lambda model: stream_ids(model, ids, prefix, **chosen))

    @overload
    def translate(self, lines: str, *, overlong: Overlong = "error", **options: Unpack[TextArguments]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def translate(
        self, lines: Sequence[str], *, overlong: Overlong = "error", **options: Unpack[TextArguments]
    ) -> list[str]: ...
    def translate(self, lines: str | Sequence[str], *, overlong: Overlong = "error", **options: Any) -> str | list[str]:
        """Translate a line, or each of several, in order; an empty line stays empty.

        overlong: what to do with a line of more tokens than the model takes (`generation.text_options.Overlong`).
        task_prefix, an option: text before every line, such as T5's "translate English to German: ".
        """
        check_single(options, "translate", "n_best")
        outputs = [best[0].text for best in self._n_best(lines, overlong=overlong, scored=False, **options)]
        return outputs[0] if isinstance(lines, str) else outputs

    @overload
    def n_best(self, lines: str, **options: Unpack[BestArguments]) -> list[Translation]: ...  # type: ignore[overload-overlap]
    @overload
    def n_best(self, lines: Sequence[str], **options: Unpack[BestArguments]) -> list[list[Translation]]: ...
    def n_best(self, lines: str | Sequence[str], **options: Any) -> list[Translation] | list[list[Translation]]:
        """Return the `n_best` translations of a line, or of each of several, with their scores, best first; arguments
        as `generation.translate.Translator.n_best` has them."""
        outputs = self._n_best(lines, **options)
        return outputs[0] if isinstance(lines, str) else outputs

    def stream(
        self, text: str, *, stop: Sequence[str] | None = None, **options: Unpack[StreamedTextArguments]
    ) -> Iterator[str]:
        """Yield the translation of one line, or a decoder's text after one prompt, in pieces, as they are decided.

        stop: as `complete` has it. options: also those of `generation.stream.stream`.
        """
        if stop is not None or self.config.architecture != "encoder-decoder":
            from .complete import stream as continued

            return continued(self._decoders("generate"), self.stream_ids, text, stop or (), **options)
        from .stream import stream

        others: dict[str, Any] = {**options}
        translator = self.translator.with_prefix(others.pop(TASK_PREFIX, None))
        around, others = around_source(self.generation, others)
        chosen = {"around": around, "candidates_of": self._candidates, **self._streaming(others)}
        return self._streamed(lambda model: stream(model, translator, text, **chosen))

    @overload
    def complete(self, prompts: str, *, stop: Sequence[str] = (), **options: Unpack[IdArguments]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def complete(
        self, prompts: Sequence[str], *, stop: Sequence[str] = (), **options: Unpack[IdArguments]
    ) -> list[str]: ...
    def complete(self, prompts: str | Sequence[str], *, stop: Sequence[str] = (), **options: Any) -> str | list[str]:
        """Return what a decoder alone writes after a prompt, or each of several, up to the first word of `stop`."""
        from .complete import complete

        outputs = complete(self._decoders("generate"), self.generate, prompts, stop=stop, **options)
        return outputs[0] if isinstance(prompts, str) else outputs

    @overload
    def fill(self, lines: str, top_k: int = 5) -> list[list[Filling]]: ...  # type: ignore[overload-overlap]
    @overload
    def fill(self, lines: Sequence[str], top_k: int = 5) -> list[list[list[Filling]]]: ...
    def fill(self, lines: str | Sequence[str], top_k: int = 5) -> list[list[Filling]] | list[list[list[Filling]]]:
        """Return the `top_k` likeliest tokens for each <mask> of a line, or of each of several, by an encoder alone."""
        from .fill import fill

        guesses = fill(self.config, self.tokenizer, self.token_logits, lines, top_k, self.where)
        return guesses[0] if isinstance(lines, str) else guesses

    @overload
    def classify(self, texts: str | tuple[str, str], several: bool | None = None) -> list[Scored]: ...
    @overload
    def classify(self, texts: list[Text], several: bool | None = None) -> list[list[Scored]]: ...
    def classify(self, texts: Text | list[Text], several: bool | None = None) -> list[Scored] | list[list[Scored]]:
        """Return the classes of a text, of a pair (text, text), or of each of several, with their probabilities, the
        likeliest first, by an encoder whose head has them; several: each class by itself, as the model's config says by
        default."""
        from .heads import classify

        encoder = self.encoder_head("classes", "classify")
        classes = classify(encoder, texts if isinstance(texts, list) else [texts], several)
        return classes if isinstance(texts, list) else classes[0]

    @overload
    def tag(self, texts: str) -> list[Tagged]: ...  # type: ignore[overload-overlap]
    @overload
    def tag(self, texts: Sequence[str]) -> list[list[Tagged]]: ...
    def tag(self, texts: str | Sequence[str]) -> list[Tagged] | list[list[Tagged]]:
        """Return the entities of a text, or of each of several, with their labels and places, by an encoder whose head
        classifies tokens; see `generation.tag`."""
        from .heads import tag

        entities = tag(self.encoder_head("token-classes", "tag"), texts)
        return entities[0] if isinstance(texts, str) else entities

    @overload
    def answer(self, question: str, context: str, **options: Unpack[AnswerArguments]) -> Answer | None: ...
    @overload
    def answer(
        self, question: str | list[str], context: str | list[str], **options: Unpack[AnswerArguments]
    ) -> list[Answer | None]: ...
    def answer(
        self, question: str | list[str], context: str | list[str], **options: Any
    ) -> Answer | list[Answer | None] | None:
        """Return the part of a context that answers a question, or None of an empty one, by an encoder whose head has
        spans; lists of either give a list. options: the fields of `generation.text_options.AnswerOptions`."""
        from .arguments import AnswerOptions
        from .heads import answer, paired

        settings = AnswerOptions(**options)
        answers = answer(self.encoder_head("spans", "answer"), paired(question, context), settings)
        return answers[0] if isinstance(question, str) and isinstance(context, str) else answers

    def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None) -> list[Ranked]:
        """Return the documents by their relevance to a query, the best first, by an encoder that reads pairs and has
        one class; top_n: so many of them."""
        from .arguments import RerankOptions
        from .heads import check_reranker, rerank

        encoder = self.encoder_head("classes", "rerank")
        check_reranker(self.config, self.where)
        return rerank(encoder, query, documents, RerankOptions(top_n=top_n))

    def encoder_head(self, kind: HeadKind, verb: str) -> EncoderHead:
        """Return what goes from text to a head's logits; `UserError`, which says that `verb` needs it, for a model
        without a head of that kind."""
        from .heads import EncoderHead

        return EncoderHead(self.config, self.tokenizer, self.token_logits, self.where, kind, verb, self.passes)

    @overload
    def embed(
        self, texts: str | Sequence[str], *, kind: Literal["dense"] = ..., **options: Unpack[VectorArguments]
    ) -> NDArray[np.float32]: ...
    @overload
    def embed(self, texts: str, *, kind: Literal["sparse"], **options: Unpack[VectorArguments]) -> dict[int, float]: ...  # type: ignore[overload-overlap]
    @overload
    def embed(
        self, texts: Sequence[str], *, kind: Literal["sparse"], **options: Unpack[VectorArguments]
    ) -> list[dict[int, float]]: ...
    @overload
    def embed(
        self, texts: str, *, kind: Literal["multi"], **options: Unpack[VectorArguments]
    ) -> NDArray[np.float32]: ...  # type: ignore[overload-overlap]
    @overload
    def embed(
        self, texts: Sequence[str], *, kind: Literal["multi"], **options: Unpack[VectorArguments]
    ) -> list[NDArray[np.float32]]: ...
    @overload
    def embed(self, texts: str | Sequence[str], *, kind: str, **options: Any) -> Any: ...
    def embed(
        self, texts: str | Sequence[str], *, done: Callable[[float], None] = lambda share: None, **options: Any
    ) -> Any:
        """Return the vector (W,) of a text, or those (N, W) of several, by an encoder alone; options: the fields of
        `generation.text_options.EmbedOptions`. With kind="sparse" {id: weight} of a text, with "multi" the vectors
        (L - 1, W) of its tokens, or a list of these. The end of a text is left out that is longer than the model
        takes."""
        embedder = self.embedder(**options)
        vectors = embedder.made(embedder.rows([texts] if isinstance(texts, str) else texts), done)
        return vectors[0] if isinstance(texts, str) else vectors

    def embedder(self, **options: Unpack[EmbedderArguments]) -> Embedder:
        """Return what goes from text to rows of ids and to vectors; options as for `embed`. `UserError` for a model
        that has no vectors of texts."""
        from .embed import Embedder

        about = self.config, self.tokenizer, self.text_embedding, self.token_vectors, self.where, self.graph_vectors
        return Embedder(*about, self.passes, **options)

    def perplexity(self, texts: Sequence[str], done: Callable[[float], None] = lambda share: None) -> dict[str, Any]:
        """Measure how well a decoder alone predicts documents; see `generation.likelihood.perplexity`."""
        from .likelihood import perplexity

        tokenizer = self._decoders("a text's perplexity")
        return perplexity(self.config, tokenizer, self.token_logits, texts, done)

    def check_lines(
        self, lines: Sequence[str], overlong: Overlong = "error", first_line: int = 1, task_prefix: str | None = None
    ) -> None:
        """Raise `UserError` for the first line that can't be translated; first_line: its number in messages.
        task_prefix: text before each, in place of the model's own."""
        self.translator.with_prefix(task_prefix).rows(lines, overlong, first_line)

    @property
    def translator(self) -> Translator:
        """The object that goes from text to rows of ids and back; `UserError` for a model that translates no text."""
        from .translate import Translator

        reserved = 1 if self.generation.get(LANGUAGES) else 0  # a source may begin with its language
        return Translator(
            *(self.config, self.tokenizer, self.search, self.where, self.generate),
            shows_attention=self.shows_attention,
            reserved=reserved,
            prefix=self.generation.get(TASK_PREFIX, ""),
        )

    def _searched(
        self, verb: Callable[..., list[T]], ids: Ids | None, prefix: Ids | None, options: dict[str, Any], **how: Any
    ) -> list[T]:
        """Call `generate` or `search` with the model's own settings and shortlist. how: arguments of `decoding`."""
        ids, chosen = self._shortlisted(*with_source_language(self.generation, ids, options))
        with self.decoding(**how) as model:
            return verb(model, ids, prefix, **resolved(self.generation, chosen))

    def _shortlisted(self, ids: Ids | None, options: dict[str, Any]) -> tuple[Ids | None, dict[str, Any]]:
        """Add each input's candidates by the shortlist to the options, unless the caller gives candidates."""
        if ids is None or self.shortlist is None or options.get("candidates") is not None:
            return ids, options
        check_ids(ids, self.config.source_vocab_size)
        return ids, {**options, "candidates": [self._candidates(row) for row in ids]}

    def _candidates(self, ids: Sequence[int]) -> Any:
        """Return the ids that the output for this source may contain, by the shortlist; None: all."""
        if self.shortlist is None:
            return None
        from mlx_transformer.core.shortlist import shares_ids

        shared = shares_ids(self.config, self.tokenizer is not None and self.tokenizer.separate)
        return self.shortlist.candidates(ids, self.config.vocab_size, shared)

    def _n_best(self, lines: str | Sequence[str], **options: Any) -> list[list[Translation]]:
        prefix = options.pop(TASK_PREFIX, None)
        return self.translator.with_prefix(prefix).n_best(lines, **options)

    def _decoders(self, what: str) -> Tokenizer:
        """Return the tokenizer of a decoder alone; `UserError`, which says `what` needs one, for any other model."""
        from .translate import fitting_tokenizer

        return fitting_tokenizer(self.config, self.tokenizer, self.where, "decoder", what)

    def _streaming(self, options: dict[str, Any]) -> dict[str, Any]:
        """Resolve options, with the model's own beam left out: beam search can't stream."""
        return resolved(self.generation, {"beam": 1, **options})

    def _streamed(self, begin: Callable[[Model], Iterator[T]]) -> Iterator[T]:
        """Begin at once, so that errors are raised at the call; go on while the caller reads."""
        with self.decoding() as model:
            items = begin(model)
        return self._while_decoding(items)

    def _while_decoding(self, items: Iterator[T]) -> Iterator[T]:
        with self.decoding():
            yield from items
