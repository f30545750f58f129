"""Vectors of texts behind the endpoints, by an encoder alone: texts -> rows of ids -> batches in threads -> vectors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.inputs import check_ids
from mlx_transformer.generation.embed import Embedder

from .batching import Batcher
from .metrics import Metrics
from .requests import RequestError, check_count
from .service import Model, without_blocking

Made = NDArray[np.float32] | dict[int, float]
"""The result of `Embedder.made` for a text: a vector, those of its tokens, or the weights of its ids."""


@dataclass(frozen=True)
class EmbeddingsRequest:
    """inputs: texts, or rows of ids as the model reads them, special ones included. options: fields of
    `EmbedOptions`."""

    inputs: list[str] | list[list[int]]
    options: dict[str, Any]


@dataclass(frozen=True)
class Embed:
    """Work on rows: those of equal options are computed together, which changes no vector. of_text: rows begin with the
    prompt."""

    embedder: Embedder = field(compare=False)
    name: str  # the model's: a server may have several
    options: tuple[tuple[str, Any], ...]
    of_text: bool
    one_by_one: bool
    """A vector may depend on those computed with it (int4)."""

    def __call__(self, payloads: list[list[int]], stopped: Callable[[], bool]) -> list[Made]:
        if self.one_by_one and len(payloads) > 1:
            return [made for row in payloads for made in self([row], stopped)]
        return list(self.embedder.made(payloads, of_text=self.of_text))


class Embeddings:
    """An encoder that is loaded, its queue and its counts. `UserError` for one that has no vectors of texts."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, max_sentences: int, name: str):
        self.model, self.batcher, self.metrics, self.name = model, batcher, metrics, name
        self.max_sentences = min(max_sentences, batcher.share)
        _ = model.embedder().tokenizer

    async def embed(self, request: EmbeddingsRequest, client: Hashable) -> tuple[list[Made], int]:
        """Return what is made of each input and the number of their tokens. Raises `UserError`, `RequestError`,
        `OverloadError`, `EndingError`."""
        check_count(f"input: {len(request.inputs)} texts", len(request.inputs), self.max_sentences)
        embedder = self.model.embedder(**request.options)
        rows, of_text = await self._rows(embedder, request.inputs)
        work = Embed(embedder, self.name, tuple(sorted(request.options.items())), of_text, self.model.depends_on_batch)
        lengths = [len(row) for row in rows]
        items = self.batcher.submit(work, rows, lengths, client=client)
        made = await self.batcher.results(items)
        self.metrics.sentences.inc(len(rows))
        return made, sum(lengths)

    async def _rows(self, embedder: Embedder, inputs: Sequence[Any]) -> tuple[list[list[int]], bool]:
        if not isinstance(inputs[0], str):
            rows = [row.tolist() for row in check_ids(inputs, embedder.config.source_vocab_size, "input")]
            if (longest := max(map(len, rows))) > embedder.most:
                raise RequestError(400, f"input: {longest} tokens, the model takes at most {embedder.most}")
            return rows, False
        return await without_blocking(sum(map(len, inputs)), embedder.rows, inputs), True
