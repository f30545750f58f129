"""Translation behind the endpoints: text -> rows of ids -> batches in threads -> text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.generation.translate import Translation, Translator

from .batching import Batcher, Item
from .metrics import Metrics
from .requests import RequestError, TranslateRequest

SHORT_TEXT = 2000  # characters, whose ids are had in less time than a thread


class Model(Protocol):
    """What is used of `export.OnnxTransformer`: calls may come from several threads at once."""

    @property
    def translator(self) -> Translator: ...
    @property
    def depends_on_batch(self) -> bool: ...
    def generate(self, ids: list[list[int]], **options: Any) -> list[list[int]]: ...
    def search(self, ids: list[list[int]], **options: Any) -> list[list[Hypothesis]]: ...
    def stream(self, line: str, **options: Any) -> Iterator[str]: ...


@dataclass(frozen=True)
class Search:
    """Work on rows: those of equal options are searched together. Not `scored`: the best is wanted, not its score.

    Where a row's result may depend on those computed with it (int4), each is searched by itself: what one client is
    answered must not depend on what others ask.
    """

    model: Model = field(compare=False)  # a server has one
    options: Options
    scored: bool

    def __call__(self, payloads: list[list[int]]) -> list[list[Hypothesis]]:
        if self.model.depends_on_batch and len(payloads) > 1:
            return [hypotheses for row in payloads for hypotheses in self([row])]
        options = asdict(self.options)
        if self.scored:
            return self.model.search(payloads, **options)
        return [[Hypothesis(ids, 0.0)] for ids in self.model.generate(payloads, **options)]


@dataclass(frozen=True)
class Draw:
    """Work on one request, whose only payload is all its rows: a drawn token depends on its row's place in the list,
    so company would change it."""

    search: Search

    def __call__(self, payloads: list[list[list[int]]]) -> list[list[list[Hypothesis]]]:
        return [self.search(rows) for rows in payloads]


@dataclass(eq=False)
class Emit:
    """Work on one stream of text: hands over each piece; its output is as bounded as a translation is."""

    give: Callable[[str], None]
    abandoned: bool = False

    def __call__(self, payloads: list[Iterator[str]]) -> list[None]:
        for pieces in payloads:
            for piece in pieces:
                if self.abandoned:
                    break
                self.give(piece)
        return [None] * len(payloads)


class Service:
    """A loaded model, its queue and its counts."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics):
        self.model, self.translator, self.batcher, self.metrics = model, model.translator, batcher, metrics

    async def translate(self, request: TranslateRequest) -> list[list[Translation]]:
        """The n best of each line. Raises `UserError`, `RequestError`, `OverloadError`."""
        owners, rows = await self._rows(request)
        search = Search(self.model, Options(**request.options), request.wants_n_best)
        if search.options.sample:
            lengths = [max(map(len, rows), default=0)]
            items = self.batcher.submit(Draw(search), [rows], lengths, len(rows)) if rows else []
            hypotheses = [found for drawn in await self.batcher.results(items) for found in drawn]
        else:
            items = self.batcher.submit(search, rows, [len(row) for row in rows])
            hypotheses = await self.batcher.results(items)
        self.metrics.sentences.inc(len(request.lines))
        self.metrics.tokens.inc(sum(len(found[0].ids) for found in hypotheses))
        return self.translator.texts(len(request.lines), owners, hypotheses)

    async def _rows(self, request: TranslateRequest) -> tuple[list[int], list[list[int]]]:
        if sum(map(len, request.lines)) < SHORT_TEXT:
            owners, rows = self.translator.rows(request.lines, request.overlong)
        else:  # others should not wait for it
            owners, rows = await asyncio.to_thread(self.translator.rows, request.lines, request.overlong)
        if len(rows) > self.batcher.max_queue:
            raise RequestError(413, f"text: {len(rows)} sentences, at most {self.batcher.max_queue}; send it in parts")
        return owners, rows

    async def stream(self, request: TranslateRequest) -> AsyncIterator[str]:
        """The translation of its one line in pieces, once it is its turn. Errors are raised before the first."""
        if len(request.lines) != 1:
            raise RequestError(400, "text: one string is streamed; send several lines to /translate")
        [line] = request.lines
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        _, rows = await self._rows(request)
        pieces = await asyncio.to_thread(self.model.stream, line, overlong=request.overlong, **request.options)
        work = Emit(lambda piece: _tell(loop, queue, piece))
        [item] = self.batcher.submit(work, [pieces], [sum(map(len, rows))], max(1, len(rows)))
        item.future.add_done_callback(lambda _: queue.put_nowait(None))
        return self._pieces(work, item, queue)

    async def _pieces(self, work: Emit, item: Item, queue: asyncio.Queue[str | None]) -> AsyncIterator[str]:
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await item.future
            self.metrics.sentences.inc()
        finally:
            work.abandoned = True
            self.batcher.drop([item])


def _tell(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[str | None], piece: str) -> None:
    loop.call_soon_threadsafe(queue.put_nowait, piece)
