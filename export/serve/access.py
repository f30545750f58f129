"""Who may ask: pages of other origins (CORS), and keys."""

from __future__ import annotations

import hmac
from collections.abc import Hashable
from hashlib import sha256

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from export.settings import ServeSettings

OPEN = ("/health",)
CLIENT = "client"  # in a request's scope: who sent it
NO_KEY = "a key is needed: send it as Authorization: Bearer KEY"


def middleware(settings: ServeSettings) -> list[Middleware]:
    """What requests pass through, the outermost first: a browser asks without a key whether it may ask."""
    found = []
    if settings.cors:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-API-Key"],
                expose_headers=["Retry-After"],
            )
        )
    keys = settings.api_keys()
    if keys:
        found.append(Middleware(Keys, keys=keys))
    return found


class Keys:
    """Lets requests through that bring one of the keys, and says in their scope whose they are."""

    def __init__(self, app: ASGIApp, keys: list[str]):
        self.app, self.digests = app, [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = sha256(_key(Request(scope)).encode("latin-1", "replace")).digest()
            # Digests of all are compared, each in constant time: how long it takes says nothing about any key.
            if sum([hmac.compare_digest(given, digest) for digest in self.digests]) == 0:
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse({"error": NO_KEY}, 401, headers)(scope, receive, send)
                return
            scope[CLIENT] = given
        await self.app(scope, receive, send)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def name_of(request: Request) -> Hashable:
    """Whose turn a request takes: its key's, else its address's."""
    return request.scope.get(CLIENT) or (request.client.host if request.client else None)
