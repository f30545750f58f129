"""The HTTP application: the table of routes, the models behind them, every error answered and every answer counted.

Errors are {"error": a line}, under /v1 in OpenAI's form: 400 something in the request is wrong, 401 no valid key,
408 the body was too slow, 413 too large, 500 a fault of the server, 503 it is loading, full or ending (Retry-After).
connections.py adds 400, 408, 413, 414, 415, 431, 501 and 503, for bad heads, huge bodies and too many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import __version__

from .batching import Batcher, EndingError, OverloadError
from .calls import ENDING, FAULT, Call, KeyRing, Route, Shared, middleware
from .chatting import CHAT, chat
from .completing import COMPLETE, CompletionModel, complete
from .encoders import EMBED, PREDICT, RERANK, ClassModel, EmbeddingModel, embed, predict, rerank
from .models import Loaded, Model, Models, Named
from .requests import OPENAI, RequestError, docs_page, error_answer, openapi
from .translating import DETECT, STREAM, TRANSLATE, TranslationModel, detect, languages, stream, translate

CLIENT_LEFT = 499  # seen in the metrics only
HELP = f"POST /translate {TRANSLATE.example}, /translate/stream, /v1/chat/completions, "
HELP += "/v1/completions, /v1/embeddings, /rerank, /predict; GET /docs, /health, /metrics\n"
OPENAI_HELP = (
    "GET /v1/models; POST /v1/completions and /v1/chat/completions to decoders, /v1/embeddings and /v1/rerank "
)
OPENAI_HELP += "to encoders; GET /docs"
DEFAULTS = ServeSettings()
STARTED = int(time.time())


# Endpoints about the server itself.
async def show_help(call: Call) -> Any:
    """A line of help."""
    return PlainTextResponse(HELP)


async def health(call: Call) -> Any:
    """200 once the models are loaded, 503 before."""
    ready, batcher = call.shared.loaded is not None, call.shared.batcher
    state = {"status": "ready" if ready else "starting", "waiting": batcher.waiting, "running": batcher.running}
    return state if ready else JSONResponse(state, 503, {"Retry-After": "1"})


async def metrics(call: Call) -> Any:
    """Counts and times, for Prometheus."""
    return Response(call.shared.metrics.text(), media_type=call.shared.metrics.content_type)


async def version(call: Call) -> Any:
    """The version of this server."""
    return {"name": "mlx-transformer", "version": __version__}


async def describe(call: Call) -> Any:
    """This description, for programs."""
    return openapi(call.shared.routes, call.shared.settings.api_key_file is not None)


async def docs(call: Call) -> Any:
    """This description, as a page."""
    return HTMLResponse(docs_page(await describe(call)))


async def list_models(call: Call) -> Any:
    """The models, as OpenAI lists them."""
    return {"object": "list", "data": [_entry(name) for name in call.models.names]}


async def describe_model(call: Call) -> Any:
    """A model by its name, as OpenAI describes it."""
    name = call.request.path_params["name"]
    if name not in call.models.names:
        raise call.models.unknown(name)
    return _entry(name)


def _entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "mlx-transformer"}


# Forms of answers, as /docs shows them.
TRANSLATED = '{"translations": ["Guten Morgen."]}; with q: {"translatedText": "Guten Morgen."}'
STREAMED = 'data: {"text": "Guten"}, ..., event: done with the whole text'
COMPLETED = '{"choices": [{"text": " there was", ...}], "usage": {...}}'
ANSWERED = '{"choices": [{"message": {"role": "assistant", "content": "Hi!"}, ...}], "usage": {...}}'
EMBEDDED = '{"data": [{"embedding": [0.1, ...], ...}], "usage": {...}}'
RANKED = '{"results": [{"index": 0, "relevance_score": 0.93}]}; with texts: [{"index": 0, "score": 0.93}]'
PREDICTED = '[{"score": 0.9, "label": "positive"}]'
DETECTED = '[{"confidence": 0, "language": "en"}]'
CODES = '[{"code": "en", "name": "en", "targets": ["de"]}]'
STATE = '{"status": "ready", "waiting": 0, "running": 0}'

# path, function, form in, form out, kind of model
ROUTES = (
    Route("/", show_help, None, "text", counted=False),
    Route("/translate", translate, TRANSLATE, TRANSLATED, TranslationModel, key="body"),
    Route("/translate/stream", stream, STREAM, STREAMED, TranslationModel),
    Route("/languages", languages, None, CODES, TranslationModel, key=False),
    Route("/detect", detect, DETECT, DETECTED, TranslationModel, key="body"),
    Route("/v1/models", list_models, None, '{"data": [{"id": "stories", ...}]}'),
    Route("/v1/models/{name:path}", describe_model, None, '{"id": "stories", ...}'),
    Route("/v1/completions", complete, COMPLETE, COMPLETED, CompletionModel),
    Route("/v1/chat/completions", chat, CHAT, ANSWERED, CompletionModel),
    Route("/v1/embeddings", embed, EMBED, EMBEDDED, EmbeddingModel),
    Route("/rerank", rerank, RERANK, RANKED, ClassModel),
    Route("/v1/rerank", rerank, RERANK, RANKED, ClassModel),
    Route("/predict", predict, PREDICT, PREDICTED, ClassModel),
    Route("/health", health, None, STATE, key=False, counted=False),
    Route("/ready", health, None, STATE, key=False, counted=False),
    Route("/metrics", metrics, None, "Prometheus's text format", counted=False),
    Route("/version", version, None, '{"name": "mlx-transformer", "version": ...}', counted=False),
    Route("/openapi.json", describe, None, "OpenAPI 3.1", key=False, counted=False),
    Route("/docs", docs, None, "HTML", key=False, counted=False),
)


class App:
    """The application. `load` runs in a thread of the batcher and returns the models, warmed up; until then requests
    get 503. Then `ready` is called, or `failed` with the error."""

    def __init__(
        self,
        load: Callable[[], Mapping[Named, Model]],
        batcher: Batcher,
        settings: ServeSettings = DEFAULTS,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.load, self.batcher, self.settings, self.ready, self.failed = load, batcher, settings, ready, failed
        self.shared = Shared(settings, batcher, KeyRing(settings.api_keys()), ROUTES)
        self.metrics = self.shared.metrics
        batcher.report_to(self.metrics.on_batch)
        self.metrics.watch("waiting_sentences", "Sentences in the queue.", lambda: batcher.waiting)
        self.metrics.watch("running_sentences", "Sentences that are computed now.", lambda: batcher.running)
        self.metrics.watch("ready", "1 when the models are loaded.", lambda: float(self.shared.loaded is not None))
        self.asgi = Starlette(
            routes=[routing.Route(route.path, self._endpoint(route), methods=[route.method]) for route in ROUTES],
            lifespan=self.lifespan,
            middleware=middleware(self.shared),
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )
        self.asgi.router.redirect_slashes = False  # an unknown path is 404

    def give_up(self) -> None:
        """End all waiting and running requests, with 503 if their answer hasn't begun."""
        self.batcher.give_up()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        loading = asyncio.create_task(self._load())
        yield
        await asyncio.gather(loading, return_exceptions=True)
        await self.batcher.stop()

    async def _load(self) -> None:
        try:
            # In a thread that computes: an MLX array belongs to the thread that made it.
            models = await asyncio.get_running_loop().run_in_executor(self.batcher.pool, self.load)
            self.shared.loaded = Models((named, self._loaded(named, model)) for named, model in models.items())
        except Exception as error:
            self.failed(error)
        else:
            self.ready()

    def _loaded(self, named: Named, model: Model) -> Loaded:
        encoder = ClassModel if model.config.head.kind == "classes" else EmbeddingModel
        kinds = {"decoder": CompletionModel, "encoder": encoder, "encoder-decoder": TranslationModel}
        kind = kinds[model.config.architecture]
        return kind(model, self.batcher, self.metrics, self.settings, named.name)

    def _endpoint(self, route: Route) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                found = await route.answer(Call(request, route, self.shared))
                response = found if isinstance(found, Response) else JSONResponse(found)
            except RequestError as error:
                response = error_answer(route.path, error.status, str(error), code=error.code)
            except UserError as error:
                response = error_answer(route.path, 400, str(error))
            except OverloadError as error:
                response = error_answer(route.path, 503, str(error), {"Retry-After": str(error.retry_after)})
            except (EndingError, asyncio.CancelledError):  # the server cancels requests when it ends
                response = error_answer(route.path, 503, ENDING, {"Retry-After": "1", "Connection": "close"})
            except ClientDisconnect:
                self.metrics.dropped.inc()
                response = Response(status_code=CLIENT_LEFT)
            except Exception:
                self._count(route, 500)
                raise
            self._count(route, response.status_code, time.perf_counter() - began)
            return response

        return endpoint

    def _count(self, route: Route, status: int, seconds: float | None = None) -> None:
        if route.counted:
            self.metrics.requests.labels(route.path, status).inc()
            if seconds is not None:
                self.metrics.seconds.labels(route.path).observe(seconds)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{error.detail}; {OPENAI_HELP if path.startswith(OPENAI) else HELP.strip()}"
    return error_answer(path, error.status_code, message, dict(error.headers or {}))


async def _server_error(request: Request, _: Exception) -> Response:
    return error_answer(request.url.path, 500, FAULT)
