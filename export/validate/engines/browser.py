"""Headless Chromium with one page, which gets all it loads from this process and answers requests: no driver.

The page (browser_page.js) asks a server on localhost for the next request and brings the reply to the one before. Every
address has a secret in it, and of files only those are handed out that a request names. The browser has a profile in a
temporary folder. It ends with its `Browser` or with this process, however that ends: Chromium closes when its debugging
pipe is closed.
"""

from __future__ import annotations

import http.server
import io
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, urlencode, urlsplit

from numpy.typing import NDArray

from .protocol import Unavailable
from .web_host import Reply, message, read_message

Array = NDArray

VARIABLE = "CHROMIUM"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
MAC_APPS = ("Google Chrome", "Chromium", "Microsoft Edge")
PAGE = '<!doctype html><meta charset="utf-8"><title>validate</title><script type="module" src="page.js"></script>'
SCRIPT = Path(__file__).with_name("browser_page.js")
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
# Without isolation a page has no threads.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}
# WebGPU on Linux too, through Vulkan, and on the processor where there is no GPU. No request to any other host.
FLAGS = (
    "--headless --enable-unsafe-webgpu --enable-features=Vulkan --disable-gpu-watchdog --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions --disable-breakpad "
    "--no-default-browser-check --remote-debugging-pipe"
).split()
NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# The debugging pipe is read from descriptor 3 and written to 4: the one never says anything, the other nobody reads.
WITH_PIPE = 'exec "$@" 3<&0 4>/dev/null </dev/null'

STARTING = 90  # seconds until the page speaks
ANSWERING = 600  # seconds for one request: opening a model, or one run of it
POLL = 20  # seconds that the page waits for a request before it asks again
ENDING = 5  # seconds for the browser to end by itself
POLL_SECONDS = 0.1  # seconds between two looks whether it still runs


def find_browser() -> str:
    """Find a browser made of Chromium: the program that the variable CHROMIUM names, or one under its usual names."""
    if configured := os.environ.get(VARIABLE):
        if (program := shutil.which(configured)) is None:
            raise Unavailable(f"runtime webgpu: {VARIABLE}={configured}: there is no such program")
        return program
    apps = [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in MAC_APPS] if sys.platform == "darwin" else []
    for name in (*PROGRAMS, *apps):
        if (program := shutil.which(name)) is not None:
            return program
    raise Unavailable(
        f"runtime webgpu needs Chromium or Chrome: there is no {' or '.join(PROGRAMS[:3])}; install one (Debian: apt "
        f"install chromium), or name a program by the variable {VARIABLE}"
    )


@dataclass
class _Exchange:
    """What the server's threads share with a `Browser`. A request is None when there will be no more."""

    package: Path
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    requests: queue.Queue[bytes | None] = field(default_factory=queue.Queue)
    replies: queue.Queue[bytes] = field(default_factory=queue.Queue)
    files: set[str] = field(default_factory=set)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that ends while it is answered is no news."""


class Browser:
    """Requests as web_host.py describes them. `Unavailable` where the browser doesn't start or lacks WebGPU."""

    def __init__(self, package: Path, threads: int, adapter: str = ""):
        """package: of onnxruntime-web. adapter: "software" computes on the processor, though there be a GPU."""
        self.program, self.exchange, self.why = find_browser(), _Exchange(package), ""
        self.server = _Server(("127.0.0.1", 0), _handler(self.exchange))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        query = urlencode({"threads": threads, "adapter": adapter})
        address = f"http://127.0.0.1:{self.server.server_port}/{self.exchange.secret}/?{query}"
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would block it
        profile = tempfile.mkdtemp(prefix="validate-browser-")
        flags = [*FLAGS, NOBODY_ELSE, f"--user-data-dir={profile}", *["--no-sandbox"] * _is_root()]
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", WITH_PIPE, "sh", self.program, *flags, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        self._finalizer = weakref.finalize(self, _end, self.process, self.server, self.exchange, self.errors, profile)
        try:
            self.versions, _ = self._reply(STARTING)
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"runtime webgpu: {self.program}: {error}; name another browser by {VARIABLE}") from error

    def request(self, request: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Reply:
        """As `Host` says; `RuntimeError` also where the browser ended or is silent for ten minutes."""
        if not self._finalizer.alive:
            raise RuntimeError(self.why)
        if "open" in request:
            self.exchange.files = {request["open"], *(entry["file"] for entry in request["data"])}
        self.exchange.requests.put(b"".join(message(request, tensors)))
        return self._reply(ANSWERING)

    def close(self) -> None:
        self._finalizer()

    def _reply(self, seconds: float) -> Reply:
        for _ in range(round(seconds / POLL_SECONDS)):  # not the clock's seconds, which pass while a machine sleeps
            with suppress(queue.Empty):
                return read_message(io.BytesIO(self.exchange.replies.get(timeout=POLL_SECONDS)).read)
            if self.process.poll() is not None:
                self.why = f"the browser ended: {self._last_words()}"
                break
        else:
            self.why = f"the browser did not answer within {seconds:g} s"
        self.close()
        raise RuntimeError(self.why)

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"status {self.process.returncode}"


def _handler(exchange: _Exchange) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            name = address.path.removeprefix(f"/{exchange.secret}/")
            if name == address.path:
                self._say(404)
            elif name == "":
                self._say(200, PAGE.encode(), "text/html")
            elif name == "page.js":
                self._file(SCRIPT)
            elif name.startswith("ort/") and name.count("/") == 1:
                self._file(exchange.package / "dist" / name.removeprefix("ort/"))
            elif name == "file" and (path := parse_qs(address.query).get("path", [""])[0]) in exchange.files:
                self._file(Path(path))
            else:
                self._say(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != f"/{exchange.secret}/next":
                return self._say(404)
            if body:
                exchange.replies.put(body)
            try:
                request = exchange.requests.get(timeout=POLL)
            except queue.Empty:
                return self._say(204)
            return self._say(410) if request is None else self._say(200, request)

        def _file(self, path: Path) -> None:
            try:
                with path.open("rb") as file:
                    self._head(200, os.fstat(file.fileno()).st_size, TYPES.get(path.suffix, "application/octet-stream"))
                    shutil.copyfileobj(file, self.wfile)
            except FileNotFoundError:
                self._say(404)

        def _say(self, status: int, body: bytes = b"", kind: str = "application/octet-stream") -> None:
            self._head(status, len(body), kind)
            self.wfile.write(body)

        def _head(self, status: int, length: int, kind: str) -> None:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(length)}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing on standard error."""

    return Handler


def _is_root() -> bool:
    """Say whether this is root's process: Chromium's sandbox can't be made by root."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _end(
    process: subprocess.Popen[bytes],
    server: _Server,
    exchange: _Exchange,
    errors: IO[bytes],
    profile: str,
) -> None:
    """End the browser, politely first, so that it takes its own processes with it."""
    exchange.requests.put(None)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    server.shutdown()
    server.server_close()
    for file in (process.stdin, errors):
        if file is not None:
            file.close()
    for _ in range(20):  # its processes may still write
        shutil.rmtree(profile, ignore_errors=True)
        if not os.path.exists(profile):
            break
        time.sleep(0.05)
