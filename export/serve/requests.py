"""The body of a request, read within bounds, its fields checked, and errors as answers.

Every check raises `RequestError`: a status, and a line with the problem and a remedy.

A `Form` is the JSON schema of a body; /openapi.json and /docs are made from the table of routes. The schemas of
settings come from the dataclasses of options: types, bounds and help.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from html import escape
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_transformer.decoding.options import ID_FIELDS, Options
from mlx_transformer.page import card, data_table, page
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import FieldType, field_docs, field_types
from mlx_transformer.system.machine import __version__

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
    """Check a boolean."""
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


TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
TEXT = {"type": "string"}
TEXTS = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
ID_LIST = {"type": "array", "items": {"type": "integer"}}
TEXTS_OR_IDS = {"oneOf": [*TEXTS["oneOf"], ID_LIST, {"type": "array", "items": ID_LIST}]}
IDS, SEQUENCES = {**ID_LIST, "default": ()}, {"type": "array", "items": ID_LIST, "default": ()}
FLAG = {"type": "boolean"}


@dataclass(frozen=True)
class Form:
    """The form of a request's body. fields: JSON schema by name; example: a body, as JSON; other: a second form of
    the same path.

    >>> Form({"text": TEXT}, ["text"], '{"text": "x"}').schema.get("required")
    ['text']
    """

    fields: dict[str, Any]
    needed: list[str]
    example: str
    other: Form | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the body: these fields and no others."""
        return _object(self.fields, self.needed)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def number(default: int, meaning: str, least: int = 1, most: int | None = None) -> dict[str, Any]:
    """The schema of an integer field."""
    bound = {} if most is None else {"maximum": most}
    return {"type": "integer", "minimum": least, **bound, "default": default, "description": meaning}


def fields_of(of: type, names: Iterable[str]) -> dict[str, Any]:
    """The schemas of some fields of a dataclass of options."""
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    kinds, meanings = field_types(of), field_docs(of)
    return {name: field_schema(kinds[name], meanings[name], defaults[name]) for name in names if name in kinds}


def field_schema(kind: FieldType, meaning: str, default: Any) -> dict[str, Any]:
    """The schema of a field: type, choices, bounds, default, help."""
    schema: dict[str, Any] = {"type": [TYPES[kind.type], "null"] if kind.optional else TYPES[kind.type]}
    if kind.choices and kind.type is str:
        schema["enum"] = list(kind.choices)
    words = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
    bounds = {words[name]: value for name, value in kind.bounds._asdict().items() if math.isfinite(value)}
    return {**schema, **bounds, "default": default, "description": meaning}


def search_fields() -> dict[str, Any]:
    """The schemas of the settings of a search, within this server's limits."""
    schemas, meanings = fields_of(Options, SETTINGS), field_docs(Options)
    for name in SETTINGS:
        if name not in schemas:  # lists of token ids
            schemas[name] = {**(IDS if name in ID_FIELDS else SEQUENCES), "description": meanings[name]}
    for name, (least, most) in LIMITS.items():
        schemas[name] |= {"minimum": least, "maximum": most}
    return schemas


def openapi(routes: Iterable[Any], needs_key: bool) -> dict[str, Any]:
    """Describe the routes (`calls.Route`) in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for route in routes:
        summary = (route.answer.__doc__ or "").partition("\n")[0]
        answers = {"200": {"description": route.gives}, "4XX": _error(route.path), "5XX": _error(route.path)}
        operation: dict[str, Any] = {"summary": summary, "tags": [route.kind.label], "responses": answers}
        if "{" in route.path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
        if (form := route.takes) is not None:
            schema = {"oneOf": [form.schema, form.other.schema]} if form.other else form.schema
            content = {"schema": schema, "example": json.loads(form.example)}
            kinds = ("application/json", FORM, PARTS)
            operation["requestBody"] = {"required": True, "content": dict.fromkeys(kinds, content)}
        paths[route.path.replace(":path}", "}")] = {route.method.lower(): operation}
    document = {"openapi": "3.1.0", "info": {"title": "mlx-transformer", "version": __version__}, "paths": paths}
    if needs_key:
        document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"key": []}]
    return document


def _error(path: str) -> dict[str, Any]:
    inside = _object({"message": TEXT}, ["message"]) | {"additionalProperties": True}
    error = inside if path.startswith(OPENAI) else TEXT
    content = {"application/json": {"schema": _object({"error": error}, ["error"])}}
    return {"description": "what was wrong", "content": content}


def docs_page(description: dict[str, Any]) -> str:
    """Show `openapi`'s description as a page without further files."""
    parts = [
        f"<h1>mlx-transformer {escape(description['info']['version'])}</h1>",
        '<p class="note">What this server takes; <a href="openapi.json">openapi.json</a> has it for programs.</p>',
    ]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f'<p class="note">{escape(operation["summary"])}</p>')
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                command = f"curl -d '{json.dumps(content['example'])}' localhost:8000{path}"
                gives = operation["responses"]["200"]["description"]
                parts.append(card(f"<pre>{escape(command)}\n{escape(gives)}</pre>"))
                parts += [card(_table(form)) for form in content["schema"].get("oneOf", [content["schema"]])]
    return page("serve", "mlx-transformer", "".join(parts))


def _table(form: dict[str, Any]) -> str:
    rows = []
    for name, schema in form["properties"].items():
        needed = "needed" if name in form["required"] else json.dumps(schema["default"]) if "default" in schema else ""
        cells = [escape(text) for text in (_values(schema), needed, schema.get("description", ""))]
        rows.append([f"<code>{name}</code>", *cells])
    return data_table(["field", "takes", "default", "meaning"], rows, named=True)


def _values(schema: dict[str, Any]) -> str:
    if "oneOf" in schema:
        return "text or a list" if schema is TEXTS else "text, ids, or a list"
    if "enum" in schema:
        return ", ".join(schema["enum"])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:,}" for name, sign in words.items() if name in schema]
    return " ".join([{"string": "text"}.get(kind, kind), *bounds])
