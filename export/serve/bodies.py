"""The body of a request: read within its bounds, and understood as JSON or as a form."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from .requests import RequestError

MAX_BODY = 256 * 1024  # bytes
TOO_LARGE = f"body: more than {MAX_BODY} bytes; send the text in parts"
MAX_FIELDS = 1000  # of a form
FORM = "application/x-www-form-urlencoded"
TEXTS = ("q", "text", "source", "target", "format", "api_key")
"""The fields of a form that stay text; others are numbers and the like, written as in JSON."""


async def values_of(request: Request, seconds: float, example: str) -> dict[str, Any]:
    """Read a body and return its fields. `RequestError` shows `example` for what is no object; see `read` as well."""
    body, form = await read(request, seconds), request.headers.get("content-type", "").lower().startswith(FORM)
    # `curl -d` says of JSON that it is a form.
    values = _form(body) if form and not body.lstrip().startswith((b"{", b"[")) else _json(body, example)
    if not isinstance(values, dict):
        raise RequestError(400, f"body: an object is needed; send {example}")
    return values


async def read(request: Request, seconds: float) -> bytes:
    """Return the whole body. `RequestError` if it is too large, which its head may say already, or too slow."""
    body = bytearray()
    announced = request.headers.get("content-length", "0")
    try:
        async with asyncio.timeout(seconds):
            if announced.isdecimal() and int(announced[:20]) > MAX_BODY:
                raise RequestError(413, TOO_LARGE)
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise RequestError(413, TOO_LARGE)
    except TimeoutError:
        raise RequestError(408, f"body: not complete after {seconds:g} s; send it again") from None
    return bytes(body)


def _json(body: bytes, example: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"body: not JSON ({error}); send {example}") from None


def _form(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RequestError(400, f"body: no form ({error}); send q=Good+morning.&source=en&target=de") from None
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in values:
            values[name] = value if name in TEXTS else _plain(value)
        elif name in ("q", "text"):
            values[name] = [*([values[name]] if isinstance(values[name], str) else values[name]), value]
        else:
            raise RequestError(400, f"{name[:50]}: is given twice; give it once")
    return values


def _plain(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
