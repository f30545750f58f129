"""The process of the server: a socket, an application, uvicorn, and an orderly end; and the application of a site.

`mlx-transformer web` writes a site. It is served with the headers for cross-origin isolation, without which browsers
give a page no shared memory for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from export.settings import ServeSettings
from export.web.write import UNLISTED, site_files
from mlx_transformer.system.early import HANGUP, drop_hung_up, restore_handlers
from mlx_transformer.system.errors import UserError

from .connections import Bounds, Connection, Guard, allow_files
from .metrics import Metrics

PAGE = "index.html"
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
FOR_EVER = "public, max-age=31536000, immutable"


class SiteApp:
    """Serves the listed files of a site and no others. `UserError` for another folder or, with `verify`, a damaged
    site. `ready` is called once the event loop runs."""

    def __init__(self, folder: Path, verify: bool = True):
        self.folder, self.digests = folder, site_files(folder, verify)
        self.ready: Callable[[], None] = lambda: None
        self.failed: Callable[[Exception], None] = lambda error: None
        self.metrics = Metrics()
        self.asgi = Starlette(routes=[Route("/{path:path}", self.file)], lifespan=self.lifespan)

    def give_up(self) -> None:
        """Nothing is computed here."""

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.ready()
        yield

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"] or PAGE
        if path not in self.digests and path not in UNLISTED:
            return PlainTextResponse("no such file\n", 404, HEADERS)
        digest = self.digests.get(path, "")
        headers = {**HEADERS, "Cache-Control": "no-cache"}
        if digest:
            headers["ETag"] = f'"{digest}"'
            if request.headers.get("if-none-match") == headers["ETag"]:
                return Response(status_code=304, headers=headers)
            if request.url.query and digest.startswith(request.url.query):
                headers["Cache-Control"] = FOR_EVER
        kind = TYPES.get(Path(path).suffix, "application/octet-stream")
        return FileResponse(self.folder / path, headers=headers, media_type=kind)


BACKLOG = 1024  # connections waiting to be accepted
CLOSING_NOTICE_SECONDS = 0.5  # to send the last answers: 503, the server ends
LAST_SECONDS = 5.0  # for clients to read them

log = logging.getLogger("export.serve")


class Application(Protocol):
    """The served application: the models' `App` or a site's `SiteApp`. `ready` and `failed` are set by `run`."""

    metrics: Metrics
    ready: Callable[[], None]
    failed: Callable[[Exception], None]

    @property
    def asgi(self) -> ASGIApp: ...
    def give_up(self) -> None: ...


def run(app: Application, name: str, settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGHUP (returns) or Ctrl-C (raises KeyboardInterrupt), and finish running requests first;
    a second Ctrl-C or SIGTERM gives them up. `UserError` for an unusable address, and for a model that fails to
    load."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of whatever strangers send
    failures: list[Exception] = []

    def ready() -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("serving %s on http://%s:%d (ready in %.1f s)", name, host, port, time.perf_counter() - began)

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    app.ready, app.failed = ready, failed
    listener = listening(settings.host, settings.port)
    port = listener.getsockname()[1]
    began = time.perf_counter()
    server = Server(app, settings)
    # uvicorn raises the signal again when it has ended, for the earlier handler.
    endings = [signal.SIGTERM, signal.SIGINT, *([HANGUP] if HANGUP else [])]
    before = {number: signal.getsignal(number) for number in endings}
    signal.signal(signal.SIGTERM, server.end_first)
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio replaces it by its own
    if HANGUP and before[HANGUP] is not signal.SIG_IGN:  # SIG_IGN: nohup
        signal.signal(HANGUP, server.hang_up)
    try:
        server.run(sockets=[listener])
    finally:
        restore_handlers(before, server.hung_up)
        listener.close()
    if failures:
        raise failures[0]
    log.info("stopped")


class Server(uvicorn.Server):
    """A server that ends in three steps: the first signal finishes running requests; a second signal, or the end of
    `grace_seconds`, gives them up and tells their clients; a third ends at once."""

    def __init__(self, app: Application, settings: ServeSettings):
        self.guard = Guard(
            allow_files(settings.max_connections), lambda status: app.metrics.refused.labels(status).inc()
        )
        app.metrics.watch("connections", "Connections that are open.", lambda: len(self.guard.connections))
        app.metrics.watch("held_bytes", "Bytes of requests that are read or answered.", lambda: self.guard.held_bytes)
        connection: Any = partial(Connection, self.guard, settings.header_seconds)
        idle: Any = settings.idle_seconds  # uvicorn's type is int, and it only adds it to a time
        config = uvicorn.Config(
            Bounds(app.asgi),
            http=connection,
            log_config=None,
            access_log=settings.access_log,
            ws="none",
            timeout_keep_alive=idle,
            timeout_graceful_shutdown=max(1, round(settings.grace_seconds + LAST_SECONDS)),
            server_header=False,
        )
        super().__init__(config)
        self.give_up, self.grace_seconds = app.give_up, settings.grace_seconds
        self.loop: asyncio.AbstractEventLoop | None = None
        self.signals = 0
        self.hung_up = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        super().handle_exit(sig, frame)
        self.force_exit = False  # it would skip the application's end
        if self.signals > 1 and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._give_up if self.signals == 2 else self.guard.abort)

    def end_first(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal before uvicorn listens to signals, or after it has ended."""
        self.should_exit = True

    def hang_up(self, sig: int, frame: FrameType | None) -> None:
        """Handle the end of the terminal. The system and the shell often send it twice, so it doesn't count as a second
        signal."""
        self.hung_up = True
        drop_hung_up()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        later = asyncio.get_running_loop().call_later(self.grace_seconds, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            later.cancel()

    def _give_up(self) -> None:
        """Compute nothing more; soon after, cancel requests that don't end by themselves, e.g. while reading a body."""
        self.give_up()
        asyncio.get_running_loop().call_later(
            CLOSING_NOTICE_SECONDS, lambda: [task.cancel() for task in self.server_state.tasks]
        )


def listening(host: str, port: int) -> socket.socket:
    """Open a socket on the address. Raises `UserError` with the reason if it can't."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; without it every answer takes 40 ms more.
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # on Windows it would share a port in use
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        reason = str(getattr(error, "strerror", None) or error).split(" (while")[0]
        raise UserError(f"{host}:{port}: can't listen there ({reason}); choose others: --host, --port") from None
