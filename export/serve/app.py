"""The HTTP application: its paths, the model behind them, and every answer counted.

    GET /                          a line of help
    POST /translate, ...           translators (translating.py)
    POST /v1/completions, ...      decoders alone (openai_endpoints.py)
    POST /v1/embeddings            encoders alone (the same)
    POST /rerank, /predict         encoders with classes (label_endpoints.py)
    GET /health, /ready            200 when the models are loaded and have run, 503 before
    GET /metrics                   for Prometheus
    GET /version, /openapi.json, /docs

Errors are {"error": one line}, under /v1 as OpenAI has them: 400 what the request says is wrong, 401 it brings no key,
408 it did not arrive, 413 it is too large, 414 and 431 its address or head is (`connections.py`), 500 a fault of the
server, 503 it is starting, has no room or ends (with Retry-After).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.version import __version__

from .access import KeyRing, middleware
from .answers import ENDING, HELP, error_answer, http_error, server_error
from .batching import Batcher, EndingError, OverloadError
from .completing import Completions
from .embedding import Embeddings
from .label_endpoints import LabelEndpoints
from .labelling import Labels
from .models import Models, Named
from .openai_endpoints import OpenAIEndpoints
from .requests import RequestError
from .schema import docs_page, openapi
from .service import Model, Service
from .shared import Shared
from .translating import TranslatingEndpoints

CLIENT_LEFT = 499  # nobody sees it but the metrics

DEFAULTS = ServeSettings()


class App:
    """The endpoints of some models, which `load` gives, warmed up; until it has, requests are told to come back."""

    def __init__(
        self,
        load: Callable[[], Mapping[Named, Model]],
        batcher: Batcher,
        settings: ServeSettings = DEFAULTS,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        """`load` runs in a thread of the batcher once the event loop does; then `ready` is called, or `failed` with
        what it raised."""
        self.load, self.batcher, self.settings, self.ready, self.failed = load, batcher, settings, ready, failed
        self.shared = Shared(settings, KeyRing(settings.api_keys()))
        self.metrics = self.shared.metrics
        batcher.report_to(self.metrics.on_batch)
        self.metrics.watch("waiting_sentences", "Sentences in the queue.", lambda: batcher.waiting)
        self.metrics.watch("running_sentences", "Sentences that are computed now.", lambda: batcher.running)
        self.metrics.watch("ready", "1 when the models are loaded.", lambda: float(self.shared.loaded is not None))
        self.asgi = Starlette(
            routes=self._routes(),
            lifespan=self.lifespan,
            middleware=middleware(settings, self.shared.keys),
            exception_handlers={HTTPException: http_error, Exception: server_error},
        )
        self.asgi.router.redirect_slashes = False  # an address that isn't there is said to be none

    def _routes(self) -> list[Route]:
        ours, openai = TranslatingEndpoints(self.shared), OpenAIEndpoints(self.shared)
        labels = LabelEndpoints(self.shared)

        def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "POST") -> Route:
            return Route(path, self.counted(path, answer), methods=[method])

        return [
            Route("/", self.help),
            route("/translate", ours.translate),
            route("/translate/stream", ours.stream),
            route("/languages", ours.languages, "GET"),
            route("/detect", ours.detect),
            route("/v1/models", openai.models, "GET"),
            route("/v1/models/{name:path}", openai.model, "GET"),
            route("/v1/completions", openai.complete),
            route("/v1/embeddings", openai.embed),
            *(route(path, labels.rerank) for path in ("/rerank", "/v1/rerank")),
            route("/predict", labels.predict),
            Route("/health", self.health),
            Route("/ready", self.health),
            Route("/metrics", self.show_metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.schema),
            Route("/docs", self.docs),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        loading = asyncio.create_task(self._load())
        yield
        await asyncio.gather(loading, return_exceptions=True)
        await self.batcher.stop()

    async def _load(self) -> None:
        try:
            # In the thread that computes: what MLX makes in one is not for another.
            services = await asyncio.get_running_loop().run_in_executor(self.batcher.pool, self.load)
            self.shared.loaded = Models((named, self._behind(named, model)) for named, model in services.items())
        except Exception as error:
            self.failed(error)
        else:
            self.ready()

    def _behind(self, named: Named, model: Model) -> Service | Completions | Embeddings | Labels:
        alone = Labels if model.config.head.kind == "classes" else Embeddings
        kinds = {"decoder": Completions, "encoder": alone, "encoder-decoder": Service}
        return kinds[model.config.architecture](
            model, self.batcher, self.metrics, self.settings.max_sentences, named.name
        )

    async def help(self, _: Request) -> Response:
        return PlainTextResponse(HELP)

    async def health(self, _: Request) -> Response:
        loaded = self.shared.loaded is not None
        state: dict[str, Any] = {"status": "ready" if loaded else "starting"}
        state |= {"waiting": self.batcher.waiting, "running": self.batcher.running}
        return JSONResponse(state) if loaded else JSONResponse(state, 503, {"Retry-After": "1"})

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"name": "mlx-transformer", "version": __version__})

    async def schema(self, _: Request) -> Response:
        return JSONResponse(openapi(self.settings))

    async def docs(self, _: Request) -> Response:
        return HTMLResponse(docs_page(openapi(self.settings)))

    def counted(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        """Return the endpoint with its errors as answers, and every answer counted."""

        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await answer(request)
            except RequestError as error:
                response = error_answer(path, error.status, str(error), code=error.code)
            except UserError as error:
                response = error_answer(path, 400, str(error))
            except OverloadError as error:
                response = error_answer(path, 503, str(error), {"Retry-After": str(error.retry_after)})
            except (EndingError, asyncio.CancelledError):  # who cancels a request is the server, at its end
                response = error_answer(path, 503, ENDING, {"Retry-After": "1", "Connection": "close"})
            except ClientDisconnect:
                self.metrics.dropped.inc()
                response = Response(status_code=CLIENT_LEFT)
            except Exception:
                self.metrics.requests.labels(path, 500).inc()
                raise
            self.metrics.requests.labels(path, response.status_code).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return endpoint
