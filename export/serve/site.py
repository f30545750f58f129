"""A site written by `mlx-transformer web`: its files, with the headers by which browsers give a page shared memory for
threads (cross-origin isolation)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from export.web.write import UNLISTED, site_files

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
