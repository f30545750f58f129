"""Translation behind the endpoints: text -> rows of ids -> batches in threads -> text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.generation.alignment import Alignment, align
from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.generation.search import SharedSearch
from mlx_transformer.generation.settings import Settings, resolved, with_source_language
from mlx_transformer.generation.steps import Stopped
from mlx_transformer.generation.translate import Translation, Translator

from .batching import Batcher
from .metrics import Metrics
from .requests import RequestError, TranslateRequest
from .turns import Item

SHORT_TEXT = 2000  # characters, whose ids are had in less time than a thread


class Model(Protocol):
    """What is used of `export.OnnxTransformer`: calls may come from several threads at once. One that is
    `always_scored` has no `generate`."""

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


NO_ALIGNMENT = "alignment: this server's model returns no attention; export it with --attention, for a folder or a file"
STREAMED = "alignment: a whole translation has one; send the text to /translate"


@dataclass(frozen=True)
class Aligned(Hypothesis):
    """An output with the links of its words, in place of the weights, which take far more memory."""

    alignment: Alignment = field(kw_only=True)


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

    model: Model = field(compare=False)  # a server has one
    options: Options
    scored: bool
    aligned: bool = False

    def __call__(self, payloads: list[Row], stopped: Callable[[], bool]) -> list[list[Hypothesis]]:
        if self.model.depends_on_batch and len(payloads) > 1:
            return [hypotheses for row in payloads for hypotheses in self([row], stopped)]
        ids, share = (
            [row.ids for row in payloads],
            SharedSearch(row_numbers=[row.place for row in payloads], stopped=stopped),
        )
        options = asdict(self.options)
        if self.aligned:
            found = self.model.search(ids, attention=True, share=share, **options)
            tokenizer = self.model.translator.tokenizer
            return [[_aligned(tokenizer, row, h) for h in best] for row, best in zip(ids, found, strict=True)]
        if self.scored:
            return self.model.search(ids, share=share, **options)
        return [[Hypothesis(best, 0.0)] for best in self.model.generate(ids, share=share, **options)]


def _aligned(tokenizer: Tokenizer, source: list[int], h: Hypothesis) -> Hypothesis:
    assert h.attention is not None
    return Aligned(h.ids, h.score, alignment=align(tokenizer, h.attention, source, h.ids))


@dataclass(eq=False)
class StreamTask:
    """Work on one stream of text: hands over each piece; its output is as bounded as a translation is."""

    give: Callable[[str], None]

    def __call__(self, payloads: list[Iterator[str]], stopped: Callable[[], bool]) -> list[None]:
        for pieces in payloads:
            for piece in pieces:
                if stopped():
                    raise Stopped
                self.give(piece)
        return [None] * len(payloads)


class Service:
    """A loaded model, its queue and its counts. max_sentences: most of one request."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, max_sentences: int):
        self.model, self.translator, self.batcher, self.metrics = model, model.translator, batcher, metrics
        self.max_sentences = min(max_sentences, batcher.share)
        self.always_scored = getattr(model, "always_scored", False)

    async def translate(self, request: TranslateRequest, client: Hashable) -> list[list[Translation]]:
        """The n best of each line. Raises `UserError`, `RequestError`, `OverloadError`, `EndingError`."""
        if request.wants_alignment and not self.translator.shows_attention:
            raise RequestError(400, NO_ALIGNMENT)
        owners, rows = await self._rows(request)
        scored = request.wants_n_best or self.always_scored
        [language], given = with_source_language(self.model.generation, [[]], request.options)
        if language and not all(isinstance(ids, list) for ids in rows):
            raise RequestError(400, "source_language: this server's file takes text alone")
        options = Options(**resolved(self.model.generation, given))
        work = Search(self.model, options, scored, request.wants_alignment)
        payloads = [Row([*language, *ids] if language else ids, i) for i, ids in enumerate(rows)]
        lengths, width = [len(ids) for ids in rows], work.options.beam
        items = self.batcher.submit(work, payloads, lengths, client=client, width=width)
        hypotheses = await self.batcher.results(items)
        self.metrics.sentences.inc(len(request.lines))
        self.metrics.tokens.inc(sum(len(found[0].ids) for found in hypotheses))
        more = [[[h.alignment for h in row] for row in hypotheses]] if request.wants_alignment else []
        if sum(map(len, request.lines)) < SHORT_TEXT:
            return self.translator.texts(len(request.lines), owners, hypotheses, *more)
        return await asyncio.to_thread(self.translator.texts, len(request.lines), owners, hypotheses, *more)

    async def _rows(self, request: TranslateRequest) -> tuple[list[int], list[list[int]]]:
        self._check(request.options)
        if len(request.lines) > self.max_sentences:
            raise self._too_many(len(request.lines))
        if sum(map(len, request.lines)) < SHORT_TEXT:
            owners, rows = self.translator.rows(request.lines, request.overlong)
        else:  # others should not wait for it
            owners, rows = await asyncio.to_thread(self.translator.rows, request.lines, request.overlong)
        if len(rows) > self.max_sentences:
            raise self._too_many(len(rows))
        return owners, rows

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse more new tokens than the model has positions: without a table it would never stop."""
        most = self.translator.config.max_positions
        for name in ("min_new_tokens", "max_new_tokens"):
            if (options.get(name) or 0) > most:
                raise RequestError(400, f"{name}={options[name]}: this server takes at most {most}")

    def _too_many(self, count: int) -> RequestError:
        return RequestError(413, f"text: {count} sentences, at most {self.max_sentences}; send it in parts")

    async def stream(self, request: TranslateRequest, client: Hashable) -> AsyncIterator[str]:
        """The translation of its one line in pieces, once it is its turn. Errors are raised before the first."""
        if len(request.lines) != 1:
            raise RequestError(400, "text: one string is streamed; send several lines to /translate")
        if request.wants_alignment:
            raise RequestError(400, STREAMED)
        [line] = request.lines
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        _, rows = await self._rows(request)
        pieces = await asyncio.to_thread(self.model.stream, line, overlong=request.overlong, **request.options)
        work = StreamTask(lambda piece: _tell(loop, queue, piece))
        length, size = sum(map(len, rows)), max(1, len(rows))
        [item] = self.batcher.submit(work, [pieces], [length], size, client)
        item.future.add_done_callback(lambda _: queue.put_nowait(None))
        return self._pieces(item, queue)

    async def _pieces(self, item: Item, queue: asyncio.Queue[str | None]) -> AsyncIterator[str]:
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await item.future
            self.metrics.sentences.inc()
        finally:
            self.batcher.drop([item])


def _tell(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[str | None], piece: str) -> None:
    loop.call_soon_threadsafe(queue.put_nowait, piece)
