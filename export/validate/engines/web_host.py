"""Run ONNX Runtime Web for an engine, in Node (wasm_host.js) or in a page in headless Chromium (browser_page.js).

Messages in both directions: the header's length (uint32, little endian), the header (JSON), then the bytes of its
`tensors` one after another. Requests: {open, data: [{path, file}], level}, {session, outputs, tensors}.

Chromium needs no driver. Its profile is in a temporary folder, and it closes when its debugging pipe is closed.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import queue
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
from numpy.typing import NDArray

from export.web.assets import RUNTIME, installed_package

from .protocol import Unavailable

Array = NDArray
Reply = tuple[dict[str, Any], list[Array]]

TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_, "uint8": np.uint8, "int8": np.int8}
VARIABLE = "ONNXRUNTIME_WEB"
PLACES = ("node_modules", "tests/consumers/node/node_modules", ".consumers/node_modules")
HOST = Path(__file__).with_name("wasm_host.js")
NODE_BUILD = "ort.node.min.js"
PAGE = '<!doctype html><meta charset="utf-8"><title>validate</title><script type="module" src="page.js"></script>'
SCRIPT = Path(__file__).with_name("browser_page.js")
MEDIA_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
# Pages have threads only with cross-origin isolation.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}

STARTING = 90  # seconds until the page's first message
ANSWERING = 600  # seconds for a request: opening a model, or running it
POLL = 20  # seconds the page waits for a request before it asks again
ENDING = 5  # seconds for the browser to end by itself
POLL_SECONDS = 0.1  # seconds between two checks whether the program runs and whether the server should end


def find_package(runtime: str, *files: str) -> Path:
    """Find the folder of the npm package onnxruntime-web. Raises Unavailable if there is none.

    The variable ONNXRUNTIME_WEB may name the package's folder, or a folder with node_modules. Without the variable the
    package is looked for in `PLACES` of the current folder, then where the command `web` keeps it. Its dist must hold
    all `files`.
    """
    configured = os.environ.get(VARIABLE)
    places = [Path(configured), Path(configured, "node_modules")] if configured else [Path(place) for place in PLACES]
    folders = [folder for place in places for folder in (place, place / RUNTIME.name)]
    if not configured and (installed := installed_package()) is not None:
        folders.append(installed)
    for folder in folders:
        if all((folder / "dist" / name).is_file() for name in ("../package.json", *files)):
            return folder.resolve()
    where = f"{VARIABLE}={configured}" if configured else f"{', '.join(PLACES)}; {VARIABLE} is not set"
    raise Unavailable(f"runtime {runtime}: {RUNTIME.name} is not installed ({where}): npm install {RUNTIME.name}")


def message(header: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Iterator[bytes]:
    """Yield the parts of a message."""
    named = [(name, np.asarray(array, order="C")) for name, array in tensors]
    described = [{"name": name, "type": array.dtype.name, "dims": array.shape} for name, array in named]
    text = json.dumps({**header, "tensors": described}).encode()
    yield struct.pack("<I", len(text)) + text
    for _, array in named:
        yield array.tobytes()


def read_message(read: Callable[[int], bytes]) -> Reply:
    """Read a reply: (header, tensors). Raises RuntimeError with ONNX Runtime's message if the reply is an error.

    read: takes a number of bytes and returns exactly as many.
    """
    header = json.loads(read(*struct.unpack("<I", read(4))))
    if "error" in header:
        raise RuntimeError(header["error"])
    return header, [_tensor(entry, read) for entry in header.get("tensors", ())]


def _tensor(entry: Mapping[str, Any], read: Callable[[int], bytes]) -> Array:
    dtype, shape = np.dtype(TYPES[entry["type"]]), entry["dims"]
    return np.frombuffer(read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@dataclass
class _Exchange:
    """State shared by the server's threads and a `Host`. The request None ends the program."""

    package: Path
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    requests: queue.Queue[bytes | None] = field(default_factory=queue.Queue)
    replies: queue.Queue[bytes] = field(default_factory=queue.Queue)
    files: set[str] = field(default_factory=set)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a browser may end during an answer."""


class Host:
    """A program with sessions of ONNX Runtime Web, which answers this process's requests.

    The program loads its files from a server on localhost in this process. It posts each reply there and gets the next
    request as the answer. Every address contains a secret, and only files named in a request are served. The program
    ends with its `Host`. If this process is killed, the program ends too: its standard input closes, and the server no
    longer answers.
    """

    name: str
    """The program's name in messages."""
    telling = -1
    """Index of the line on standard error with the reason if the program ends."""

    def __init__(self, package: Path, command: Callable[[str], Sequence[str]], profile: str = ""):
        """Start the program. Raises RuntimeError if it doesn't start.

        package: the folder of onnxruntime-web. command: the server's address -> the program's command line. profile: a
        folder to remove at the end.
        """
        self.exchange, self.why = _Exchange(package), ""
        self.server = _Server(("127.0.0.1", 0), _handler(self.exchange))
        threading.Thread(target=self.server.serve_forever, args=[POLL_SECONDS], daemon=True).start()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - a full pipe would block the program
        self.process = subprocess.Popen(
            command(f"http://127.0.0.1:{self.server.server_port}/{self.exchange.secret}/"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C ends only this process, which then ends the program
        )
        self._finalizer = weakref.finalize(self, _end, self.process, self.server, self.exchange, self.errors, profile)
        self.versions, _ = self._reply(STARTING)

    def request(self, request: Mapping[str, Any], tensors: Iterable[tuple[str, Array]] = ()) -> Reply:
        """Send a request and return the reply: (header, tensors).

        Raises RuntimeError for an error of ONNX Runtime, or if the program has ended or is silent for ten minutes.
        """
        if not self._finalizer.alive:
            raise RuntimeError(self.why)
        if "open" in request:
            self.exchange.files = {request["open"], *(entry["file"] for entry in request["data"])}
        self.exchange.requests.put(b"".join(message(request, tensors)))
        return self._reply(ANSWERING)

    def close(self) -> None:
        self._finalizer()

    def _reply(self, seconds: float) -> Reply:
        for _ in range(round(seconds / POLL_SECONDS)):  # not by the clock: it goes on while a machine sleeps
            with suppress(queue.Empty):
                return read_message(io.BytesIO(self.exchange.replies.get(timeout=POLL_SECONDS)).read)
            if self.process.poll() is not None:
                self.why = f"{self.name} ended: {self._last_words()}"
                break
        else:
            self.why = f"{self.name} did not answer within {seconds:g} s"
        self.close()
        raise RuntimeError(self.why)

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[self.telling][:300] if lines else f"status {self.process.returncode}"


class NodeHost(Host):
    """ONNX Runtime Web in Node. Raises Unavailable if Node or onnxruntime-web is missing."""

    name, telling = "Node", 0

    def __init__(self, threads: int):
        if shutil.which("node") is None:
            raise Unavailable("runtime wasm needs Node.js: there is no program `node` (https://nodejs.org)")
        package = find_package("wasm", NODE_BUILD)
        super().__init__(package, lambda address: ["node", str(HOST), address, str(package), str(threads)])


def _handler(exchange: _Exchange) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are sent separately, which would take 40 ms

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
                    kind = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
                    self._head(200, os.fstat(file.fileno()).st_size, kind)
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
            """Log nothing."""

    return Handler


def _end(
    process: subprocess.Popen[bytes],
    server: _Server,
    exchange: _Exchange,
    errors: IO[bytes],
    profile: str,
) -> None:
    """End the program: ask it first, so that it can end its own processes, then kill the rest."""
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
    for _ in range(20):  # a browser's processes may still write
        shutil.rmtree(profile, ignore_errors=True)
        if not os.path.exists(profile):
            break
        time.sleep(0.05)


CHROMIUM = "CHROMIUM"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
MAC_APPS = ("Google Chrome", "Chromium", "Microsoft Edge")
# WebGPU on Linux, through Vulkan, and on the CPU if there is no GPU. No request to another host.
FLAGS = (
    "--headless --enable-unsafe-webgpu --enable-features=Vulkan --disable-gpu-watchdog --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions --disable-breakpad "
    "--no-default-browser-check --remote-debugging-pipe"
).split()
NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
# Chromium's debugging pipe: it reads from descriptor 3 (open but silent) and writes to 4 (discarded).
WITH_PIPE = 'exec "$@" 3<&0 4>/dev/null </dev/null'


def find_browser() -> str:
    """Find a Chromium browser: the program in the variable CHROMIUM, or a usual name, e.g. google-chrome."""
    if configured := os.environ.get(CHROMIUM):
        if (program := shutil.which(configured)) is None:
            raise Unavailable(f"runtime webgpu: {CHROMIUM}={configured}: there is no such program")
        return program
    apps = [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in MAC_APPS] if sys.platform == "darwin" else []
    for name in (*PROGRAMS, *apps):
        if (program := shutil.which(name)) is not None:
            return program
    raise Unavailable(
        f"runtime webgpu needs Chromium or Chrome: there is no {' or '.join(PROGRAMS[:3])}; install one (Debian: apt "
        f"install chromium), or name a program by the variable {CHROMIUM}"
    )


class Browser(Host):
    """ONNX Runtime Web in headless Chromium. Raises Unavailable if it doesn't start or lacks WebGPU."""

    name = "the browser"

    def __init__(self, package: Path, threads: int, adapter: str = ""):
        """package: the folder of onnxruntime-web. adapter: "software" computes on the CPU even if there is a GPU."""
        program, profile = find_browser(), tempfile.mkdtemp(prefix="validate-browser-")
        query = urlencode({"threads": threads, "adapter": adapter})
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox doesn't work as root
        flags = [*FLAGS, NOBODY_ELSE, f"--user-data-dir={profile}", *["--no-sandbox"] * is_root]
        shell = ["/bin/sh", "-c", WITH_PIPE, "sh", program, *flags]
        try:
            super().__init__(package, lambda address: [*shell, f"{address}?{query}"], profile)
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"runtime webgpu: {program}: {error}; name another browser by {CHROMIUM}") from error
