"""Completions behind the endpoints, by a decoder alone: prompts -> rows of ids -> batches in threads -> text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_transformer.core.inputs import check_ids
from mlx_transformer.generation.complete import check_stop, prompt_ids, until
from mlx_transformer.generation.options import Options
from mlx_transformer.generation.settings import resolved
from mlx_transformer.generation.stream import pieces
from mlx_transformer.generation.translate import fitting_tokenizer

from .batching import Batcher
from .metrics import Metrics
from .requests import RequestError, check_count
from .service import Model, Row, Search, check_lengths
from .streaming import streamed


@dataclass(frozen=True)
class CompletionRequest:
    """prompts: texts to go on from, or their ids without a start token, `n` times each. stop: words before which an
    output ends. options: those of `Options` that were given; max_new_tokens always is."""

    prompts: list[str] | list[list[int]]
    n: int
    stop: list[str]
    options: dict[str, Any]


@dataclass
class Written:
    """One output while it is written. tokens: those it was made of so far; limit: the most it may have."""

    limit: int
    text: str = ""
    tokens: int = 0
    stopped: bool = field(default=False, repr=False)

    @property
    def finish_reason(self) -> str:
        """Why it ended: at an end token or a word of `stop`, or at its limit."""
        return "stop" if self.stopped or self.tokens < self.limit else "length"

    def follow(self, decode: Any, ids: Iterable[int], stop: Sequence[str]) -> Iterator[str]:
        """Give the text of the ids piece by piece as far as a stop word."""
        decoded = 0

        def counted() -> Iterator[int]:
            for id in ids:
                self.tokens += 1
                yield id

        def measured() -> Iterator[str]:
            nonlocal decoded
            for piece in pieces(decode, counted()):
                decoded += len(piece)
                yield piece

        for piece in until(measured(), stop):
            self.text += piece
            yield piece
        self.stopped = len(self.text) < decoded


class Completions:
    """A decoder that is loaded, its queue and its counts. `UserError` if it has no tokenizer that fits."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, max_sentences: int, name: str):
        self.model, self.batcher, self.metrics, self.name = model, batcher, metrics, name
        self.tokenizer = fitting_tokenizer(model.config, model.tokenizer, name, "decoder", "completing")
        self.max_sentences = min(max_sentences, batcher.share)

    def prompt_tokens(self, prompts: Sequence[Any]) -> int:
        """Count the tokens of the prompts, without the start token of each."""
        return sum(len(ids) - 1 for ids in self._ids(prompts))

    async def complete(self, request: CompletionRequest, client: Hashable) -> list[Written]:
        """Return the outputs, `n` for each prompt in order. Raises what `Service.translate` does."""
        rows = await self._rows(request)
        options = Options(**resolved(self.model.generation, request.options))
        work = Search(self.model, self.name, options, not self.model.has_steps)
        payloads = [Row(ids, i) for i, ids in enumerate(rows)]
        items = self.batcher.submit(work, payloads, [len(ids) for ids in rows], client=client)
        outputs = [best[0].ids for best in await self.batcher.results(items)]
        written = await asyncio.to_thread(self._texts, outputs, request)
        self._count(written)
        return written

    async def stream(self, request: CompletionRequest, client: Hashable) -> tuple[AsyncIterator[str], Written]:
        """Return the one output in pieces, once it is its turn; the second is complete after the last of them."""
        if len(request.prompts) * request.n != 1:
            raise RequestError(400, "stream: one prompt is streamed, with n=1; leave out stream for several")
        [row] = await self._rows(request)
        written = Written(request.options["max_new_tokens"])

        def begin() -> Iterator[str]:
            return written.follow(self.tokenizer.decode, self.model.stream_ids(row, **request.options), request.stop)

        done = lambda: self._count([written])  # noqa: E731
        return await streamed(self.batcher, begin, length=len(row), size=1, client=client, done=done), written

    async def _rows(self, request: CompletionRequest) -> list[list[int]]:
        check_lengths({"max_tokens": request.options["max_new_tokens"]}, self.model.config.max_positions)
        check_stop(request.stop)
        count = len(request.prompts) * request.n
        check_count(f"prompt: {count} outputs", count, self.max_sentences)
        rows = await asyncio.to_thread(self._ids, request.prompts)
        return [ids for ids in rows for _ in range(request.n)]

    def _ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return what is searched for each prompt: the start token, then its own."""
        if not prompts or isinstance(prompts[0], str):
            return [list(ids) for ids in prompt_ids(self.tokenizer, prompts)]
        checked = check_ids(prompts, self.model.config.vocab_size, "prompt")
        return [[self.tokenizer.bos_id, *row.tolist()] for row in checked]

    def _texts(self, outputs: list[list[int]], request: CompletionRequest) -> list[Written]:
        limit = request.options["max_new_tokens"]
        if not request.stop:
            texts = self.tokenizer.decode_batch(outputs)
            return [Written(limit, text, len(ids)) for text, ids in zip(texts, outputs, strict=True)]
        written = [Written(limit) for _ in outputs]
        for output, ids in zip(written, outputs, strict=True):
            for _ in output.follow(self.tokenizer.decode, ids, request.stop):
                pass
        return written

    def _count(self, written: Sequence[Written]) -> None:
        self.metrics.sentences.inc(len(written))
        self.metrics.tokens.inc(sum(output.tokens for output in written))
