"""The endpoints of OpenAI's clients.

GET /v1/models, /v1/models/NAME
POST /v1/completions    by a decoder alone; with "stream" as server-sent events, [DONE] at the end
POST /v1/embeddings     by an encoder alone
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .access import name_of
from .answers import broken_off, unless_gone
from .bodies import values_of
from .completing import Written
from .openai_embeddings import EMBEDDINGS_EXAMPLE, OpenAIEmbeddings
from .openai_forms import EXAMPLE, Completion, OpenAIRequest, model_entry
from .shared import Shared
from .streaming import EVENTS, UNBUFFERED, event

COMPLETIONS = "/v1/completions"
DONE = "data: [DONE]\n\n"


class OpenAIEndpoints:
    """Those of one application."""

    def __init__(self, shared: Shared):
        self.shared, self.created = shared, int(time.time())

    async def models(self, _: Request) -> Response:
        """List the models by their names."""
        entries = [model_entry(name, self.created) for name in self.shared.models.names]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name, models = request.path_params["name"], self.shared.models
        if name not in models.names:
            raise models.unknown(name)
        return JSONResponse(model_entry(name, self.created))

    async def complete(self, request: Request) -> Response:
        """Write what follows the prompts."""
        models = self.shared.models
        body = OpenAIRequest.of(await values_of(request, self.shared.settings.body_seconds, EXAMPLE))
        writer, client = models.writer(body.model), name_of(request)
        completion = Completion(body.model, writer.prompt_tokens(body.request.prompts))
        if not body.stream:
            outputs = await unless_gone(request, writer.complete(body.request, client))
            return JSONResponse(completion.whole(outputs))
        pieces, written = await unless_gone(request, writer.stream(body.request, client))
        events = self._events(pieces, written, completion, body.wants_usage)
        return StreamingResponse(events, media_type=EVENTS, headers=UNBUFFERED)

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors."""
        body = await values_of(request, self.shared.settings.body_seconds, EMBEDDINGS_EXAMPLE)
        form = OpenAIEmbeddings.of(body)
        model = self.shared.models.embedder(form.model)
        made, tokens = await unless_gone(request, model.embed(form.request, name_of(request)))
        return JSONResponse(await asyncio.to_thread(form.answer, made, tokens))

    async def _events(
        self, pieces: AsyncIterator[str], written: Written, completion: Completion, wants_usage: bool
    ) -> AsyncIterator[str]:
        complete = False
        try:
            async for piece in pieces:
                yield event(completion.part(piece, wants_usage=wants_usage))
            complete = True
            yield event(completion.part("", written.finish_reason, wants_usage=wants_usage))
            if wants_usage:
                yield event(completion.last(written))
            yield DONE
        except Exception as error:
            complete = True
            yield event(broken_off(COMPLETIONS, error))
        finally:
            if not complete:
                self.shared.metrics.dropped.inc()
            await pieces.aclose()  # type: ignore[attr-defined] - an async generator
