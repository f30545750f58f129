"""An encoder's head behind the endpoints: classes, and the relevance of documents to a query."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.text_pairs import Pair
from mlx_transformer.generation.classify import Scored, Text, scored, text_rows
from mlx_transformer.generation.encoder_head import EncoderHead
from mlx_transformer.generation.lines import LineReport
from mlx_transformer.generation.rerank import check_reranker

from .batching import Batcher
from .metrics import Metrics
from .requests import check_count
from .service import Model, without_blocking


@dataclass(frozen=True)
class HeadRows:
    """Work on rows: whatever is asked of their logits, they are computed together."""

    encoder: EncoderHead = field(compare=False)
    name: str  # the model's: a server may have several
    one_by_one: bool
    """A row's logits may depend on those computed with it (int4)."""

    def __call__(self, payloads: list[Pair], stopped: Callable[[], bool]) -> list[NDArray[np.float64]]:
        if self.one_by_one and len(payloads) > 1:
            return [logits for row in payloads for logits in self([row], stopped)]
        return self.encoder.logits(payloads, lambda share: None)


class Labels:
    """An encoder with classes that is loaded, its queue and its counts. `UserError` for one without a vocabulary."""

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, max_sentences: int, name: str):
        self.model, self.batcher, self.metrics, self.name = model, batcher, metrics, name
        self.max_sentences = min(max_sentences, batcher.share)
        self.encoder = model.encoder_head("classes", "serve")
        self._work = HeadRows(self.encoder, name, model.depends_on_batch)

    @property
    def reranks(self) -> bool:
        """Whether it has one class, the relevance of a document to a query."""
        return len(self.model.config.head.labels) == 1

    async def classify(self, texts: Sequence[Text], client: Hashable) -> list[list[Scored]]:
        """Return every class of each text with its probability, the likeliest first; the ends of texts that are too
        long are left out. Raises `UserError`, `RequestError`, `OverloadError`, `EndingError`."""
        return [scored(self.encoder, logits) for logits in await self._logits(texts, "inputs", client)]

    async def relevance(
        self, query: str, documents: Sequence[str], client: Hashable
    ) -> tuple[list[float], list[float]]:
        """Return the probabilities of the only class, and its logits, of each document with the query. Raises as
        `classify`, and `UserError` for a model with other classes."""
        check_reranker(self.model.config, self.name)
        pairs = [(query, document) for document in documents]
        logits = await self._logits(pairs, "documents", client)
        probabilities = [scored(self.encoder, each, several=True)[0].probability for each in logits]
        return probabilities, [float(each[0]) for each in logits]

    async def _logits(self, texts: Sequence[Text], field: str, client: Hashable) -> list[Any]:
        check_count(f"{field}: {len(texts)} texts", len(texts), self.max_sentences)
        cut = LineReport(on_overlong=lambda number: None)
        rows = await without_blocking(sum(len("".join(text)) for text in texts), text_rows, self.encoder, texts, cut)
        items = self.batcher.submit(self._work, rows, [len(row.ids) for row in rows], client=client)
        logits = await self.batcher.results(items)
        self.metrics.sentences.inc(len(rows))
        return logits
