"""The process: a socket, a model, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.process import HANGUP, drop_hung_up, restore_handlers

from .app import App
from .batching import Batcher
from .connections import Connection, Guard, allow_files, missing_methods
from .models import Named
from .opening import Open, check, load_all, open_onnx
from .site import SiteApp

BACKLOG = 1024  # connections that wait to be accepted
CLOSING_NOTICE_SECONDS = 0.5  # seconds, in which answers that say that there is none are out
LAST_SECONDS = 5.0  # and in which clients have read them

UNBOUNDED = "connections have its bounds, not this server's; keep strangers out, or install uvicorn<0.55"

log = logging.getLogger("export.serve")


def run(models: Sequence[Named], settings: ServeSettings, open: Open = open_onnx) -> None:
    """Serve until SIGTERM or SIGHUP (returns) or Ctrl-C (raises KeyboardInterrupt); what was taken is finished first.
    A second Ctrl-C or SIGTERM gives it up.

    Raises `UserError` for a folder or file, a file of keys or an address that can't be used.
    """
    for named in models:  # before anything waits for it
        check(named.path, settings, open)
    batcher = Batcher(settings.max_batch, settings.max_wait_ms / 1000, settings.max_queue, settings.workers)
    load = partial(load_all, models, settings, open)
    what = ", ".join(str(named.path) for named in models)
    _run(partial(App, load, batcher, settings), what, settings, batcher.give_up)


def run_site(folder: Path, settings: ServeSettings) -> None:
    """Serve a site that `mlx-transformer web` wrote."""
    _run(lambda ready, failed: SiteApp(folder, settings.verify, ready), str(folder), settings)


Make = Callable[[Callable[[], None], Callable[[Exception], None]], App | SiteApp]
"""Makes the application from `ready`, which it calls once it answers, and `failed`, given why it never will."""


def _run(make: Make, what: str, settings: ServeSettings, give_up: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal. give_up: called when running requests are not to be finished."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are of what strangers send
    failures: list[Exception] = []

    def ready() -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("serving %s on http://%s:%d (ready in %.1f s)", what, host, port, time.perf_counter() - began)

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    app = make(ready, failed)
    listener = listening(settings.host, settings.port)
    port = listener.getsockname()[1]
    began = time.perf_counter()
    server = Server(configured(app, settings), give_up, settings.grace_seconds)
    # uvicorn raises the signal that ended it once more, for the handler that was there before.
    endings = [signal.SIGTERM, signal.SIGINT, *([HANGUP] if HANGUP else [])]
    before = {number: signal.getsignal(number) for number in endings}
    signal.signal(signal.SIGTERM, server.end_first)
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in whose place asyncio puts its own
    if HANGUP and before[HANGUP] is not signal.SIG_IGN:  # nohup
        signal.signal(HANGUP, server.hang_up)
    try:
        server.run(sockets=[listener])
    finally:
        restore_handlers(before, server.hung_up)
        listener.close()
    if failures:
        raise failures[0]
    log.info("stopped")


def configured(app: App | SiteApp, settings: ServeSettings) -> uvicorn.Config:
    """uvicorn with our connections, whose bounds are those of the settings."""
    guard = Guard(allow_files(settings.max_connections), app.metrics.on_refused)
    app.metrics.watch("connections", "Connections that are open.", lambda: len(guard.connections))
    app.metrics.watch("held_bytes", "Bytes of requests that are read or answered.", lambda: guard.held_bytes)
    connection: Any = partial(Connection, guard, settings.header_seconds, settings.idle_seconds)
    if missing := missing_methods():
        log.warning("uvicorn %s has no %s: %s", uvicorn.__version__, ", ".join(missing), UNBOUNDED)
        connection = "httptools"
    return uvicorn.Config(
        until_cancelled(app.asgi),
        http=connection,
        log_config=None,
        access_log=settings.access_log,
        ws="none",
        timeout_keep_alive=max(1, round(settings.idle_seconds)),
        timeout_graceful_shutdown=max(1, round(settings.grace_seconds + LAST_SECONDS)),
        server_header=False,
    )


def until_cancelled(asgi: ASGIApp) -> ASGIApp:
    """Who cancels a request is the server, at its end: that is no fault, and needs no traceback."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asgi(scope, receive, send)

    return application


class Server(uvicorn.Server):
    """Ends in three steps: what was taken is finished; a second signal, or `grace_seconds`, gives it up, and its
    clients are told so; a third waits for nobody."""

    def __init__(self, config: uvicorn.Config, give_up: Callable[[], None], grace_seconds: float):
        super().__init__(config)
        self.give_up, self.grace_seconds = give_up, grace_seconds
        self.loop: asyncio.AbstractEventLoop | None = None
        self.signals = 0
        self.hung_up = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        self._captured_signals.append(sig)
        self.should_exit = True
        if self.signals > 1 and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._give_up if self.signals == 2 else self._part)

    def end_first(self, sig: int, frame: FrameType | None) -> None:
        """End: a signal came before uvicorn listened to them, or once more after it had."""
        self.should_exit = True

    def hang_up(self, sig: int, frame: FrameType | None) -> None:
        """End, since the terminal has gone. That often comes twice, from the system and from the shell, and asks no
        more."""
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
        """Compute nothing more; cancel what has not ended by itself soon, such as the reading of a body, is
        cancelled."""
        self.give_up()
        asyncio.get_running_loop().call_later(
            CLOSING_NOTICE_SECONDS, lambda: [task.cancel() for task in self.server_state.tasks]
        )

    def _part(self) -> None:
        """Part from clients that don't read. uvicorn's own `force_exit` would leave the application without its end."""
        for connection in list(self.server_state.connections):
            cast(Any, connection).transport.abort()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket on the address; `UserError` says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
        # asyncio sends at once (TCP_NODELAY) only where the protocol is named: otherwise every answer takes 40 ms more.
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would take a port that is in use
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
