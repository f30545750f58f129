"""Encoder-only models: vectors, classes of texts, documents by relevance.

POST /v1/embeddings         OpenAI's form
POST /predict               the form of text-embeddings-inference (TEI)
POST /rerank, /v1/rerank    Cohere's and Jina's form with "documents", TEI's with "texts"
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.inputs import check_ids
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.generation.files import FORMS
from mlx_transformer.generation.heads import EncoderHead, Scored, Text, check_reranker, ordered, scored, text_rows
from mlx_transformer.generation.line_files import LineReport
from mlx_transformer.generation.text_options import EmbedOptions, RerankOptions
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.pairs import Pair

from .calls import Call
from .models import Loaded, without_blocking
from .requests import (
    FLAG,
    TEXT,
    TEXTS,
    TEXTS_OR_IDS,
    Form,
    RequestError,
    check_count,
    fields_of,
    flag,
    given,
    texts,
    texts_or_ids,
)

EMBED_EXAMPLE = '{"model": "minilm", "input": ["Good morning."]}'
RERANK_EXAMPLE = '{"query": "a greeting", "documents": ["Good morning.", "Two dogs play."]}'
PREDICT_EXAMPLE = '{"inputs": "Good morning."}'
FORMATS = ("float", "base64")
OPTIONS = ("dimensions", "kind", "prompt", "prompt_name")

EMBED = Form(
    {
        "model": TEXT,
        "input": TEXTS_OR_IDS,
        "encoding_format": {"type": "string", "enum": list(FORMATS), "default": FORMATS[0]},
        **fields_of(EmbedOptions, OPTIONS),
        "user": TEXT,
    },
    ["model", "input"],
    EMBED_EXAMPLE,
)
FLAGS = ("return_documents", "return_text", "raw_scores", "truncate")
RERANK = Form(
    {
        "model": TEXT,
        "query": TEXT,
        "documents": TEXTS,
        "texts": TEXTS,
        **fields_of(RerankOptions, ("top_n",)),
        **dict.fromkeys(FLAGS, FLAG),
    },
    ["query"],
    RERANK_EXAMPLE,
)
PREDICT = Form({"model": TEXT, "inputs": TEXTS, "raw_scores": FLAG, "truncate": FLAG}, ["inputs"], PREDICT_EXAMPLE)

Made = NDArray[np.float32] | dict[int, float]
"""The result for a text: a vector, a vector per token, or weights by token id."""


# Vectors.
@dataclass(frozen=True)
class Embed:
    """A task: embed rows; rows with equal options share a batch. of_text: rows begin with the prompt's ids. one_by_one:
    embed each row by itself, for models whose vectors depend on the batch (int4)."""

    embedder: Embedder = field(compare=False)
    name: str  # distinguishes models of the same server
    options: tuple[tuple[str, Any], ...]
    of_text: bool
    one_by_one: bool

    def __call__(self, payloads: list[list[int]], stopped: Callable[[], bool]) -> list[Made]:
        if self.one_by_one and len(payloads) > 1:
            return [made for row in payloads for made in self([row], stopped)]
        return list(self.embedder.made(payloads, of_text=self.of_text))


class EmbeddingModel(Loaded):
    """A loaded encoder. `UserError` if its folder doesn't say how a text's vector is made."""

    label = "vectors"
    use = "makes vectors; send its texts to /v1/embeddings"

    def __init__(self, *given: Any):
        super().__init__(*given)
        _ = self.model.embedder().tokenizer

    async def embed(
        self, inputs: list[str] | list[list[int]], options: dict[str, Any], client: Hashable
    ) -> tuple[list[Made], int]:
        """Embed texts, or rows of ids with their special tokens; also return the number of tokens."""
        check_count(f"input: {len(inputs)} texts", len(inputs), self.max_sentences)
        embedder = self.model.embedder(**options)
        rows, of_text = await self._rows(embedder, inputs)
        task = Embed(embedder, self.name, tuple(sorted(options.items())), of_text, self.model.depends_on_batch)
        lengths = [len(row) for row in rows]
        made = await self.compute(task, rows, lengths, client)
        self.count(len(rows))
        return made, sum(lengths)

    async def _rows(self, embedder: Embedder, inputs: Sequence[Any]) -> tuple[list[list[int]], bool]:
        if isinstance(inputs[0], str):
            return await without_blocking(sum(map(len, inputs)), embedder.rows, inputs), True
        rows = [row.tolist() for row in check_ids(inputs, embedder.config.source_vocab_size, "input")]
        if (longest := max(map(len, rows))) > embedder.most:
            raise RequestError(400, f"input: {longest} tokens, the model takes at most {embedder.most}")
        return rows, False


async def embed(call: Call) -> Any:
    """Vectors of texts, by an encoder-only model."""
    values = await call.values()
    form = values.get("encoding_format") or FORMATS[0]
    model, inputs = values.get("model"), values.get("input")
    if not isinstance(model, str) or inputs is None:
        raise RequestError(400, f'body: "model" and "input" are needed; send {EMBED_EXAMPLE}')
    inputs = texts_or_ids("input", inputs)
    if form not in FORMATS:
        raise RequestError(400, f"encoding_format: must be {' or '.join(FORMATS)}")
    options = {name: value for name, value in given(values, EMBED.fields).items() if name in OPTIONS}
    made, tokens = await call.result(call.model(model).embed(inputs, options, call.client))
    return await asyncio.to_thread(_embeddings, model, made, tokens, options.get("kind", "dense"), form)


def _embeddings(model: str, made: Sequence[Made], tokens: int, kind: str, form: str) -> dict[str, Any]:
    """Write OpenAI's answer. Dense vectors may be base64. Other kinds have the key that `embed --kind` writes, and
    "embedding" is null, as clients look for it."""
    key, write = ("embedding", _base64) if kind == "dense" and form == "base64" else FORMS[kind]
    data = [{"object": "embedding", "index": i, "embedding": None, key: write(x)} for i, x in enumerate(made)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _base64(vector: Made) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


# Classes and relevance.
@dataclass(frozen=True)
class HeadRows:
    """A task: the logits of rows; all of a model's rows share batches. one_by_one: see `Embed`."""

    encoder: EncoderHead = field(compare=False)
    name: str
    one_by_one: bool

    def __call__(self, payloads: list[Pair], stopped: Callable[[], bool]) -> list[NDArray[np.float64]]:
        if self.one_by_one and len(payloads) > 1:
            return [logits for row in payloads for logits in self([row], stopped)]
        return self.encoder.logits(payloads, lambda share: None)


