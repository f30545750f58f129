"""The endpoints of encoders with classes, in the forms that clients of others send and read.

POST /rerank, /v1/rerank    documents by their relevance to a query, by a model with one class: Cohere's and Jina's form
                            with "documents", that of text-embeddings-inference (TEI) with "texts"
POST /predict               the classes of texts: TEI's form
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_transformer.generation.rerank import ordered

from .access import name_of
from .answers import unless_gone
from .bodies import values_of
from .label_forms import PREDICT_EXAMPLE, RERANK_EXAMPLE, PredictRequest, RerankRequest
from .shared import Shared


class LabelEndpoints:
    """Those of one application."""

    def __init__(self, shared: Shared):
        self.shared = shared

    async def rerank(self, request: Request) -> Response:
        """Order documents by their relevance to a query."""
        body = RerankRequest.of(await values_of(request, self.shared.settings.body_seconds, RERANK_EXAMPLE))
        model = self.shared.models.labeller(body.model, reranks=True)
        scores, raw = await unless_gone(request, model.relevance(body.query, body.documents, name_of(request)))
        return JSONResponse(body.answer(model.name, ordered(raw if body.raw else scores, body.options)))

    async def predict(self, request: Request) -> Response:
        """Say which classes texts are of."""
        body = PredictRequest.of(await values_of(request, self.shared.settings.body_seconds, PREDICT_EXAMPLE))
        model = self.shared.models.labeller(body.model)
        return JSONResponse(body.answer(await unless_gone(request, model.classify(body.inputs, name_of(request)))))
