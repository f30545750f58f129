"""The process: a socket, a model, uvicorn, and an orderly end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import cast

import uvicorn

from export.runtime.folder import open_folder
from export.settings import ServeSettings
from mlx_transformer.spec.errors import UserError

from .app import App
from .batching import Batcher
from .service import Model

GRACE_SECONDS = 30  # for running requests, at the end
BACKLOG = 1024  # connections that wait to be accepted
SPARE_CONNECTIONS = 64  # beside those whose sentences can be in the queue

log = logging.getLogger("export.serve")


def run(model: Path, settings: ServeSettings) -> None:
    """Serve until SIGTERM (returns) or Ctrl-C (raises KeyboardInterrupt); running requests are finished first.

    Raises `UserError` for a folder or an address that can't be served.
    """
    open_folder(model, settings.precision)  # before anything waits for it
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listener = listening(settings.host, settings.port)
    port = listener.getsockname()[1]
    began = time.perf_counter()

    def ready() -> None:
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("serving %s on http://%s:%d (ready in %.1f s)", model, shown, port, time.perf_counter() - began)

    failures: list[Exception] = []

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    app = App(
        lambda: warmed(model, settings.threads, settings.precision, settings.verify),
        Batcher(settings.max_batch, settings.max_wait_ms / 1000, settings.max_queue, settings.workers),
        ready,
        failed,
    )
    config = uvicorn.Config(
        app.asgi,
        log_config=None,
        access_log=settings.access_log,
        ws="none",
        limit_concurrency=settings.max_queue + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal that ended it once more, for the handler that was there before.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda *_: None)
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in whose place asyncio puts its own
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()
    if failures:
        raise failures[0]
    log.info("stopped")


def listening(host: str, port: int) -> socket.socket:
    """A socket on the address; `UserError` says why there is none."""
    if not 0 <= port <= 65535:  # getaddrinfo takes what is left after dividing
        raise UserError(f"port={port} must be from 0 to 65535")
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


def warmed(folder: Path, threads: int | None, precision: str | None, verify: bool = True) -> Model:
    """The model after a first search, so that no request pays for what is set up then."""
    from export.runtime import OnnxTransformer

    model = OnnxTransformer(folder, threads=threads, precision=precision, verify=verify)
    for beam in (1, 2):
        model.translate(["."], beam=beam, max_new_tokens=3)
    return cast(Model, model)  # its cached_property is a property to us