class ClassModel(Loaded):
    """A loaded encoder with classes. `UserError` if it has no tokenizer."""

    label = "classes"
    use = "tells classes; send its texts to /predict, or queries to /rerank"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.encoder = self.model.encoder_head("classes", "serve")
        self.task = HeadRows(self.encoder, self.name, self.model.depends_on_batch)

    @property
    def reranks(self) -> bool:
        """Whether its only class is the relevance of a document."""
        return len(self.model.config.head.labels) == 1

    async def classify(self, texts: Sequence[Text], client: Hashable) -> list[list[Scored]]:
        """Return all classes of each text with probabilities, best first. Long texts are cut."""
        return [scored(self.encoder, logits) for logits in await self._logits(texts, "inputs", client)]

    async def relevance(
        self, query: str, documents: Sequence[str], client: Hashable
    ) -> tuple[list[float], list[float]]:
        """Return the relevance of each document as probabilities, and as logits."""
        check_reranker(self.model.config, self.name)
        logits = await self._logits([(query, document) for document in documents], "documents", client)
        probabilities = [scored(self.encoder, each, several=True)[0].probability for each in logits]
        return probabilities, [float(each[0]) for each in logits]

    async def _logits(self, texts: Sequence[Text], field: str, client: Hashable) -> list[Any]:
        check_count(f"{field}: {len(texts)} texts", len(texts), self.max_sentences)
        cut = LineReport(on_overlong=lambda number: None)
        rows = await without_blocking(sum(len("".join(text)) for text in texts), text_rows, self.encoder, texts, cut)
        logits = await self.compute(self.task, rows, [len(row.ids) for row in rows], client)
        self.count(len(rows))
        return logits


async def predict(call: Call) -> Any:
    """Classes of texts, each a text or a list of one text or two."""
    values = _head_fields(await call.values(), PREDICT)
    if values.get("raw_scores"):
        raise RequestError(400, "raw_scores: probabilities are answered; leave it out")
    inputs = values.get("inputs")
    rows = [_text(each) for each in (inputs if isinstance(inputs, list) else [inputs])]
    if not rows:
        raise RequestError(400, f"inputs: must hold at least one text; send {PREDICT_EXAMPLE}")
    model = call.model(values.get("model"), missing="with classes")
    found = await call.result(model.classify(rows, call.client))
    answer = [[{"score": each.probability, "label": each.label} for each in classes] for classes in found]
    return answer[0] if isinstance(inputs, str) else answer


async def rerank(call: Call) -> Any:
    """Order documents by their relevance to a query."""
    values = _head_fields(await call.values(), RERANK)
    tei = "texts" in values
    name = "texts" if tei else "documents"
    query = values.get("query")
    if not isinstance(query, str) or name not in values or (tei and "documents" in values):
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
    model = call.model(values.get("model"), lambda model: model.reranks, "with one class")
    scores, raw = await call.result(model.relevance(query, documents, call.client))
    ranked = ordered(raw if values.get("raw_scores") else scores, options)
    if tei:
        shown = values.get("return_text")
        scored = [{"index": each.index, "score": each.relevance_score} for each in ranked]
        return [{**each, "text": documents[each["index"]]} for each in scored] if shown else scored
    shown = values.get("return_documents")
    results = [{**asdict(each), **({"document": {"text": documents[each.index]}} if shown else {})} for each in ranked]
    return {"model": model.name, "results": results}


def _head_fields(values: dict[str, Any], form: Form) -> dict[str, Any]:
    values = given(values, form.fields)
    for name in FLAGS:
        flag(name, values.get(name, True))
    if not values.get("truncate", True):
        raise RequestError(400, "truncate: texts that are too long are cut; leave it out")
    return values


def _text(value: Any) -> Text:
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list) and 1 <= len(parts) <= 2 and all(isinstance(part, str) for part in parts):
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])
    raise RequestError(400, f"inputs: each must be a text, or a list of one text or two; send {PREDICT_EXAMPLE}")
