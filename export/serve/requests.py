"""The body of a request, read within bounds, its fields checked, and errors as answers.

Every check raises `RequestError`: a status and a line: the error, and what to do.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError

MAX_BODY = 256 * 1024  # bytes
TOO_LARGE = f"body: more than {MAX_BODY} bytes; send the text in parts"
MAX_FIELDS = 1000  # of a form
FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
TEXT_FIELDS = ("q", "text", "source", "target", "format", "api_key")
"""Fields of a form kept as text; the others are read as JSON, e.g. beam=4."""

# The server chooses its own batch size.
SETTINGS = tuple(field.name for field in fields(Options) if field.name != "batch_tokens")
LIMITS: dict[str, tuple[float, float]] = {  # narrower than in Options; the model bounds lengths (models.py)
    "beam": (1, 64),  # memory grows with it
    "n_best": (1, 64),
    "temperature": (0.01, 100),
    "top_p": (0.001, 1),
}
LONGEST_MESSAGE = 800  # characters; listing all settings takes half of them
OPENAI = "/v1/"  # these paths answer errors in OpenAI's form


class RequestError(Exception):
    """A refused request: HTTP status, a line for people, and OpenAI's code for programs."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(one_line(message))
        self.status, self.code = status, code


def one_line(message: str) -> str:
    """Cut a message to a line of bounded length; it may quote the client's text."""
    line = " ".join(message[:2000].split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " ..."


# Errors as answers.
def error_answer(
    path: str, status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
) -> Response:
    """Answer with an error, in the form for this path's clients."""
    headers = {"WWW-Authenticate": "Bearer", **(headers or {})} if status == 401 else headers
    return JSONResponse(error_content(path, status, message, code), status, headers)


def error_content(path: str, status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """{"error": message}; under /v1 an object, as OpenAI's clients expect."""
    message = one_line(message)
    if not path.startswith(OPENAI):
        return {"error": message}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = code or ("invalid_api_key" if status == 401 else None)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


# The body.
async def read_fields(request: Request, seconds: float, example: str) -> dict[str, Any]:
    """Read a body: a JSON object, a form or a multipart form. Errors show `example`."""
    body, kind = await read_body(request, seconds), request.headers.get("content-type", "")
    if kind.lower().startswith(PARTS):
        values = _form_fields(_multipart(body, kind))
    # curl -d labels JSON as a form.
    elif kind.lower().startswith(FORM) and not body.lstrip().startswith((b"{", b"[")):
        values = _form_fields(_urlencoded(body))
    else:
        values = _json(body, example)
    if not isinstance(values, dict):
        raise RequestError(400, f"body: an object is needed; send {example}")
    return values


async def read_body(request: Request, seconds: float) -> bytes:
    """Read a whole body; 413 if it is too large (Content-Length is checked first), 408 if it is too slow."""
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
        return json.loads(body, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"body: not JSON ({error}); send {example}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a field given twice: JSON readers disagree on which value counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _duplicate(next(name for name in names if names.count(name) > 1))
    return values


def _duplicate(name: str) -> RequestError:
    return RequestError(400, f"{name[:50]}: is given twice; give it once")


def _urlencoded(body: bytes) -> list[tuple[str, str]]:
    try:
        text = body.decode("ascii")
        return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RequestError(400, f"body: no form ({error}); send q=Good+morning.&source=en&target=de") from None


def _multipart(body: bytes, kind: str) -> list[tuple[str, str]]:
    """Fields of a multipart form (RFC 7578), as curl -F sends it."""
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
            raise RequestError(400, "body: a part has no name, or is a file; send text fields")
        try:
            pairs.append((name[1].decode(), value.decode()))
        except UnicodeDecodeError as error:
            raise RequestError(400, f"body: a part is not UTF-8 ({error})") from None
    return pairs


def _form_fields(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in values:
            values[name] = value if name in TEXT_FIELDS else _json_or_text(value)
        elif name in ("q", "text"):  # several texts
            values[name] = [*([values[name]] if isinstance(values[name], str) else values[name]), value]
        else:
            raise _duplicate(name)
    return values


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# Checks of fields.
def given(values: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Drop fields that are null, i.e. not given; refuse unknown fields."""
    known = tuple(known)
    values = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name not in known:
            raise unknown_field(name, known)
    return values


def unknown_field(name: str, known: Iterable[str]) -> RequestError:
    return RequestError(400, f"{name[:50]!r}: no such setting; there are {', '.join(known)}")


def check_count(subject: str, count: int, most: int) -> None:
    """Refuse a request with too many items. subject: the count in words, e.g. "3 sentences"."""
    if count > most:
        raise RequestError(413, f"{subject}, at most {most}; send it in parts")


def flag(name: str, value: Any) -> bool:
    """Check true or false."""
    if not isinstance(value, bool):
        raise RequestError(400, f"{name}: must be true or false")
    return value


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check an integer and its bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f", at most {most}" if most is not None else ""
        raise RequestError(400, f"{name}: must be a whole number of at least {least}{bound}")
    return value


def texts(name: str, value: Any) -> list[str]:
    """Check a string or a list of strings; returns a list."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise RequestError(400, f"{name}: must be a string or a list of strings")
    return lines


def texts_or_ids(name: str, value: Any) -> list[str] | list[list[int]]:
    """Check texts or rows of token ids; a single text or row becomes a list of length 1. Never empty."""
    if isinstance(value, list) and value and all(type(id) is int for id in value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        if not all(row and all(type(id) is int for id in row) for row in value):
            raise RequestError(400, f"{name}: a row of ids must be a list of at least one whole number")
        return value
    strings = texts(name, value)
    if not strings:
        raise RequestError(400, f"{name}: must hold at least one text, or one row of ids")
    return strings


def search_options(values: dict[str, Any]) -> dict[str, Any]:
    """Check settings of a search against `Options` and LIMITS; returns them sorted by name."""
    for name in ("early_stopping", "sample"):
        flag(name, values.get(name, False))
    try:
        options = Options(**values)
    except UserError as error:
        raise RequestError(400, str(error)) from None
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(options, name) <= most:
            raise RequestError(400, f"{name}={values[name]}: this server takes {least} to {most}")
    return dict(sorted(values.items()))
