"""The methods of a model on token ids and on text, written once for every runtime.

Imports are lazy: searching on ids does not load the tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import ONE_AT_A_TIME, Ids, Passes, check_ids
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.decoding.options import Hypothesis, check_single
from mlx_transformer.decoding.steps import Model
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.fields import Bounds, check_value

from .settings import (
    CHAT_TEMPLATES,
    LANGUAGES,
    NO_SHORTLIST,
    SHORTLIST,
    SOURCE_LANGUAGE,
    SPECIAL_TOKENS,
    TARGET_LANGUAGE,
    TASK_PREFIX,
    Settings,
    around_source,
    resolved,
    with_languages,
    with_source_language,
)

if TYPE_CHECKING:
    from typing import Unpack

    from mlx_transformer.core.heads import HeadKind
    from mlx_transformer.core.shortlist import Shortlist
    from mlx_transformer.core.text_embedding import TextEmbedding
    from mlx_transformer.text.chat import ChatTemplates, Messages
    from mlx_transformer.text.tokenizer import Tokenizer

    from .arguments import (
        AnswerArguments,
        BestArguments,
        ChatArguments,
        EmbedderArguments,
        IdArguments,
        StreamArguments,
        StreamedTextArguments,
        TextArguments,
        VectorArguments,
    )
    from .embed import Embedder, GraphVectors
    from .heads import Answer, EncoderHead, Filling, Ranked, Scored, Tagged, Text
    from .stream import NewToken
    from .translate import Overlong, Translation, Translator

T = TypeVar("T")
ANSWER_TOKENS = 2048
"""Most new tokens of an answer in a chat, if nobody names a limit."""


class TextVerbs:
    """Methods of a model: `generate`, `translate`, `embed` and so on. A runtime adds the config, the tokenizer and
    `decoding`.

    Ids are lists of lists. Text is a string or a list of strings; a list gives a list of results. Search options are
    the fields of `decoding.options.Options`. Wrong input and wrong options raise `UserError`.

    >>> model.translate(["Hello.", "Good night."], beam=4)
    """

    config: TransformerConfig
    where: str = "model"
    """The model's name in error messages."""
    has_steps: bool = True
    """Whether the model decodes token by token and gives the probability of a given output. False if the search is in
    the graph."""
    takes_text: bool = False
    """Whether the tokenizer is in the graph, so that the model reads strings, not ids."""
    passes: Passes = ONE_AT_A_TIME
    """How an encoder's forward passes over several texts are scheduled."""

    @cached_property
    def generation(self) -> Settings:
        """The model's default options (`generation.json`): fields of `Options`. The options of a call win."""
        return {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, read on first use; None if it has none."""
        raise NotImplementedError

    @property
    def place(self) -> Path | None:
        """The model's folder, with the files that its settings name; None if there is no such folder."""
        return None

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The shortlist, which limits an output to likely target tokens of its source; None: all tokens. By default the
        file named in the model's settings."""
        name = self.generation.get(SHORTLIST)
        if name is None or self.place is None:
            return None
        from mlx_transformer.core.shortlist import open_shortlist

        return open_shortlist(self.place / name, self.config)

    def use_shortlist(self, file: str | Path | None) -> None:
        """Use a shortlist file in Marian's format; "none" uses none, None keeps the current file."""
        if str(file) == NO_SHORTLIST:
            self.shortlist = None
        elif file is not None:
            from mlx_transformer.core.shortlist import open_shortlist

            self.shortlist = open_shortlist(file, self.config)

    draft: TextVerbs | None = None
    """The model that guesses tokens for `speculate`; None: they are looked up in the text."""

    def use_draft(self, model: TextVerbs | None) -> None:
        """Let a smaller decoder with the same vocabulary, of any runtime, guess tokens for `speculate`; None: look them
        up in the text."""
        self.__dict__["draft"] = model  # an attribute would become a submodule in MLX

    def use_cache_bits(self, bits: int | None) -> None:
        """Quantise the decoder's cached keys and values to 4 or 8 bits: about a quarter or half of the memory of 16
        bits. Logits change slightly, so that a token may differ. None: don't. Only for checkpoints, run by MLX."""
        if bits is not None:
            raise UserError("{}: {} is for checkpoints, run by MLX", self.where, Name("cache_bits"))

    @contextmanager
    def _deciding(self, **how: Any) -> Iterator[Model]:
        """`decoding` with the draft model."""
        with self.decoding(**how) as model:
            if self.draft is None:
                yield model
            else:
                with self.draft.decoding() as draft:
                    model = copy(model)  # searches of a folder share the original
                    model.draft = draft
                    yield model

    @property
    def shows_attention(self) -> bool:
        """Whether `search(ids, attention=True)` returns the cross-attention of its hypotheses."""
        return False

    @property
    def depends_on_batch(self) -> bool:
        """Whether an input's result may depend on the rest of its batch by more than rounding."""
        return False

    @property
    def depends_on_rounding(self) -> bool:
        """Whether activations are rounded to integers, so that another order of a sum may change a token."""
        return False

    def decoding(self) -> AbstractContextManager[Model]:
        """Context manager that gives the model, ready for a search."""
        raise NotImplementedError

    def token_logits(self, ids: list[list[int]], **others: Any) -> Any:
        """Compute the logits (B, L, V) of ids (B, L), rows of equal length; for encoder-only and decoder-only
        models."""
        raise NotImplementedError

    def token_vectors(self, ids: NDArray, mask: NDArray) -> Any:
        """Compute the encoder's output (B, L, D) from ids (B, L) and their mask (B, L), 1 on tokens and 0 on
        padding."""
        raise NotImplementedError

    @cached_property
    def text_embedding(self) -> TextEmbedding | None:
        """How the encoder's output becomes a vector of the text, as the model's folder says; None if it doesn't say."""
        return None

    @property
    def graph_vectors(self) -> GraphVectors | None:
        """The text vectors that the model's graph computes itself; None if it only computes the encoder's output."""
        return None

    @overload
    def generate(
        self, ids: Ids | None = None, prefix: Ids | None = None, **options: Unpack[IdArguments]
    ) -> list[list[int]]: ...
    @overload
    def generate(self, ids: str, **options: Unpack[IdArguments]) -> str: ...
    @overload
    def generate(self, ids: list[str], **options: Unpack[IdArguments]) -> list[str]: ...
    def generate(self, ids: Any = None, prefix: Ids | None = None, **options: Any) -> Any:
        """Return the new token ids of each input's best output; for text, its continuation or translation.

        Arguments as for `decoding.search.search`; for a multilingual model also `source_language` and
        `target_language`, codes of its own, e.g. "deu_Latn" (`generation.json`).
        """
        from mlx_transformer.decoding.search import generate

        if isinstance(ids, str) or (isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], str)):
            continues = self.config.architecture == "decoder"
            return (self.complete if continues else self.translate)(ids, **options)  # type: ignore[call-overload]
        return self._searched(generate, ids, prefix, {**options})  # pyright: ignore[reportArgumentType]

    def search(
        self, ids: Ids | None = None, prefix: Ids | None = None, **options: Unpack[IdArguments]
    ) -> list[list[Hypothesis]]:
        """Return the `n_best` outputs of each input with their scores, best first; see `decoding.search.search`."""
        from mlx_transformer.decoding.search import search

        return self._searched(search, ids, prefix, {**options})

    @property
    def chat_templates(self) -> ChatTemplates | None:
        """The model's chat templates; None if it has none."""
        from mlx_transformer.text.chat import ChatTemplates

        templates = self.generation.get(CHAT_TEMPLATES)
        return ChatTemplates(templates, self.generation.get(SPECIAL_TOKENS, {})) if templates else None

    def chat(self, messages: Messages, *, stop: Sequence[str] = (), **options: Unpack[ChatArguments]) -> str:
        """Return a decoder's answer to a conversation, by its chat template.

        messages: [{"role": "user", "content": "..."}, ...], also of roles system and assistant. stop: as for
        `complete`. options: fields of `ChatOptions` (tools, date, ...) and of `Options`. An answer ends at the model's
        end token, at its last position, or after `max_new_tokens`; the default is the model's own, or `ANSWER_TOKENS`.

        >>> model.chat([{"role": "user", "content": "Hello!"}], sample=True, temperature=0.7)
        """
        check_single({**options}, "chat", "search")
        if self.has_steps and {**options}.get("beam", 1) == 1:
            return "".join(self.stream_chat(messages, stop=stop, **options))
        return self._answer(messages, stop, {**options})[0]

    def _answer(self, messages: Messages, stop: Sequence[str], options: dict[str, Any]) -> tuple[str, int | None]:
        """Search for a whole answer; returns it, and its number of new tokens if their limit ended it."""
        from .stream import ended

        ids, others = self._chat_prompt(messages, options)
        new = self.generate([ids], **others)[0]
        limit = others.get("max_new_tokens")
        is_cut = limit is not None and len(new) >= limit
        return ended(self._decoders("chat"), [new], stop)[0], limit if is_cut else None

    def stream_chat(
        self,
        messages: Messages,
        *,
        stop: Sequence[str] = (),
        on_limit: Callable[[int], None] | None = None,
        **options: Unpack[ChatArguments],
    ) -> Iterator[str]:
        """Yield the answer of `chat` piece by piece while it is decoded. on_limit: see `stream_ids`."""
        from .stream import stream_answer

        ids, others = self._chat_prompt(messages, {**options})
        return stream_answer(self._decoders("chat"), self.stream_ids(ids, on_limit=on_limit, **others), stop)

    def chat_ids(self, messages: Messages, **options: Any) -> list[int]:
        """Return the ids that `chat` continues. options: fields of `ChatOptions`."""
        from mlx_transformer.text.chat import ChatOptions, prompt

        templates = self.check_chat()
        return prompt(templates, self._decoders("chat"), messages, ChatOptions(**options))

    def check_chat(self) -> ChatTemplates:
        """Return the chat templates. Raises `UserError` for a model without templates or without a tokenizer."""
        self._decoders("chat")
        if (templates := self.chat_templates) is None:
            raise UserError(f"{self.where}: has no chat template ({CHAT_TEMPLATE}); generate continues a prompt")
        return templates

    def _chat_prompt(self, messages: Messages, options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Return the ids to continue and the options of the search."""
        from mlx_transformer.text.chat import ChatOptions

        own = {field.name for field in dataclasses.fields(ChatOptions)} & options.keys()
        ids = self.chat_ids(messages, **{name: options.pop(name) for name in own})
        if all(options.get(name) is None for name in ("max_new_tokens", "max_length_factor")):
            limit = self.generation.get("max_new_tokens") or ANSWER_TOKENS
            options["max_new_tokens"] = max(1, min(limit, self.config.max_positions + 1 - len(ids)))
        return ids, options

    def log_probabilities(self, ids: Ids, targets: Ids, **options: Any) -> list[NDArray[np.float32]]:
        """Return the log-probability of every token of each target; see `generation.likelihood.log_probabilities`.

        A model of several languages takes `source_language` and `target_language`, as `generate` does; the target's
        token isn't scored.
        """
        from .likelihood import log_probabilities

        named = {name: options.pop(name, None) for name in (SOURCE_LANGUAGE, TARGET_LANGUAGE)}
        if self.generation.get(LANGUAGES) or any(code is not None for code in named.values()):
            ids, chosen = self._with_languages(ids, named)
            begun = resolved(self.generation, chosen)
            options |= {name: begun[name] for name in ("start_id", "forced_first") if name in begun}
        with self.decoding() as model:
            return log_probabilities(model, ids, targets, **options)

    @overload
    def score(self, lines: str, translations: str, **languages: str | None) -> float: ...
    @overload
    def score(self, lines: list[str], translations: list[str], **languages: str | None) -> list[float]: ...
    def score(
        self, lines: str | list[str], translations: str | list[str], **languages: str | None
    ) -> float | list[float]:
        """Return the log-probability of a line's translation, summed over its tokens and the end token; a list for
        lists.

        For a decoder, `lines` are prompts and `translations` their continuations, without an end token. languages:
        `source_language` and `target_language`, for a multilingual model.
        """
        sources, targets = zip(*self.pair_ids(lines, translations), strict=True)
        chosen = with_languages(self.generation, languages, lines=[lines] if isinstance(lines, str) else lines)
        scores = [math.fsum(values.tolist()) for values in self.log_probabilities([*sources], [*targets], **chosen)]
        return scores[0] if isinstance(lines, str) else scores

    def pair_ids(self, lines: str | Sequence[str], texts: str | Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the ids that `score` compares; see `generation.likelihood.pair_ids`."""
        from .likelihood import pair_ids

        continues = self.config.architecture == "decoder"
        tokenizer = self._decoders("score") if continues else self.translator.tokenizer
        return pair_ids(tokenizer, lines, texts, continues)

    def stream_ids(
        self,
        ids: Sequence[int],
        prefix: Sequence[int] = (),
        *,
        on_limit: Callable[[int], None] | None = None,
        **options: Unpack[StreamArguments],
    ) -> Iterator[int]:
        """Yield the new token ids of an input, each as soon as it is decided; see `generation.stream.stream_ids`.

        on_limit: called with the number of new tokens if their limit ends the output.
        """

        def ids_of(tokens: Iterator[NewToken]) -> Iterator[int]:
            for count, token in enumerate(tokens, start=1):
                yield token.id
                if token.cut and on_limit is not None:
                    on_limit(count)

        return ids_of(self.stream_tokens(ids, prefix, **options))

    def stream_tokens(
        self,
        ids: Sequence[int],
        prefix: Sequence[int] = (),
        *,
        likeliest: int | None = None,
        **options: Unpack[StreamArguments],
    ) -> Iterator[NewToken]:
        """Yield the new tokens of an input, with log-probabilities if `likeliest` is a number; see
        `generation.stream.stream_tokens`."""
        from .stream import stream_tokens

        [ids], others = self._with_languages([ids], {**options}, [prefix] if len(prefix) else None)
        chosen = {"candidates": self._candidates(ids), **self._streaming(others), "likeliest": likeliest}
        return self._streamed(lambda model: stream_tokens(model, ids, prefix, **chosen))

    @overload
    def translate(self, lines: str, *, overlong: Overlong = "error", **options: Unpack[TextArguments]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def translate(
        self, lines: Sequence[str], *, overlong: Overlong = "error", **options: Unpack[TextArguments]
    ) -> list[str]: ...
    def translate(self, lines: str | Sequence[str], *, overlong: Overlong = "error", **options: Any) -> str | list[str]:
        """Translate a line, or a list of lines in order; an empty line stays empty.

        overlong: what to do with a line longer than the model takes (`generation.arguments.Overlong`).
        task_prefix: text before every line, e.g. T5's "translate English to German: ".

        >>> model.translate("Hello.", beam=4)
        """
        check_single(options, "translate", "n_best")
        outputs = [best[0].text for best in self._n_best(lines, overlong=overlong, scored=False, **options)]
        return outputs[0] if isinstance(lines, str) else outputs

    @overload
    def n_best(self, lines: str, **options: Unpack[BestArguments]) -> list[Translation]: ...  # type: ignore[overload-overlap]
    @overload
    def n_best(self, lines: Sequence[str], **options: Unpack[BestArguments]) -> list[list[Translation]]: ...
    def n_best(self, lines: str | Sequence[str], **options: Any) -> list[Translation] | list[list[Translation]]:
        """Return the `n_best` translations of a line, or of each line of a list, with scores, best first.

        Options as for `generation.translate.Translator.n_best`.
        """
        outputs = self._n_best(lines, **options)
        return outputs[0] if isinstance(lines, str) else outputs

    def stream(
        self,
        text: str,
        *,
        stop: Sequence[str] | None = None,
        on_limit: Callable[[int], None] | None = None,
        **options: Unpack[StreamedTextArguments],
    ) -> Iterator[str]:
        """Yield a line's translation, or a decoder's continuation of a prompt, piece by piece while it is decoded.

        stop: as for `complete`. on_limit: for a decoder; see `stream_ids`. Options as for `generation.stream.stream`.
        """
        if stop is not None or self.config.architecture != "encoder-decoder":
            from .stream import stream_completion as continued

            ids = partial(self.stream_ids, on_limit=on_limit)
            return continued(self._decoders("generate"), ids, text, stop or (), **options)
        from .stream import stream

        others: dict[str, Any] = {**options}
        translator = self.translator.with_prefix(others.pop(TASK_PREFIX, None))
        around, others = around_source(self.generation, with_languages(self.generation, others, lines=[text]))
        chosen = {"around": around, "candidates_of": self._candidates, **self._streaming(others)}
        return self._streamed(lambda model: stream(model, translator, text, **chosen))

    @overload
    def complete(self, prompts: str, *, stop: Sequence[str] = (), **options: Unpack[IdArguments]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def complete(
        self, prompts: Sequence[str], *, stop: Sequence[str] = (), **options: Unpack[IdArguments]
    ) -> list[str]: ...
    def complete(self, prompts: str | Sequence[str], *, stop: Sequence[str] = (), **options: Any) -> str | list[str]:
        """Continue a prompt, or each prompt of a list, with a decoder-only model.

        stop: the text ends before any of these words. control_tokens=True: spelled control tokens in a prompt, e.g.
        <|im_start|>, become tokens.

        >>> model.complete("Once upon a time", max_new_tokens=20)
        """
        from .stream import complete

        outputs = complete(self._decoders("generate"), self.generate, prompts, stop=stop, **options)
        return outputs[0] if isinstance(prompts, str) else outputs

    def completions(
        self,
        prompts: Sequence[str],
        *,
        stop: Sequence[str] = (),
        scored: bool = False,
        likeliest: int = 0,
        control_tokens: bool = False,
        **options: Unpack[IdArguments],
    ) -> list[dict[str, Any]]:
        """Return the continuation of each prompt as {"text": ..., "finish_reason": "stop" or, at its limit, "length"}.

        scored: also return "tokens" and "token_log_p", the model's log-probabilities of the new tokens before rules and
        temperature. likeliest: also return "likeliest", the [token, log-probability] of this number of tokens at each
        place; only for greedy search and sampling.
        """
        from mlx_transformer.decoding.options import Options
        from mlx_transformer.decoding.search import checked

        from .stream import ended, prompt_ids

        tokenizer = self._decoders("generate")
        ids = prompt_ids(tokenizer, prompts, control_tokens)
        name = lambda id: tokenizer.token(id) if id < tokenizer.vocab_size else f"<{id}>"  # noqa: E731
        check_value("likeliest", likeliest, Annotated[int, Bounds(at_least=0)])
        limits = lambda model, ids, _, **all: [*checked(model, {"ids": ids}, None, Options.of(all))[2]]  # noqa: E731
        most: list[int] = self._searched(limits, ids, None, {**options})
        found: list[dict[str, Any]] = []
        if likeliest:
            each: dict[str, Any] = {**options, "likeliest": likeliest}
            told = [[*self.stream_tokens(row, row=i, **each)] for i, row in enumerate(ids)]
            outputs = [[token.id for token in tokens] for tokens in told]
            for tokens in told:
                others = [[[name(id), log_p] for id, log_p in token.likeliest] for token in tokens]
                found.append({"token_log_p": [token.log_p for token in tokens], "likeliest": others})
        else:
            outputs = self.generate(ids, **options)
            written = [i for i, output in enumerate(outputs) if scored and output]
            values = self.log_probabilities([ids[i] for i in written], [outputs[i] for i in written]) if written else []
            known = dict(zip(written, values, strict=True))
            found = [{"token_log_p": known[i].tolist()} if i in known else {} for i in range(len(ids))]
        texts, whole = ended(tokenizer, outputs, stop), ended(tokenizer, outputs, ())
        for i, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            cut = len(output) >= most[i] and text == whole[i]
            tokens = {"tokens": [name(id) for id in output]} if found[i] else {}
            found[i] = {"text": text, "finish_reason": "length" if cut else "stop", **tokens, **found[i]}
        return found

    @overload
    def fill(self, lines: str, top_k: int = 5) -> list[list[Filling]]: ...  # type: ignore[overload-overlap]
    @overload
    def fill(self, lines: Sequence[str], top_k: int = 5) -> list[list[list[Filling]]]: ...
    def fill(self, lines: str | Sequence[str], top_k: int = 5) -> list[list[Filling]] | list[list[list[Filling]]]:
        """Return the `top_k` likeliest tokens for each <mask> in a line, or in each line of a list; needs an
        encoder-only model."""
        from .heads import fill

        guesses = fill(self.config, self.tokenizer, self.token_logits, lines, top_k, self.where)
        return guesses[0] if isinstance(lines, str) else guesses

    @overload
    def classify(self, texts: str | tuple[str, str], several: bool | None = None) -> list[Scored]: ...
    @overload
    def classify(self, texts: list[Text], several: bool | None = None) -> list[list[Scored]]: ...
    def classify(self, texts: Text | list[Text], several: bool | None = None) -> list[Scored] | list[list[Scored]]:
        """Return all classes of a text, or of each text of a list, with their probabilities, likeliest first.

        A text is a string or a pair (text, text). several: each class has its own probability; default: as the model's
        config says. Raises `UserError` if the model has no classification head.
        """
        from .heads import classify

        encoder = self.encoder_head("classes", "classify")
        classes = classify(encoder, texts if isinstance(texts, list) else [texts], several)
        return classes if isinstance(texts, list) else classes[0]

    @overload
    def tag(self, texts: str) -> list[Tagged]: ...  # type: ignore[overload-overlap]
    @overload
    def tag(self, texts: Sequence[str]) -> list[list[Tagged]]: ...
    def tag(self, texts: str | Sequence[str]) -> list[Tagged] | list[list[Tagged]]:
        """Return the labelled parts of a text, e.g. names of persons, with their places; a list of them for a list.

        Raises `UserError` if the model has no token classification head. See `generation.heads.tag`.
        """
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
        """Return the part of a context that answers a question; None if the context is empty.

        If either is a list, the result is a list. options: fields of `generation.arguments.AnswerOptions`. Raises
        `UserError` if the model has no head for spans.
        """
        from .heads import answer, paired
        from .text_options import AnswerOptions

        settings = AnswerOptions(**options)
        answers = answer(self.encoder_head("spans", "answer"), paired(question, context), settings)
        return answers[0] if isinstance(question, str) and isinstance(context, str) else answers

    def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None) -> list[Ranked]:
        """Return the documents by relevance to a query, best first, at most `top_n`.

        Needs an encoder that reads pairs and has exactly one class; raises `UserError` for another model.
        """
        from .heads import check_reranker, rerank
        from .text_options import RerankOptions

        encoder = self.encoder_head("classes", "rerank")
        check_reranker(self.config, self.where)
        return rerank(encoder, query, documents, RerankOptions(top_n=top_n))

    def encoder_head(self, kind: HeadKind, verb: str) -> EncoderHead:
        """Return the pipeline from text to a head's logits.

        Raises `UserError` if the model has no head of this kind. verb: the method that needs it, for the error.
        """
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
        """Return a text's vector (W,), or vectors (N, W) for a list of N texts; needs an encoder-only model.

        Texts longer than the model takes are cut. kind="sparse" gives {token id: weight} for each text, "multi" the
        vectors (L - 1, W) of its tokens except the first. options: the other fields of
        `generation.arguments.EmbedOptions`. Raises `UserError` if the folder doesn't say how to make a vector.

        >>> model.embed(["a dog", "a cat"]).shape
        (2, 384)
        """
        embedder = self.embedder(**options)
        vectors = embedder.made(embedder.rows([texts] if isinstance(texts, str) else texts), done)
        return vectors[0] if isinstance(texts, str) else vectors

    def embedder(self, **options: Unpack[EmbedderArguments]) -> Embedder:
        """Return the pipeline from text to ids to vectors; options as for `embed`.

        Raises `UserError` for a model that makes no vectors of texts.
        """
        from .embed import Embedder

        about = self.config, self.tokenizer, self.text_embedding, self.token_vectors, self.where, self.graph_vectors
        return Embedder(*about, self.passes, **options)

    def perplexity(self, texts: Sequence[str], done: Callable[[float], None] = lambda share: None) -> dict[str, Any]:
        """Measure how well a decoder-only model predicts documents; see `generation.likelihood.perplexity`."""
        from .likelihood import perplexity

        tokenizer = self._decoders("a text's perplexity")
        return perplexity(self.config, tokenizer, self.token_logits, texts, done)

    def check_lines(
        self, lines: Sequence[str], overlong: Overlong = "error", first_line: int = 1, task_prefix: str | None = None
    ) -> None:
        """Raise `UserError` for the first line that can't be translated.

        first_line: the number of the first line in messages. task_prefix: text before each line, in place of the
        model's own.
        """
        self.translator.with_prefix(task_prefix).rows(lines, overlong, first_line)

    @property
    def translator(self) -> Translator:
        """The pipeline from text to ids and back. Raises `UserError` if the model translates no text."""
        from .translate import Translator

        reserved = 1 if self.generation.get(LANGUAGES) else 0  # a source may have a language token
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
        ids, chosen = self._shortlisted(*self._with_languages(ids, options, prefix))
        with self._deciding(**how) as model:
            return verb(model, ids, prefix, **resolved(self.generation, chosen))

    def _with_languages(
        self, ids: Ids | None, options: Mapping[str, Any], prefix: Ids | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """(the ids with language tokens, the remaining options)"""
        if ids is not None and self.generation.get(LANGUAGES):
            check_ids(ids, self.config.source_vocab_size)
        return with_source_language(self.generation, ids, options, prefix)

    def _shortlisted(self, ids: Ids | None, options: dict[str, Any]) -> tuple[Ids | None, dict[str, Any]]:
        """Add each input's candidates from the shortlist to the options, unless the caller gives candidates."""
        if ids is None or self.shortlist is None or options.get("candidates") is not None:
            return ids, options
        check_ids(ids, self.config.source_vocab_size)
        return ids, {**options, "candidates": [self._candidates(row) for row in ids]}

    def _candidates(self, ids: Sequence[int]) -> Any:
        """The ids that the output for this source may contain, by the shortlist; None: all."""
        if self.shortlist is None:
            return None
        from mlx_transformer.core.shortlist import shares_ids

        shared = shares_ids(self.config, self.tokenizer is not None and self.tokenizer.separate)
        return self.shortlist.candidates(ids, self.config.vocab_size, shared)

    def _n_best(self, lines: str | Sequence[str], **options: Any) -> list[list[Translation]]:
        prefix = options.pop(TASK_PREFIX, None)
        options = with_languages(self.generation, options, lines=[lines] if isinstance(lines, str) else lines)
        return self.translator.with_prefix(prefix).n_best(lines, **options)

    def _decoders(self, what: str) -> Tokenizer:
        """The tokenizer of a decoder-only model; raises `UserError` for other models. what: the method that needs
        it."""
        from .translate import fitting_tokenizer

        return fitting_tokenizer(self.config, self.tokenizer, self.where, "decoder", what)

    def _streaming(self, options: dict[str, Any]) -> dict[str, Any]:
        """Resolve options without the model's own beam, since beam search can't stream."""
        return resolved(self.generation, {"beam": 1, **options})

    def _streamed(self, begin: Callable[[Model], Iterator[T]]) -> Iterator[T]:
        """Start at once, so that errors are raised by the call; continue to decode while the caller reads."""
        with self._deciding() as model:
            items = begin(model)
        return self._while_decoding(items)

    def _while_decoding(self, items: Iterator[T]) -> Iterator[T]:
        with self._deciding():
            yield from items
