"""A route of the server, a call of it, and who may call.

A route is a row (`Route`) and a function of a `Call`. The function returns JSON values or a whole `Response`; whatever
it raises becomes an answer (app.py).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError

from .batching import Batcher, EndingError, OverloadError
from .metrics import Metrics
from .models import Loaded, Models
from .requests import OPENAI, Form, RequestError, error_answer, error_content, read_fields

FAULT = "a fault of the server; its log says more"
ENDING = "the server ends; try again in 1 s"
NO_KEY = "a key is needed: send it as Authorization: Bearer KEY"
CLIENT = "key of the client"  # in a request's scope
EVENTS = "text/event-stream"

log = logging.getLogger("export.serve")


@dataclass(frozen=True)
class Route:
    """A row of the table of routes (app.py).

    path: in Starlette's syntax; {name:path} matches any rest of the path.
    answer: `async def answer(call: Call)`; the first line of its docstring stands in /docs.
    takes: the form of the body; None for a GET.
    gives: the answer, as an example.
    kind: the kind of model behind it, for `Call.model`; `Loaded` is any.
    key: whether a request needs a key; "body" if it may stand in the body, as LibreTranslate's clients send it.
    counted: whether requests count in /metrics.
    """

    path: str
    answer: Callable[[Call], Awaitable[Any]]
    takes: Form | None
    gives: str
    kind: type[Loaded] = Loaded
    key: bool | str = True
    counted: bool = True

    @property
    def method(self) -> str:
        return "GET" if self.takes is None else "POST"


@dataclass
class Shared:
    """Shared by all calls of a server. loaded: None while the models are being loaded."""

    settings: ServeSettings
    batcher: Batcher
    keys: KeyRing
    routes: Collection[Route]
    metrics: Metrics = field(default_factory=Metrics)
    loaded: Models | None = None

    @property
    def models(self) -> Models:
        """The models; `OverloadError` while they are being loaded."""
        if self.loaded is None:
            raise OverloadError("the model is being loaded", 1)
        return self.loaded


@dataclass
class Call:
    """A request to a route."""

    request: Request
    route: Route
    shared: Shared

    @property
    def models(self) -> Models:
        return self.shared.models

    @property
    def client(self) -> Hashable:
        """The client whose turn in the queue this request takes: by key, otherwise by address."""
        return self.request.scope.get(CLIENT) or (self.request.client.host if self.request.client else None)

    async def values(self) -> dict[str, Any]:
        """Read the fields of the body, within the server's limits."""
        _ = self.models  # 503 while they are being loaded
        form = self.route.takes
        assert form is not None
        values = await read_fields(self.request, self.shared.settings.body_seconds, form.example)
        if self.route.key == "body":
            self.shared.keys.admit(self.request, values.pop("api_key", None))
        return values

    def model(self, name: Any, fits: Callable[[Any], bool] = lambda model: True, missing: str = "") -> Any:
        """Find a model of the route's kind: by name, or with None the only model that fits."""
        if not isinstance(name, str | None):
            raise RequestError(400, "model: must be a model's name")
        return self.models.fitting(self.route.kind, name, fits, missing)

    async def result(self, work: Awaitable[Any]) -> Any:
        """Await `work`; if the client leaves, cancel it and raise `ClientDisconnect`."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def stream(self, pieces: AsyncIterator[Any], written: AsyncIterator[str]) -> Response:
        """Answer with server-sent events. pieces: the text; written: the events made of it (`event`)."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(pieces, written), media_type=EVENTS, headers=headers)

    async def _events(self, pieces: AsyncIterator[Any], written: AsyncIterator[str]) -> AsyncIterator[str]:
        # Starlette closes this generator when the client leaves.
        path, complete = self.route.path, False
        try:
            async for text in written:
                yield text
            complete = True
        except Exception as error:
            complete = True
            yield event(_broken_off(path, error), None if path.startswith(OPENAI) else "error")
        finally:
            if not complete:
                self.shared.metrics.dropped.inc()
            for source in (written, pieces):
                await cast(AsyncGenerator[Any], source).aclose()


def event(data: Any, kind: str | None = None) -> str:
    """Write a server-sent event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _broken_off(path: str, error: Exception) -> dict[str, Any]:
    """The last event of a failed stream. Faults of the server are logged."""
    if isinstance(error, EndingError):
        return error_content(path, 503, ENDING)
    if isinstance(error, UserError):
        return error_content(path, 400, str(error))
    log.error("POST %s failed", path, exc_info=error)
    return error_content(path, 500, FAULT)


# Who may call.
class KeyRing:
    """The keys of the clients; without keys, everybody may call."""

    def __init__(self, keys: list[str]):
        self.digests = [sha256(key.encode()).digest() for key in keys]

    def owner(self, key: str) -> bytes | None:
        """Name the client who has this key; None for a wrong key."""
        presented = sha256(key.encode("utf-8", "surrogatepass")).digest()
        # Compare with all digests, each in constant time: the time taken tells nothing about any key.
        return presented if sum([hmac.compare_digest(presented, digest) for digest in self.digests]) else None

    def admit(self, request: Request, key: object) -> None:
        """Check a key from the body, unless a valid key was in the head; `RequestError` if it is wrong."""
        if self.digests and CLIENT not in request.scope:
            request.scope[CLIENT] = self.owner(key) if isinstance(key, str) else None
            if request.scope[CLIENT] is None:
                raise RequestError(401, NO_KEY)


def middleware(shared: Shared) -> list[Middleware]:
    """CORS outside and keys inside, since a browser's preflight request brings no key."""
    layers = []
    if shared.settings.cors:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(shared.settings.cors),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's clients add a dozen of their own
                expose_headers=["Retry-After"],
            )
        )
    if shared.keys.digests:
        layers.append(Middleware(Keys, shared=shared))
    return layers


class Keys:
    """Refuses requests without a valid key, and stores the key's owner in the scope."""

    def __init__(self, app: ASGIApp, shared: Shared):
        self.app, self.ring = app, shared.keys
        self.open = {route.path for route in shared.routes if not route.key}
        self.in_body = {route.path for route in shared.routes if route.key == "body"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open:
            key = _key(Request(scope))
            if (owner := self.ring.owner(key)) is not None:
                scope[CLIENT] = owner
            elif key or scope["path"] not in self.in_body or scope["method"] != "POST":
                await error_answer(scope["path"], 401, NO_KEY)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
