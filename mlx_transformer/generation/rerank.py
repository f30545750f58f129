"""Documents in the order of how well they fit a query, by an encoder that reads both together and has one class
(Nogueira and Cho 2019, "Passage Re-ranking with BERT"): more exact than vectors, and far slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .classify import classify
from .encoder_head import EncoderHead
from .line_files import NO_REPORT, LineReport
from .text_options import RerankOptions


@dataclass(frozen=True)
class Ranked:
    """A document among those of a query."""

    index: int
    """Its place among them, counted from 0."""
    relevance_score: float
    """How probable the class is."""


def check_reranker(config: TransformerConfig, where: str) -> None:
    """Raise `UserError` unless a head with classes has one alone."""
    if (count := len(config.head.labels)) != 1:
        raise UserError(f"{where}: rerank needs a head with one class; its head has {count}")


def rerank(
    encoder: EncoderHead,
    query: str,
    documents: Sequence[str],
    options: RerankOptions,
    report: LineReport = NO_REPORT,
) -> list[Ranked]:
    """Return the documents by their relevance to the query, the best first, equal ones in their order. A query and a
    document that are too long lose the end of the longer one, then of both; `report` counts that."""
    if not isinstance(query, str):
        raise UserError(f"query: must be text, not {type(query).__name__}")
    classes = classify(encoder, [(query, document) for document in documents], several=True, report=report)
    return ordered([best.probability for [best] in classes], options)


def ordered(scores: Sequence[float], options: RerankOptions) -> list[Ranked]:
    """Return the documents of these scores by them, as `rerank` does."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [Ranked(i, scores[i]) for i in order[: options.top_n]]
