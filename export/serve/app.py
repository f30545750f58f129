"""The HTTP endpoints, as an ASGI application.

    GET /                   a line of help
    POST /translate         {"text": one string or a list, "beam": 4, ...} -> {"translations": [...]}
    POST /translate/stream  {"text": one string, ...} -> server-sent events
    GET /health             200 when the model is loaded and has run, 503 before
    GET /metrics            for Prometheus

Errors are {"error": one line}: 400 what the request says is wrong, 401 it brings no key, 408 it did not arrive, 413 it
is too large, 414 and 431 its address or head is (`connection.py`), 500 a fault of the server, 503 it is starting, has
no room or ends (with Retry-After).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from export.settings import ServeSettings
from mlx_transformer.generation.translate import Translation
from mlx_transformer.system.errors import UserError

from .access import middleware, name_of
from .batching import Batcher, EndingError, OverloadError
from .metrics import Metrics
from .requests import EXAMPLE, RequestError, TranslateRequest, one_line
from .service import Model, Service

MAX_BODY = 256 * 1024  # bytes
CLIENT_LEFT = 499  # nobody sees it but the metrics
HELP = f"POST /translate {EXAMPLE}, /translate/stream; GET /health, /metrics\n"

DEFAULTS = ServeSettings()

log = logging.getLogger("export.serve")


class App:
    """The endpoints of one model, which `load` gives, warmed up; until it has, requests are told to come back."""

    def __init__(
        self,
        load: Callable[[], Model],
        batcher: Batcher,
        settings: ServeSettings = DEFAULTS,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        """`load` runs in a thread once the event loop does; then `ready` is called, or `failed` with what it raised."""
        self.load, self.batcher, self.settings, self.ready, self.failed = load, batcher, settings, ready, failed
        self.metrics = Metrics()
        batcher.report_to(self.metrics.on_batch)
        self.metrics.watch("waiting_sentences", "Sentences in the queue.", lambda: batcher.waiting)
        self.metrics.watch("running_sentences", "Sentences that are computed now.", lambda: batcher.running)
        self.metrics.watch("ready", "1 when the model is loaded.", lambda: float(self.service is not None))
        self.service: Service | None = None
        self.asgi = Starlette(
            routes=[
                Route("/", self.help),
                Route("/translate", self.counted("/translate", self.translate), methods=["POST"]),
                Route("/translate/stream", self.counted("/translate/stream", self.stream), methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.show_metrics),
            ],
            lifespan=self.lifespan,
            middleware=middleware(settings),
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher.start()
        loading = asyncio.create_task(self._load())
        yield
        await asyncio.gather(loading, return_exceptions=True)
        await self.batcher.stop()

    async def _load(self) -> None:
        try:
            model = await asyncio.to_thread(self.load)
            self.service = Service(model, self.batcher, self.metrics, self.settings.max_sentences)
        except Exception as error:
            self.failed(error)
        else:
            self.ready()

    async def help(self, _: Request) -> Response:
        return PlainTextResponse(HELP)

    async def health(self, _: Request) -> Response:
        state = {"status": "ready" if self.service else "starting"}
        state |= {"waiting": self.batcher.waiting, "running": self.batcher.running}
        return JSONResponse(state) if self.service else JSONResponse(state, 503, {"Retry-After": "1"})

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def counted(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        """The endpoint with its errors as answers, and every answer counted."""

        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await answer(request)
            except RequestError as error:
                response = _error(error.status, str(error))
            except UserError as error:
                response = _error(400, str(error))
            except OverloadError as error:
                response = _error(503, str(error), {"Retry-After": str(error.retry_after)})
            except (EndingError, asyncio.CancelledError):  # who cancels a request is the server, at its end
                response = _error(503, ENDING, {"Retry-After": "1", "Connection": "close"})
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

    async def translate(self, request: Request) -> Response:
        service, wanted = await self._begin(request)
        found = await _unless_gone(request, service.translate(wanted, name_of(request)))
        answer: dict[str, Any] = {"translations": [best[0].text for best in found]}
        if wanted.wants_n_best:
            answer["n_best"] = [[_hypothesis(t, wanted.wants_alignment) for t in n_best] for n_best in found]
        if wanted.wants_alignment:
            answer["alignment"] = [_links(best[0]) for best in found]
        # Large ones take their time; others should not wait for it.
        large = len(wanted.lines) > FEW_LINES or wanted.wants_n_best or wanted.wants_alignment
        return await asyncio.to_thread(JSONResponse, answer) if large else JSONResponse(answer)

    async def stream(self, request: Request) -> Response:
        service, wanted = await self._begin(request)
        pieces = await service.stream(wanted, name_of(request))
        # Starlette ends the iterator when the client has left.
        return StreamingResponse(self._events(pieces), media_type="text/event-stream", headers=UNBUFFERED)

    async def _events(self, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        """`data: {"text": piece}` each, then `event: done` with the whole text, or `event: error`."""
        text, complete = "", False
        try:
            async for piece in pieces:
                text += piece
                yield _event({"text": piece})
            complete = True
            yield _event({"text": text}, "done")
        except EndingError:
            complete = True
            yield _event({"error": ENDING}, "error")
        except Exception as error:
            complete = True
            if not isinstance(error, UserError):
                log.exception("POST /translate/stream failed")
            yield _event({"error": one_line(str(error)) if isinstance(error, UserError) else FAULT}, "error")
        finally:
            if not complete:
                self.metrics.dropped.inc()
            await pieces.aclose()  # type: ignore[attr-defined] - an async generator

    async def _begin(self, request: Request) -> tuple[Service, TranslateRequest]:
        if self.service is None:
            raise OverloadError("the model is being loaded", 1)
        return self.service, TranslateRequest.parse(await _body(request, self.settings.body_seconds))


UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
FAULT = "a fault of the server; its log says more"
ENDING = "the server ends; try again in 1 s"
FEW_LINES = 64


def _hypothesis(translation: Translation, aligned: bool) -> dict[str, Any]:
    links = {"alignment": _links(translation)} if aligned else {}
    return {"text": translation.text, "score": translation.score, **links}


def _links(translation: Translation) -> list[list[int]]:
    """As `translate --alignment --json` has them; an empty line has no words."""
    return [[*link] for link in translation.alignment.links] if translation.alignment else []


def _event(data: dict[str, str], kind: str | None = None) -> str:
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": one_line(message)}, status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{error.detail}; {HELP.strip()}", dict(error.headers or {}))


async def _server_error(_: Request, __: Exception) -> Response:
    return _error(500, FAULT)


async def _body(request: Request, seconds: float) -> bytes:
    """The whole body. `RequestError` if it is too large, which its head may say already, or too slow."""
    body = bytearray()
    announced = request.headers.get("content-length", "0")
    try:
        async with asyncio.timeout(seconds):
            if announced.isdecimal() and int(announced[:20]) > MAX_BODY:
                raise RequestError(413, TOO_LARGE)
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise RequestError(413, TOO_LARGE)
    except TimeoutError:
        raise RequestError(408, f"body: not complete after {seconds:g} s; send it again") from None
    return bytes(body)


TOO_LARGE = f"body: more than {MAX_BODY} bytes; send the text in parts"


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`; when the client leaves, it is cancelled and `ClientDisconnect` raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
