"""The forms of requests and answers for classes of texts and the relevance of documents: what clients of Cohere, Jina
and text-embeddings-inference (TEI) send, and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_transformer.generation.classify import Scored, Text
from mlx_transformer.generation.rerank import Ranked
from mlx_transformer.generation.text_options import RerankOptions
from mlx_transformer.system.errors import UserError

from .requests import RequestError, flag, texts

RERANK_EXAMPLE = '{"query": "a greeting", "documents": ["Good morning.", "Two dogs play."]}'
PREDICT_EXAMPLE = '{"inputs": "Good morning."}'
DOCUMENTS, TEXTS = "documents", "texts"
RERANK_FIELDS = (
    "model",
    "query",
    DOCUMENTS,
    TEXTS,
    "top_n",
    "return_documents",
    "return_text",
    "raw_scores",
    "truncate",
)
PREDICT_FIELDS = ("model", "inputs", "raw_scores", "truncate")
FLAGS = ("return_documents", "return_text", "raw_scores", "truncate")


def _fields(values: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a body that were given: null is as none. `RequestError` for one that nobody knows."""
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := [name for name in values if name not in known]:
        raise RequestError(400, f"{unknown[0][:50]!r}: no such setting; there are {', '.join(known)}")
    for name in FLAGS:
        flag(name, values.get(name, True))
    if not values.get("truncate", True):
        raise RequestError(400, "truncate: what is too long is cut; leave it out")
    if not isinstance(values.get("model", ""), str):
        raise RequestError(400, "model: must be a model's name")
    return values


@dataclass(frozen=True)
class RerankRequest:
    """model: None for the only one. as_texts: TEI's form. shows: documents are answered as well."""

    model: str | None
    query: str
    documents: list[str]
    options: RerankOptions
    as_texts: bool
    shows: bool
    raw: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> RerankRequest:
        """Read the fields of a body."""
        values = _fields(values, RERANK_FIELDS)
        as_texts = TEXTS in values
        name = TEXTS if as_texts else DOCUMENTS
        if not isinstance(values.get("query"), str) or name not in values or (as_texts and DOCUMENTS in values):
            raise RequestError(400, f'body: "query" and "documents" are needed; send {RERANK_EXAMPLE}')
        entries = values[name]
        if isinstance(entries, list):  # Jina's documents may be objects
            entries = [each.get("text") if isinstance(each, dict) else each for each in entries]
        documents = texts(name, entries)
        if isinstance(entries, str) or not documents:
            raise RequestError(400, f"{name}: must be a list of at least one text")
        try:
            options = RerankOptions(top_n=values.get("top_n"))
        except UserError as error:
            raise RequestError(400, str(error)) from None
        shows = values.get("return_text" if as_texts else "return_documents", False)
        return cls(
            values.get("model"), values["query"], documents, options, as_texts, shows, values.get("raw_scores", False)
        )

    def answer(self, name: str, ranked: Sequence[Ranked]) -> Any:
        """Write an answer."""
        if self.as_texts:
            results_of = [{"index": each.index, "score": each.relevance_score} for each in ranked]
            return (
                [{**each, "text": self.documents[each["index"]]} for each in results_of] if self.shows else results_of
            )
        results = [
            {**asdict(each), **({"document": {"text": self.documents[each.index]}} if self.shows else {})}
            for each in ranked
        ]
        return {"model": name, "results": results}


@dataclass(frozen=True)
class PredictRequest:
    """single: one text, answered by its classes alone."""

    model: str | None
    inputs: list[Text]
    single: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> PredictRequest:
        """Read the fields of a body: inputs are a text, or a list of lists of one text or of two."""
        values = _fields(values, PREDICT_FIELDS)
        if values.get("raw_scores"):
            raise RequestError(400, "raw_scores: probabilities are answered; leave it out")
        inputs = values.get("inputs")
        rows = inputs if isinstance(inputs, list) else [inputs]
        pairs = [_text(each) for each in rows]
        if not pairs:
            raise RequestError(400, f"inputs: must hold at least one text; send {PREDICT_EXAMPLE}")
        return cls(values.get("model"), pairs, isinstance(inputs, str))

    def answer(self, scored: Sequence[Sequence[Scored]]) -> Any:
        """Write an answer."""
        rows = [[{"score": each.probability, "label": each.label} for each in classes] for classes in scored]
        return rows[0] if self.single else rows


def _text(value: Any) -> Text:
    """Return a text, or two: TEI's list of one or two texts."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list) and 1 <= len(parts) <= 2 and all(isinstance(part, str) for part in parts):
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])
    raise RequestError(400, f"inputs: each must be a text, or a list of one text or two; send {PREDICT_EXAMPLE}")
