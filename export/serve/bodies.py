"""The body of a request: read within its bounds, and understood as JSON or as a form."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from .requests import RequestError

MAX_BODY = 256 * 1024  # bytes
TOO_LARGE = f"body: more than {MAX_BODY} bytes; send the text in parts"
MAX_FIELDS = 1000  # of a form
FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
TEXTS = ("q", "text", "source", "target", "format", "api_key")
"""The fields of a form that stay text; others are numbers and the like, written as in JSON."""


async def values_of(request: Request, seconds: float, example: str) -> dict[str, Any]:
    """Read a body and return its fields. `RequestError` shows `example` for what is no object; see `read` as well."""
    body, kind = await read(request, seconds), request.headers.get("content-type", "")
    if kind.lower().startswith(PARTS):
        values = _fields(_parts(body, kind))
    # `curl -d` says of JSON that it is a form.
    elif kind.lower().startswith(FORM) and not body.lstrip().startswith((b"{", b"[")):
        values = _fields(_pairs(body))
    else:
        values = _json(body, example)
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
        return json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"body: not JSON ({error}); send {example}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object, of which none may have two values: readers differ on which one counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _twice(next(name for name in names if names.count(name) > 1))
    return values


def _twice(name: str) -> RequestError:
    return RequestError(400, f"{name[:50]}: is given twice; give it once")


def _pairs(body: bytes) -> list[tuple[str, str]]:
    try:
        text = body.decode("ascii")
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RequestError(400, f"body: no form ({error}); send q=Good+morning.&source=en&target=de") from None


def _parts(body: bytes, kind: str) -> list[tuple[str, str]]:
    """Return the fields of a form in parts (RFC 7578), as `curl -F` sends it."""
    boundary = re.search(r'boundary=(?:"([^"]+)"|([^\s;]+))', kind, re.IGNORECASE)
    if boundary is None:
        raise RequestError(400, "body: no form: its Content-Type names no boundary")
    line = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1")
    first, *parts = (b"\r\n" + body).split(line, MAX_FIELDS + 1)
    if first or not parts or not parts.pop().startswith(b"--"):
        raise RequestError(400, f"body: no form of at most {MAX_FIELDS} parts between its boundaries")
    pairs = []
    for part in parts:
        head, _, value = part.partition(b"\r\n\r\n")
        name = re.search(rb'\bname="([^"]*)"', head)
        if name is None or b"filename=" in head:
            raise RequestError(400, "body: a part has no name, or is a file; send texts alone")
        try:
            pairs.append((name[1].decode(), value.decode()))
        except UnicodeDecodeError as error:
            raise RequestError(400, f"body: a part is not UTF-8 ({error})") from None
    return pairs


def _fields(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in values:
            values[name] = value if name in TEXTS else _plain(value)
        elif name in ("q", "text"):
            values[name] = [*([values[name]] if isinstance(values[name], str) else values[name]), value]
        else:
            raise _twice(name)
    return values


def _plain(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
