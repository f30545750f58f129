"""The parts of answers that all endpoints share: errors in the form that the path's clients read, and who has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mlx_transformer.system.errors import UserError

from .batching import EndingError
from .openai_forms import error_of
from .requests import EXAMPLE, one_line

OPENAI = "/v1/"
"""Paths of OpenAI's clients begin so."""
HELP = f"POST /translate {EXAMPLE}, /translate/stream, /v1/completions, /v1/embeddings, /rerank, /predict; "
HELP += "GET /docs, /health, /metrics\n"
OPENAI_HELP = "GET /v1/models; POST /v1/completions to decoders, /v1/embeddings and /v1/rerank to encoders; GET /docs"
FAULT = "a fault of the server; its log says more"
ENDING = "the server ends; try again in 1 s"

log = logging.getLogger("export.serve")


def error_answer(
    path: str, status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
) -> Response:
    """Answer that a request failed: {"error": message}, or what OpenAI's clients read."""
    headers = {"WWW-Authenticate": "Bearer", **(headers or {})} if status == 401 else headers
    return JSONResponse(error_content(path, status, message, code), status, headers)


def error_content(path: str, status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Write the same as a body."""
    message = one_line(message)
    return error_of(status, message, code) if path.startswith(OPENAI) else {"error": message}


async def http_error(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that isn't there."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{error.detail}; {OPENAI_HELP if path.startswith(OPENAI) else HELP.strip()}"
    return error_answer(path, error.status_code, message, dict(error.headers or {}))


async def server_error(request: Request, _: Exception) -> Response:
    """Answer where an endpoint raised what it should not have."""
    return error_answer(request.url.path, 500, FAULT)


def broken_off(path: str, error: Exception) -> dict[str, Any]:
    """Say in the last event of a stream why it ends, and log what is no fault of the client's."""
    if isinstance(error, EndingError):
        return error_content(path, 503, ENDING)
    if isinstance(error, UserError):
        return error_content(path, 400, str(error))
    log.error("POST %s failed", path, exc_info=error)
    return error_content(path, 500, FAULT)


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of `work`; when the client leaves, it is cancelled and `ClientDisconnect` raised."""
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
