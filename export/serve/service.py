"""Translation behind the endpoints: text -> rows of ids -> batches in threads -> text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import HeadKind
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.families.language_codes import own_code
from mlx_transformer.generation.alignment import Alignment, align
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.generation.encoder_head import EncoderHead
from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.generation.search import SharedSearch
from mlx_transformer.generation.settings import (
    LANGUAGES,
    SOURCE_LANGUAGE,
    TARGET_IN_SOURCE,
    TARGET_LANGUAGE,
    Settings,
    around_source,
    resolved,
)
from mlx_transformer.generation.translate import Translation, Translator

from .batching import Batcher
from .metrics import Metrics
from .requests import AUTO, RequestError, TranslateRequest, check_count
from .streaming import streamed

T = TypeVar("T")

SHORT_TEXT = 2000  # characters, whose ids are had in less time than a thread


class Model(Protocol):
    """The part of a model that the server uses, which has the verbs of `TextVerbs`: calls may come from as many threads
    at once as the server has workers. One that has no steps has no `generate`."""

    has_steps: bool

    @property
    def config(self) -> TransformerConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def translator(self) -> Translator: ...
    @property
    def depends_on_batch(self) -> bool: ...
    @property
    def generation(self) -> Settings: ...
    def generate(self, ids: list[list[int]], *, share: SharedSearch, **options: Any) -> list[list[int]]: ...
    def search(
        self, ids: list[list[int]], *, attention: bool = False, share: SharedSearch, **options: Any
    ) -> list[list[Hypothesis]]: ...
    def stream(self, line: str, **options: Any) -> Iterator[str]: ...
    def embedder(self, **options: Any) -> Embedder: ...
    def encoder_head(self, kind: HeadKind, verb: str) -> EncoderHead: ...
    def stream_ids(self, ids: Sequence[int], **options: Any) -> Iterator[int]: ...


async def without_blocking(characters: int, work: Callable[..., T], *arguments: Any) -> T:
    """Return what `work` makes of a text of so many characters: a long one's in a thread, for others should not wait
    for it."""
    return work(*arguments) if characters < SHORT_TEXT else await asyncio.to_thread(work, *arguments)


NO_ALIGNMENT = "alignment: this server's model returns no attention; export it with --attention, for a folder or a file"
STREAMED = "alignment: a whole translation has one; send the text to /translate"


@dataclass(frozen=True)
class Aligned(Hypothesis):
    """An output with the links of its words, in place of the weights, which take far more memory."""

    alignment: Alignment = field(kw_only=True)


def check_lengths(lengths: Mapping[str, int | None], most: int) -> None:
    """Refuse more new tokens than the model has positions, without a table of which it would never stop. lengths: by
    the names that the request has for them."""
    for name, tokens in lengths.items():
        if (tokens or 0) > most:
            raise RequestError(400, f"{name}={tokens}: this server takes at most {most}")


@dataclass(frozen=True)
class Row:
    """A sentence to search: its ids, or its text for a file that takes text (`one_file.py`). place: in its request, on
    which drawn tokens depend."""

    ids: Any
    place: int


@dataclass(frozen=True)
class Search:
    """Work on rows: those of equal options are searched together. Not `scored`: the best is wanted, not its score.
    `aligned`: each output with the links of its words.

    Where a row's result may depend on those computed with it (int4), each is searched by itself: what one client is
    answered must not depend on what others ask.
    """

    model: Model = field(compare=False)
    name: str  # the model's: a server may have several
    options: Options
    scored: bool
    aligned: bool = False

    def __call__(self, payloads: list[Row], stopped: Callable[[], bool]) -> list[list[Hypothesis]]:
        if self.model.depends_on_batch and len(payloads) > 1:
            return [hypotheses for row in payloads for hypotheses in self([row], stopped)]
        ids = [row.ids for row in payloads]
        share = SharedSearch(row_numbers=[row.place for row in payloads], stopped=stopped)
        options = asdict(self.options)
        if self.aligned:
            outputs = self.model.search(ids, attention=True, share=share, **options)
            tokenizer = self.model.translator.tokenizer
            return [[_aligned(tokenizer, row, h) for h in best] for row, best in zip(ids, outputs, strict=True)]
        if self.scored:
            return self.model.search(ids, share=share, **options)
        return [[Hypothesis(best, 0.0)] for best in self.model.generate(ids, share=share, **options)]


def _aligned(tokenizer: Tokenizer, source: list[int], h: Hypothesis) -> Hypothesis:
    assert h.attention is not None
    return Aligned(h.ids, h.score, alignment=align(tokenizer, h.attention, source, h.ids))


class Service:
    """A loaded translator, its queue and its counts. max_sentences: most of one request. name: no other model's."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, max_sentences: int, name: str):
        self.model, self.translator, self.batcher, self.metrics = model, model.translator, batcher, metrics
        self.name = name
        self.languages: dict[str, int] = model.generation.get(LANGUAGES, {})
        self.max_sentences = min(max_sentences, batcher.share)

    def spoken(self, request: TranslateRequest) -> TranslateRequest:
        """Return the request with its source and target by the model's own codes, if the model has several languages.
        `RequestError` for one that it doesn't have."""
        if not self.languages or request.languages == (None, None):
            return request
        names = dict(zip((SOURCE_LANGUAGE, TARGET_LANGUAGE), request.languages, strict=True))
        if self.model.generation.get(TARGET_IN_SOURCE):  # which is told no other
            names.pop(SOURCE_LANGUAGE)
        options = dict(request.options)
        for name, code in names.items():
            if name in options or code is None:
                continue
            side = name.partition("_")[0]
            if code == AUTO:
                raise RequestError(400, f"{side}: this server detects no languages; say which it is")
            own = own_code(code, self.languages)
            if own is None:
                raise RequestError(400, f"{side}={code}: none of the model's languages; GET /languages lists them")
            options[name] = own
        return replace(request, options=dict(sorted(options.items())))

    async def translate(self, request: TranslateRequest, client: Hashable) -> list[list[Translation]]:
        """Return the n best of each line. Raises `UserError`, `RequestError`, `OverloadError`, `EndingError`."""
        if request.wants_alignment and not self.translator.shows_attention:
            raise RequestError(400, NO_ALIGNMENT)
        owners, rows = await self._rows(request)
        scored = request.wants_n_best or not self.model.has_steps
        around, options_set = around_source(self.model.generation, request.options)
        if any(around) and not all(isinstance(ids, list) for ids in rows):
            raise RequestError(400, "source_language: this server's file takes text alone")
        options = Options(**resolved(self.model.generation, options_set))
        work = Search(self.model, self.name, options, scored, request.wants_alignment)
        payloads = [Row(around(ids) if any(around) else ids, i) for i, ids in enumerate(rows)]
        lengths, width = [len(ids) for ids in rows], work.options.beam
        items = self.batcher.submit(work, payloads, lengths, client=client, width=width)
        hypotheses = await self.batcher.results(items)
        self.metrics.sentences.inc(len(request.lines))
        self.metrics.tokens.inc(sum(len(n_best[0].ids) for n_best in hypotheses))
        more = [[[h.alignment for h in row] for row in hypotheses]] if request.wants_alignment else []
        size, count = sum(map(len, request.lines)), len(request.lines)
        return await without_blocking(size, self.translator.texts, count, owners, hypotheses, *more)

    async def _rows(self, request: TranslateRequest) -> tuple[list[int], list[list[int]]]:
        lengths = {name: request.options.get(name) for name in ("min_new_tokens", "max_new_tokens")}
        check_lengths(lengths, self.translator.config.max_positions)
        check_count(f"{len(request.lines)} sentences", len(request.lines), self.max_sentences)
        size = sum(map(len, request.lines))
        owners, rows = await without_blocking(size, self.translator.rows, request.lines, request.overlong)
        check_count(f"{len(rows)} sentences", len(rows), self.max_sentences)
        return owners, rows

    async def stream(self, request: TranslateRequest, client: Hashable) -> AsyncIterator[str]:
        """Return the translation of its one line in pieces, once it is its turn. Errors are raised before the first."""
        if len(request.lines) != 1:
            raise RequestError(400, "text: one string is streamed; send several lines to /translate")
        if request.wants_alignment:
            raise RequestError(400, STREAMED)
        [line] = request.lines
        _, rows = await self._rows(request)
        begin = partial(self.model.stream, line, overlong=request.overlong, **request.options)
        length, size = sum(map(len, rows)), max(1, len(rows))
        done = self.metrics.sentences.inc
        return await streamed(self.batcher, begin, length=length, size=size, client=client, done=done)
