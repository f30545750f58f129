"""Who may ask: pages of other origins (CORS), and keys."""

from __future__ import annotations

import hmac
from collections.abc import Hashable
from hashlib import sha256

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from export.settings import ServeSettings

from .answers import error_answer
from .requests import RequestError

OPEN = ("/health", "/ready", "/languages", "/docs", "/openapi.json")
IN_BODY = ("/translate", "/detect")
"""Paths whose body may hold the key, as LibreTranslate's clients send it: their endpoints ask `KeyRing.admit`."""
CLIENT = "key of the client"  # in a request's scope: who sent it
NO_KEY = "a key is needed: send it as Authorization: Bearer KEY"


class KeyRing:
    """The keys of which a request must bring one; without any, everybody may ask."""

    def __init__(self, keys: list[str]):
        self.digests = [sha256(key.encode()).digest() for key in keys]

    def owner(self, key: str) -> bytes | None:
        """Return who has the key, None if nobody has."""
        presented = sha256(key.encode("utf-8", "surrogatepass")).digest()
        # Digests of all are compared, each in constant time: how long it takes says nothing about any key.
        return presented if sum([hmac.compare_digest(presented, digest) for digest in self.digests]) else None

    def admit(self, request: Request, key: object) -> None:
        """Let a request through whose body brought `key`, if its head brought none; `RequestError` for a wrong one."""
        if self.digests and CLIENT not in request.scope:
            request.scope[CLIENT] = self.owner(key) if isinstance(key, str) else None
            if request.scope[CLIENT] is None:
                raise RequestError(401, NO_KEY)


def middleware(settings: ServeSettings, ring: KeyRing) -> list[Middleware]:
    """Return what requests pass through, the outermost first: a browser asks without a key whether it may ask."""
    layers = []
    if settings.cors:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # clients add their own: OpenAI's a dozen
                expose_headers=["Retry-After"],
            )
        )
    if ring.digests:
        layers.append(Middleware(Keys, ring=ring))
    return layers


class Keys:
    """Lets requests through that bring one of the keys, and says in their scope whose they are."""

    def __init__(self, app: ASGIApp, ring: KeyRing):
        self.app, self.ring = app, ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            key = _key(Request(scope))
            if (owner := self.ring.owner(key)) is not None:
                scope[CLIENT] = owner
            elif key or scope["path"] not in IN_BODY or scope["method"] != "POST":
                await error_answer(scope["path"], 401, NO_KEY)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def name_of(request: Request) -> Hashable:
    """Return the client whose turn a request takes: its key's, else its address's."""
    return request.scope.get(CLIENT) or (request.client.host if request.client else None)
